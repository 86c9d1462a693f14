#include "knapformer/torch/balancer.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <charconv>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "knapformer/core/error.h"
#include "knapformer/torch/balancer_step.h"

namespace knapformer {
namespace {

/// Whether ranks exchange with nobody: all rows stay where they are.
bool is_identity(const ExchangeTable& table) { return table.num_peers == 1; }

/// The values of a call's tensors without the call: views, not the tensors themselves, as an exchange gives.
at::Tensor as_view(const at::Tensor& tensor) { return tensor.view(tensor.sizes()); }

std::vector<at::Tensor> as_views(at::TensorList tensors) {
  std::vector<at::Tensor> views;
  for (const at::Tensor& tensor : tensors) views.push_back(as_view(tensor));
  return views;
}

void check_rows(const at::Tensor& tensor, std::string_view argument, int64_t num_rows, std::string_view rows,
                int64_t min_dims) {
  if (!tensor.defined()) throw_argument(argument, "no tensor", "a tensor");
  if (tensor.is_quantized()) throw_argument(argument, "a quantized tensor", "one that is not");
  if (tensor.layout() != at::kStrided) {
    throw_argument(argument, text("a tensor of layout ", tensor.layout()), "a dense tensor");
  }
  if (tensor.dim() < min_dims) {
    throw_argument(argument, text("a tensor of shape ", tensor.sizes()), text("at least ", min_dims, " dimensions"));
  }
  if (tensor.size(0) != num_rows) {
    throw_argument(argument, text(tensor.size(0), " rows (shape ", tensor.sizes(), ")"),
                   text(num_rows, " rows, one for each ", rows));
  }
}

void check_device(const at::Tensor& tensor, std::string_view argument, const at::Tensor& as, std::string_view as_name) {
  if (tensor.device() != as.device())
    throw_argument(argument, tensor.device(), text(as.device(), ", the device of ", as_name));
}

/// Of the tensor whose device the call's tables go to.
void check_has_memory(const at::Tensor& tensor, std::string_view argument) {
  if (tensor.is_meta()) throw_argument(argument, "a tensor on meta", "one on a device that has its values");
}

/// Keys of this library in a group's store.
constexpr const char* kStorePrefix = "knapformer/";
/// Of what ranks say to each other. Ranks of different versions do not work together.
constexpr int32_t kProtocolVersion = 1;

/// What one balancer's ranks share in the group's store.
struct SharedStore {
  std::string prefix;
  std::shared_ptr<ErrorBoard> board;
};

SharedStore join_store(c10d::ProcessGroup& group) {
  const c10::intrusive_ptr<c10d::Store> store = group.getStore();
  if (!store) throw_argument("group", "a group without a store", "one with a store, by which its ranks agree");
  // A number of this balancer that its ranks share: each counts those that it made on this group, and making one is
  // collective.
  const int32_t rank = group.getRank();
  const std::string prefix = text(kStorePrefix, "number ", store->add(text(kStorePrefix, rank), 1));
  return {.prefix = prefix,
          .board = std::make_shared<ErrorBoard>(c10::make_intrusive<c10d::PrefixStore>(prefix, store), rank)};
}

/// The same on all ranks where the group has a name, as groups made by torch.distributed have.
std::string channel_name(const c10d::ProcessGroup& group) {
  try {
    return text(kStorePrefix, group.getGroupName());
  } catch (const std::exception&) {
    return text(kStorePrefix, "group");
  }
}

/// All digits, so that unequal numbers differ.
std::string exact_text(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  KNAPFORMER_ASSERT(error == std::errc());
  return {buffer, end};
}

std::string element(std::string_view list, size_t i) { return text(list, "[", i, "]"); }

std::string route_label(size_t num_features, size_t num_sequence_features) {
  std::string label = "route(x";
  for (size_t i = 0; i < num_features; ++i) label.append(",").append(element("features", i));
  for (size_t i = 0; i < num_sequence_features; ++i) label.append(",").append(element("sequence_features", i));
  return label + ")";
}

/// What there is a row for, in errors.
constexpr const char* kOwnToken = "token of this rank's sequences";
constexpr const char* kOwnSequence = "sequence of this rank";
constexpr const char* kChunkToken = "token of the chunks that this rank holds";

/// What ranks must agree on, or they would plan differently.
void add_options(Statement& statement, const BalancerOptions& options) {
  statement.add("gamma", exact_text(options.workload.gamma));
  statement.add("mask_factor", exact_text(options.workload.mask_factor));
  statement.add("solver", options.solver);
  statement.add("effort", std::to_string(options.effort.moves));
  statement.add("mask", options.mask.str());
  const ClusterModel& cluster = options.cluster;
  std::string figures = std::to_string(cluster.ranks_per_node);
  for (const double figure :
       {cluster.flops_per_s, cluster.node_bytes_per_s, cluster.network_bytes_per_s, cluster.bytes_per_number}) {
    figures += ' ' + exact_text(figure);
  }
  statement.add("cluster", figures);
  std::string speeds;
  for (const double speed : options.rank_speed) speeds += exact_text(speed) + ' ';
  statement.add("rank_speed", speeds);
  statement.add("max_tokens_per_rank", std::to_string(options.max_tokens_per_rank));
}

}  // namespace

SequenceBalancer::SequenceBalancer(std::string_view topology, BalancerOptions options, ProcessGroupPtr group,
                                   const MakeBagGroup& make_bag_group)
    : options_(std::move(options)) {
  const auto parse = [&](int32_t num_ranks) {
    topology_ = Topology::parse(topology, num_ranks);
    check_options();
    feedback_ = StepFeedback(options_.workload.gamma, options_.rank_speed, topology_.num_ranks());
  };
  if (!group || group->getSize() == 1) {
    parse(1);
    return;
  }
  rank_ = Rank(group->getRank());
  const auto [prefix, board] = join_store(*group);
  lookout_ = std::make_shared<Lookout>(board);
  all_ = Channel::make(channel_name(*group), group, prefix + "/all", lookout_);
  lookout_->board()->guard([&, &prefix = prefix] {
    parse(group->getSize());
    Statement statement("SequenceBalancer");
    statement.add("version", std::to_string(kProtocolVersion));
    statement.add("topology", topology_.str());
    add_options(statement, options_);
    all_->agreement().agree(statement);
    gatherer_ = std::make_shared<LengthGatherer>(all_);
    bag_ = join_bag(group, prefix + "/bag", make_bag_group);
    all_->agreement().agree(Statement("SequenceBalancer, with the groups of all bags"));
  });
}

void SequenceBalancer::refuse(const ProcessGroupPtr& group, const std::exception& error) noexcept {
  if (!group || group->getSize() == 1) return;
  try {
    join_store(*group).board->post(error);
  } catch (...) {  // NOLINT: a store that is gone must not hide the error itself
  }
}

SequenceBalancer::~SequenceBalancer() = default;

void SequenceBalancer::check_options() {
  const std::vector<std::vector<int64_t>> none(static_cast<size_t>(topology_.num_ranks()));
  // A plan checks its input.
  static_cast<void>(plan_with(options_, topology_, {.lengths = SequenceLengths::from_lists(none)}, 1));
}

std::shared_ptr<Channel> SequenceBalancer::join_bag(const ProcessGroupPtr& group, const std::string& store_prefix,
                                                    const MakeBagGroup& make_bag_group) {
  const BagId id = topology_.bag_of(rank_);
  const Bag& bag = topology_.bag(id);
  if (bag.num_ranks == 1) return nullptr;
  std::vector<int64_t> ranks;
  for (int32_t i = 0; i < bag.num_ranks; ++i) ranks.push_back(bag.first_rank.value + i);
  const ProcessGroupPtr bag_group = make_bag_group ? make_bag_group(ranks) : nullptr;
  if (!bag_group) {
    throw StateError(text("make_bag_group: got no group for bag ", id.value, ", expected one of its ranks ",
                          ranks.front(), " to ", ranks.back()));
  }
  if (bag_group == group) return all_;
  const int32_t rank_in_bag = rank_.value - bag.first_rank.value;
  if (bag_group->getSize() != bag.num_ranks || bag_group->getRank() != rank_in_bag || !bag_group->getStore()) {
    throw_argument("make_bag_group",
                   text("a group in which this is rank ", bag_group->getRank(), " of ", bag_group->getSize()),
                   text("one with a store, in which it is rank ", rank_in_bag, " of ", bag.num_ranks));
  }
  return Channel::make(channel_name(*bag_group), bag_group, store_prefix, lookout_, bag.first_rank.value);
}

void SequenceBalancer::report(const std::exception& error) noexcept {
  if (lookout_) lookout_->board()->post(error);
}

SequenceBalancer::Step& SequenceBalancer::step() {
  if (!step_) throw StateError("plan_routing: has made no plan, expected one before anything moves");
  return *step_;
}

const Plan& SequenceBalancer::plan() const {
  if (!step_) throw StateError("plan_routing: has made no plan, expected one before plan");
  return step_->plan;
}

const at::Tensor& SequenceBalancer::seq_lens() { return step().seq_lens; }

const std::vector<TableTensors>& SequenceBalancer::tables_on(at::Device device) {
  Step& s = step();
  if (s.device != device) {
    const ExchangeEngine engine =
        options_.engine.value_or(device.is_cpu() ? ExchangeEngine::kRuns : ExchangeEngine::kIndex);
    std::vector<TableSpec> specs = {{.table = s.route.tokens, .head_group = {}},
                                    {.table = s.route.sequences, .head_group = {}}};
    for (const AttentionLevel& level : s.attention.levels) {
      if (level.degree == 1) continue;
      specs.push_back(
          {.table = level.pre_attn,
           .head_group = {.first_peer = level.pre_attn.this_peer - level.index_in_group, .degree = level.degree}});
    }
    s.tables = make_table_tensors(specs, engine, device, s.number);
    s.device = device;
  }
  return s.tables;
}

SequenceBalancer::Routed SequenceBalancer::route(const at::Tensor& x, at::TensorList features,
                                                 at::TensorList sequence_features) {
  return collective([&]() -> Routed {
    Step& s = step();
    check_rows(x, "x", s.route.tokens.send.num_rows, kOwnToken, 1);
    check_has_memory(x, "x");
    for (size_t i = 0; i < features.size(); ++i) {
      const std::string name = element("features", i);
      check_rows(features[i], name, s.route.tokens.send.num_rows, kOwnToken, 1);
      check_device(features[i], name, x, "x");
    }
    for (size_t i = 0; i < sequence_features.size(); ++i) {
      const std::string name = element("sequence_features", i);
      check_rows(sequence_features[i], name, s.route.sequences.send.num_rows, kOwnSequence, 1);
      check_device(sequence_features[i], name, x, "x");
    }
    if (is_identity(s.route.tokens)) {
      return {.chunk_lens = s.chunk_lens,
              .x = as_view(x),
              .features = as_views(features),
              .sequence_features = as_views(sequence_features)};
    }
    const std::vector<TableTensors>& tables = tables_on(x.device());
    std::vector<RegionInput> regions(2);
    regions[0] = {.table = tables[Step::kTokenTable],
                  .tensors = {x},
                  .roles = std::vector<HeadRole>(features.size() + 1, HeadRole::kNone)};
    regions[0].tensors.insert(regions[0].tensors.end(), features.begin(), features.end());
    regions[1] = {.table = tables[Step::kSequenceTable],
                  .tensors = sequence_features.vec(),
                  .roles = std::vector<HeadRole>(sequence_features.size(), HeadRole::kNone)};
    std::vector<at::Tensor> moved =
        exchange(regions, {}, *all_, route_label(features.size(), sequence_features.size()));
    const auto first_sequence_feature = moved.begin() + 1 + static_cast<std::ptrdiff_t>(features.size());
    return {.chunk_lens = s.chunk_lens,
            .x = moved[0],
            .features = {moved.begin() + 1, first_sequence_feature},
            .sequence_features = {first_sequence_feature, moved.end()}};
  });
}

SequenceBalancer::Returned SequenceBalancer::reverse_route(const at::Tensor& x) {
  return collective([&]() -> Returned {
    Step& s = step();
    check_rows(x, "x", s.route.tokens.recv.num_rows, kChunkToken, 1);
    check_has_memory(x, "x");
    if (is_identity(s.route.tokens)) return {.seq_lens = s.seq_lens, .x = as_view(x)};
    const std::vector<TableTensors>& tables = tables_on(x.device());
    return {.seq_lens = s.seq_lens,
            .x = exchange({{.table = tables[Step::kTokenTable].inverse(), .tensors = {x}, .roles = {HeadRole::kNone}}},
                          {}, *all_, "reverse_route(x)")[0]};
  });
}

void SequenceBalancer::check_recomputation(std::string_view call) {
  if (torch::autograd::get_current_graph_task_id() < 0) return;
  for (Channel* channel : {all_.get(), bag_.get()}) {
    const int64_t plan = channel != nullptr ? channel->plan_in_backward().load() : 0;
    if (plan == 0 || plan == step().number) continue;
    throw StateError(
        text(call,
             ": computed again in the backward pass of an earlier plan, expected that of the last one: run "
             "it before the next plan_routing, or give blocks their AttentionTables (knapformer.traced)"));
  }
}

void SequenceBalancer::check_attention_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const int64_t num_rows = step().route.tokens.recv.num_rows;
  check_rows(q, "q", num_rows, kChunkToken, 2);
  check_rows(k, "k", num_rows, kChunkToken, 2);
  check_rows(v, "v", num_rows, kChunkToken, 2);
  check_has_memory(q, "q");
  check_device(k, "k", q, "q");
  check_device(v, "v", q, "q");
  if (v.size(1) != k.size(1)) throw_argument("v", text(v.size(1), " heads"), text(k.size(1), " heads, as k has"));
  for (const AttentionLevel& level : step().attention.levels) {
    static_cast<void>(partition_heads(q.size(1), k.size(1), level.degree));  // checks the counts
  }
}

void SequenceBalancer::check_flat(std::string_view call) const {
  if (topology_.is_flat()) return;
  throw StateError(text(call, ": got the topology ", topology_.str(),
                        ", expected flat bags, such as g4n2: nested ones attend by attention(q, k, v, attend)"));
}

at::Tensor SequenceBalancer::attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                       const Attend& attend) {
  const at::Tensor attended = collective([&] {
    Step& s = step();
    check_recomputation("attention");
    check_attention_inputs(q, k, v);
    std::span<const TableTensors> shared_levels;
    if (bag_) shared_levels = std::span(tables_on(q.device())).subspan(Step::kFirstLevelTable);
    const BagAttention attention{.tables = s.attention,
                                 .seq_lens = s.attn_lens,
                                 .shared_levels = shared_levels,
                                 .channel = bag_.get(),
                                 .heads = {.num_heads = q.size(1), .num_kv_heads = k.size(1)}};
    return attention.run(q, k, v, attend);
  });
  return repeated_whole(attended);  // out here: what ends a recomputation is no error to tell
}

std::vector<SequenceBalancer::AttentionExchange> SequenceBalancer::attention_exchanges(at::Device device) {
  const Step& s = step();
  std::vector<AttentionExchange> exchanges;
  const bool none_shared = s.attention.levels[0].degree == 1 && !s.attention.any_shared;
  size_t next_table = Step::kFirstLevelTable;
  for (size_t i = 0; i < s.attention.levels.size(); ++i) {
    const AttentionLevel& level = s.attention.levels[i];
    const bool stays = level.degree == 1 || none_shared;
    exchanges.push_back({.degree = level.degree,
                         .index_in_group = level.index_in_group,
                         .rows = at::empty({level.num_rows, 0}),
                         .table = stays ? TableTensors() : tables_on(device)[next_table++],
                         .seq_lens = s.attn_lens[i]});
  }
  return exchanges;
}

SequenceBalancer::AttentionInputs SequenceBalancer::pre_attn(const at::Tensor& q, const at::Tensor& k,
                                                             const at::Tensor& v) {
  return collective([&]() -> AttentionInputs {
    Step& s = step();
    check_flat("pre_attn");
    check_recomputation("pre_attn");
    check_attention_inputs(q, k, v);
    const AttentionLevel& level = s.attention.levels[0];
    s.heads = {.num_heads = q.size(1), .num_kv_heads = k.size(1)};
    if (level.degree == 1) return {.seq_lens = s.attn_lens[0], .q = as_view(q), .k = as_view(k), .v = as_view(v)};
    const std::vector<TableTensors>& tables = tables_on(q.device());
    const std::vector<at::Tensor> moved =
        exchange({{.table = tables[Step::kFirstLevelTable],
                   .tensors = {q, k, v},
                   .roles = {HeadRole::kQuery, HeadRole::kKeyValue, HeadRole::kKeyValue},
                   .sharing = sharing_of(level)}},
                 s.heads, *bag_, "pre_attn(q,k,v)");
    return {.seq_lens = s.attn_lens[0], .q = moved[0], .k = moved[1], .v = moved[2]};
  });
}

SequenceBalancer::AttentionOutput SequenceBalancer::post_attn(const at::Tensor& o) {
  AttentionOutput output = collective([&]() -> AttentionOutput {
    Step& s = step();
    check_flat("post_attn");
    if (s.heads.num_heads == 0)
      throw StateError("pre_attn: has not been called since plan_routing, expected before post_attn");
    const AttentionLevel& level = s.attention.levels[0];
    const int64_t num_rows = level.degree == 1 ? s.route.tokens.recv.num_rows : level.pre_attn.recv.num_rows;
    check_rows(o, "o", num_rows, "token of the sequences that attention saw", 2);
    check_has_memory(o, "o");
    const int64_t num_heads = num_query_heads_of(level, s.heads);
    if (o.size(1) != num_heads)
      throw_argument("o", text(o.size(1), " heads"), text(num_heads, " heads, this rank's share"));
    if (level.degree == 1) return {.chunk_lens = s.chunk_lens, .o = as_view(o)};
    const std::vector<TableTensors>& tables = tables_on(o.device());
    return {.chunk_lens = s.chunk_lens,
            .o = exchange({{.table = tables[Step::kFirstLevelTable].inverse(),
                            .tensors = {o},
                            .roles = {HeadRole::kQuery},
                            .sharing = sharing_of(level).inverse()}},
                          s.heads, *bag_, "post_attn(o)")[0]};
  });
  output.o = repeated_whole(output.o);
  return output;
}

}  // namespace knapformer
