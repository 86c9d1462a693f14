#include "knapformer/torch/sample_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

constexpr int64_t kAlignment = 16;  // bytes: of the widest element

int64_t aligned(int64_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

at::Tensor checked(const at::Tensor& tensor, const std::string& name) {
  if (!tensor.defined()) throw_argument(name, "no tensor", "a tensor");
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || !tensor.is_cpu()) {
    throw_argument(name, text("a tensor of layout ", tensor.layout(), " on ", tensor.device()),
                   "a dense tensor on cpu");
  }
  if (tensor.requires_grad()) throw_argument(name, "a tensor that requires a gradient", "one without: none travels");
  return tensor.resolve_conj().resolve_neg().contiguous();
}

void write_record(std::byte* out, const SampleTensors& tensors) {
  std::vector<int64_t> header;
  for (const at::Tensor& tensor : tensors) {
    header.push_back(static_cast<int64_t>(tensor.scalar_type()));
    header.push_back(tensor.dim());
    header.insert(header.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  const size_t header_bytes = header.size() * sizeof(int64_t);
  std::memcpy(out, header.data(), header_bytes);
  out += aligned(static_cast<int64_t>(header_bytes));
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) std::memcpy(out, tensor.const_data_ptr(), tensor.nbytes());
    out += aligned(static_cast<int64_t>(tensor.nbytes()));
  }
}

/// The tensors of `record`, which is a tensor of bytes, as views.
SampleTensors read_record(const at::Tensor& record, size_t num_tensors) {
  const auto* next = static_cast<const int64_t*>(record.const_data_ptr());
  std::vector<std::pair<at::ScalarType, std::vector<int64_t>>> kinds;  // dtype and shape
  int64_t offset = 0;
  for (size_t i = 0; i < num_tensors; ++i) {
    const int64_t *shape = next + 2, *end = shape + next[1];
    kinds.emplace_back(static_cast<at::ScalarType>(next[0]), std::vector(shape, end));
    offset += (end - next) * static_cast<int64_t>(sizeof(int64_t));
    next = end;
  }
  offset = aligned(offset);
  SampleTensors tensors;
  for (const auto& [dtype, shape] : kinds) {
    const int64_t num_bytes = static_cast<int64_t>(c10::elementSize(dtype)) * c10::multiply_integers(shape);
    tensors.push_back(record.narrow(0, offset, num_bytes).view(dtype).view(shape));
    offset += aligned(num_bytes);
  }
  return tensors;
}

std::vector<int64_t> splits_of(const auto& records, int32_t num_peers) {
  std::vector<int64_t> splits(static_cast<size_t>(num_peers));
  for (const auto& record : records) splits[record.peer] += record.num_bytes;
  return splits;
}

}  // namespace

Samples::Samples(std::vector<SampleField> fields, std::vector<SampleTensors> samples, std::vector<int64_t> seq_lens)
    : fields_(std::move(fields)), samples_(std::move(samples)), seq_lens_(std::move(seq_lens)) {
  if (seq_lens_.size() != samples_.size()) {
    throw_argument("seq_lens", text(seq_lens_.size(), " lengths"),
                   text("one of each of ", samples_.size(), " samples"));
  }
  for (size_t s = 0; s < samples_.size(); ++s) {
    if (seq_lens_[s] < 1) throw_argument(text("seq_lens[", s, "]"), seq_lens_[s], "at least 1");
    KNAPFORMER_ASSERT(samples_[s].size() == fields_.size());
    for (size_t f = 0; f < fields_.size(); ++f) {
      const std::string name = text("sample ", s, "['", fields_[f].name, "']");
      at::Tensor& tensor = samples_[s][f];
      tensor = checked(tensor, name);
      if (fields_[f].per_token && (tensor.dim() < 1 || tensor.size(0) != seq_lens_[s])) {
        throw_argument(name, text("a tensor of shape ", tensor.sizes()),
                       text(seq_lens_[s], " rows, one for each token of the sample"));
      }
    }
  }
}

std::vector<SampleBytes> Samples::bytes() const {
  std::vector<SampleBytes> all;
  for (const SampleTensors& tensors : samples_) {
    int64_t header = 0;
    SampleBytes bytes;
    for (size_t f = 0; f < tensors.size(); ++f) {
      const at::Tensor& tensor = tensors[f];
      header += (2 + tensor.dim()) * static_cast<int64_t>(sizeof(int64_t));
      const auto num_bytes = static_cast<int64_t>(tensor.nbytes());
      if (fields_[f].per_token) bytes.per_token += num_bytes / tensor.size(0);
      bytes.fixed += fields_[f].per_token ? kAlignment : aligned(num_bytes);  // with what its end is padded by, at most
    }
    bytes.fixed += aligned(header);
    all.push_back(bytes);
  }
  return all;
}

SampleTensors Samples::chunk_of(size_t sample, const Chunk& chunk) const {
  SampleTensors tensors = samples_[sample];
  for (size_t f = 0; f < tensors.size(); ++f) {
    if (fields_[f].per_token) tensors[f] = tensors[f].narrow(0, chunk.first_token, chunk.num_tokens);
  }
  return tensors;
}

SampleExchange::SampleExchange(std::shared_ptr<CommGroup> group, Rank rank, const Plan& plan, const Samples& own,
                               const std::vector<SampleBytes>& bytes, bool pinned)
    : group_(std::move(group)), num_fields_(own.fields().size()) {
  const SequenceLengths& of_step = plan.input().sequences.seq_lens;
  std::vector<Record> sent;
  for (int32_t k = 0; k < plan.num_micro_batches(); ++k) {
    const MicroBatchPlan& micro_batch = plan.plans()[k];
    const std::vector<SequenceId> ids = plan.sequences_of(k);
    const std::span<const int32_t> own_rows = micro_batch.chunks_on(rank);
    std::vector<int32_t> positions(micro_batch.chunks().size());  // of this rank's chunks
    for (size_t i = 0; i < own_rows.size(); ++i) positions[own_rows[i]] = static_cast<int32_t>(i);
    chunks_.emplace_back(own_rows.size());
    for (size_t c = 0; c < micro_batch.chunks().size(); ++c) {
      const Chunk& chunk = micro_batch.chunks()[c];
      const SequenceId id = ids[chunk.sequence.index()];
      const Rank home = of_step.home_of(id);
      if (home != rank && chunk.rank != rank) continue;
      const SampleBytes& of_sample = bytes[id.index()];
      Record record{.micro_batch = k,
                    .position = positions[c],
                    .chunk = chunk,
                    .num_bytes = aligned(of_sample.fixed + of_sample.per_token * chunk.num_tokens)};
      if (home == rank) record.sample = id.index() - of_step.first_of(rank).index();
      if (home == chunk.rank) {
        chunks_[k][record.position] = own.chunk_of(record.sample, chunk);
        continue;
      }
      record.peer = (home == rank ? chunk.rank : home).value;
      (home == rank ? sent : received_records_).push_back(record);
    }
  }
  for (std::vector<Record>* records : {&sent, &received_records_})
    std::ranges::stable_sort(*records, {}, &Record::peer);
  if (group_) launch(sent, own, pinned);
}

void SampleExchange::launch(const std::vector<Record>& sent, const Samples& own, bool pinned) {
  RECORD_USER_SCOPE("knapformer::start samples");
  std::vector<int64_t> send_splits = splits_of(sent, group_->num_ranks());
  std::vector<int64_t> recv_splits = splits_of(received_records_, group_->num_ranks());
  const at::Device device = group_->control_device();
  const at::TensorOptions options = at::TensorOptions().dtype(at::kByte);
  const at::Tensor packed = at::empty({c10::sum_integers(send_splits)}, options.pinned_memory(!device.is_cpu()));
  auto* next = static_cast<std::byte*>(packed.mutable_data_ptr());
  for (const Record& record : sent) {
    write_record(next, own.chunk_of(record.sample, record.chunk));
    next += record.num_bytes;
  }
  sent_ = packed.to(device, /*non_blocking=*/true);
  received_ =
      at::empty({c10::sum_integers(recv_splits)}, options.device(device).pinned_memory(pinned && device.is_cpu()));
  work_ = group_->start_all_to_all(received_, sent_, std::move(recv_splits), std::move(send_splits), "samples");
}

std::vector<std::vector<SampleTensors>> SampleExchange::finish() {
  if (!group_) return std::move(chunks_);
  group_->wait(*work_, received_.device(), "samples", /*on_host=*/true);
  const at::Tensor bytes = received_.to(at::kCPU);
  int64_t offset = 0;
  for (const Record& record : received_records_) {
    chunks_[record.micro_batch][record.position] = read_record(bytes.narrow(0, offset, record.num_bytes), num_fields_);
    offset += record.num_bytes;
  }
  return std::move(chunks_);
}

}  // namespace knapformer
