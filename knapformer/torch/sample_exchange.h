// Samples that move before the model sees them: from the rank that loaded them to those that compute them.
//
// A sample goes to every rank that holds a chunk of it, as one record: its tensors, of any dtype and shape. Tensors
// with a row for each token are cut to the chunk's tokens, the others go whole.
//
//   record = | of each tensor: dtype, dimensions, sizes | bytes of the first tensor | of the second | ... |
//
// The header and each tensor begin at a multiple of 16 bytes.
//
// All ranks know the bytes of all samples, which are gathered with their lengths (comm/gather_lengths.h). So every rank
// knows how much each rank sends to each other, and one all-to-all of bytes suffices, without an exchange of sizes.
// Received tensors are views of its buffer. No gradient travels, and nothing comes back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "knapformer/core/plan/plan.h"
#include "knapformer/torch/comm/comm_group.h"
#include "knapformer/torch/comm/gather_lengths.h"

namespace knapformer {

/// A tensor that every sample has.
struct SampleField {
  std::string name;
  bool per_token = false;
};

/// The tensors of one sample or chunk, in the order of the fields.
using SampleTensors = std::vector<at::Tensor>;

/// What one rank loaded.
class Samples {
 public:
  /// seq_lens: tokens of each sample. Throws ArgumentError where a tensor is not dense or not on the CPU, where it
  /// requires a gradient, or where a per-token tensor has another number of rows than the sample has tokens.
  Samples(std::vector<SampleField> fields, std::vector<SampleTensors> samples, std::vector<int64_t> seq_lens);

  const std::vector<SampleField>& fields() const { return fields_; }
  const std::vector<int64_t>& seq_lens() const { return seq_lens_; }
  /// The bytes of each sample.
  std::vector<SampleBytes> bytes() const;
  /// The chunk's tensors, as views.
  SampleTensors chunk_of(size_t sample, const Chunk& chunk) const;

 private:
  std::vector<SampleField> fields_;
  std::vector<SampleTensors> samples_;  // contiguous
  std::vector<int64_t> seq_lens_;
};

/// The exchange of an optimizer step's samples.
class SampleExchange {
 public:
  /// Packs, and launches the all-to-all. Collective. group: null for one rank alone. bytes: of all samples of the step,
  /// by id. pinned: whether what is received lies in pinned memory, from which an accelerator copies without a wait of
  /// the host.
  SampleExchange(std::shared_ptr<CommGroup> group, Rank rank, const Plan& plan, const Samples& own,
                 const std::vector<SampleBytes>& bytes, bool pinned);

  /// Waits. Returns by micro-batch the chunks of this rank, in the order of its rows. To be called once.
  std::vector<std::vector<SampleTensors>> finish();

 private:
  struct Record {  // a chunk that is sent or received
    int32_t peer = 0;
    int32_t micro_batch = 0;
    int32_t position = 0;  // at the receiver: among this rank's chunks of the micro-batch
    size_t sample = 0;     // at the sender: among this rank's samples
    Chunk chunk;
    int64_t num_bytes = 0;
  };

  /// Packs `sent`. Records are ordered by peer, then by micro-batch, then by sequence.
  void launch(const std::vector<Record>& sent, const Samples& own, bool pinned);

  std::shared_ptr<CommGroup> group_;
  size_t num_fields_;
  std::vector<std::vector<SampleTensors>> chunks_;
  std::vector<Record> received_records_;
  at::Tensor sent_, received_;  // in flight
  WorkPtr work_;
};

}  // namespace knapformer
