#include "knapformer/torch/balancer.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "knapformer/core/planners/whole_step/micro_batches.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

DataStatus status_of(const SequenceBalancer::AheadOptions& options) {
  if (options.failure) return DataStatus::kFailed;
  return options.ended ? DataStatus::kEnded : DataStatus::kActive;
}

/// Whether ranks exchange with nobody: all rows stay where they are.
bool is_identity(const ExchangeTable& table) { return table.num_peers == 1; }

/// What a call returns where nothing moves: another tensor on the same memory.
at::Tensor as_view(const at::Tensor& tensor) { return tensor.view(tensor.sizes()); }

std::vector<at::Tensor> as_views(at::TensorList tensors) {
  std::vector<at::Tensor> views;
  for (const at::Tensor& tensor : tensors) views.push_back(as_view(tensor));
  return views;
}

/// Keys of this library in a group's store.
constexpr const char* kStorePrefix = "knapformer/";
/// The watchdog of one balancer, and the prefix of the keys that its ranks share in the group's store.
std::pair<std::shared_ptr<Watchdog>, std::string> join_store(c10d::ProcessGroup& group) {
  const c10::intrusive_ptr<c10d::Store> store = group.getStore();
  if (!store) throw_argument("group", "a group without a store", "one with a store, by which its ranks agree");
  // All ranks give this balancer the same number: each counts those that it made on this group, and making one is
  // collective.
  const int32_t rank = group.getRank();
  const std::string prefix = text(kStorePrefix, "number ", store->add(text(kStorePrefix, rank), 1));
  return {std::make_shared<Watchdog>(c10::make_intrusive<c10d::PrefixStore>(prefix, store), rank, group.getSize()),
          prefix};
}

/// The same on all ranks where the group has a name, as groups made by torch.distributed have.
std::string comm_group_name(const c10d::ProcessGroup& group) {
  try {
    return text(kStorePrefix, group.getGroupName());
  } catch (const std::exception&) {
    return text(kStorePrefix, "group");
  }
}

// What methods check of tensors that they are given.

/// A dense tensor of `num_rows` rows and at least `min_dims` dimensions. `rows` says in messages what it has rows for.
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

/// On the device of `as`.
void check_device(const at::Tensor& tensor, std::string_view argument, const at::Tensor& as, std::string_view as_name) {
  if (tensor.device() != as.device())
    throw_argument(argument, tensor.device(), text(as.device(), ", the device of ", as_name));
}

/// Not on the meta device.
void check_has_memory(const at::Tensor& tensor, std::string_view argument) {
  if (tensor.is_meta()) throw_argument(argument, "a tensor on meta", "one on a device that has its values");
}

/// What a tensor has rows for, in messages.
constexpr const char* kOwnToken = "token of this rank's sequences";
constexpr const char* kOwnSequence = "sequence of this rank";
constexpr const char* kChunkToken = "token of the chunks that this rank holds";

}  // namespace

SequenceBalancer::SequenceBalancer(std::string_view topology, BalancerOptions options, ProcessGroupPtr group,
                                   const MakeBagGroup& make_bag_group, const MakeCpuGroup& make_cpu_group)
    : options_(std::move(options)) {
  const bool is_auto = topology == kAutoTopology;
  const auto parse = [&](int32_t num_ranks) {
    topology_ = Topology::parse(is_auto ? text("g1n", num_ranks) : std::string(topology), num_ranks);
    Fingerprint fingerprint = fingerprint_of(options_, topology_, topology);
    feedback_ = StepFeedback(options_.plan.workload.gamma, options_.plan.rank_speed, topology_.num_ranks());
    return fingerprint;
  };
  if (!group || group->getSize() == 1) {
    static_cast<void>(parse(1));
    return;
  }
  rank_ = Rank(group->getRank());
  std::string prefix;
  std::tie(watchdog_, prefix) = join_store(*group);
  all_ = CommGroup::make(comm_group_name(*group), group, prefix + "/all", watchdog_);
  watchdog_->guard([&] {
    all_->fingerprints().agree(parse(group->getSize()));
    if (make_cpu_group && !all_->has_cpu_backend()) all_->use_cpu_group(make_cpu_group());
    gatherer_ = std::make_shared<LengthGatherer>(all_);
    BagMaking making{.group = group, .store_prefix = prefix + "/bag", .make_bag_group = make_bag_group};
    if (is_auto) {
      undecided_ = std::move(making);
    } else {
      join_bags(making);
    }
  });
}

void SequenceBalancer::refuse(const ProcessGroupPtr& group, const std::exception& error) noexcept {
  if (!group || group->getSize() == 1) return;
  try {
    join_store(*group).first->post(error);
  } catch (...) {  // NOLINT: a store that is gone must not hide the error itself
  }
}

SequenceBalancer::~SequenceBalancer() = default;

void SequenceBalancer::join_bags(const BagMaking& making) {
  bag_ = join_bag(making);
  all_->fingerprints().agree(Fingerprint("SequenceBalancer, with the groups of all bags"));
}

std::shared_ptr<CommGroup> SequenceBalancer::join_bag(const BagMaking& making) const {
  const BagId id = topology_.bag_of(rank_);
  const Bag& bag = topology_.bag(id);
  if (bag.num_ranks == 1) return nullptr;
  std::vector<int64_t> ranks;
  for (int32_t i = 0; i < bag.num_ranks; ++i) ranks.push_back(bag.first_rank.value + i);
  const ProcessGroupPtr bag_group = making.make_bag_group ? making.make_bag_group(ranks) : nullptr;
  if (!bag_group) {
    throw StateError(text("make_bag_group: got no group for bag ", id.value, ", expected one of its ranks ",
                          ranks.front(), " to ", ranks.back()));
  }
  if (bag_group == making.group) return all_;
  const int32_t rank_in_bag = rank_.value - bag.first_rank.value;
  if (bag_group->getSize() != bag.num_ranks || bag_group->getRank() != rank_in_bag || !bag_group->getStore()) {
    throw_argument("make_bag_group",
                   text("a group in which this is rank ", bag_group->getRank(), " of ", bag_group->getSize()),
                   text("one with a store, in which it is rank ", rank_in_bag, " of ", bag.num_ranks));
  }
  return CommGroup::make(comm_group_name(*bag_group), bag_group, making.store_prefix, watchdog_, bag.first_rank.value);
}

void SequenceBalancer::choose_topology(const GatheredLengths& lengths, Planning& planning) {
  if (!undecided_ || lengths.lengths.num_sequences() == 0) return;
  try {
    const StepInput input{.sequences = planning.input(lengths),
                          .num_micro_batches = planning.shape ? planning.shape->num_micro_batches : 1};
    topology_ = Topology::parse(best_topology(input, options_.solver, /*fewest=*/false), num_ranks());
  } catch (const ArgumentError&) {
    return;  // what is wrong with them is said where they are planned, on all ranks alike
  }
  join_bags(*std::exchange(undecided_, std::nullopt));
  if (bag_ && bag_ != all_) bag_->fingerprints().begin_step();
  planning.topology = topology_;
}

const Topology& SequenceBalancer::topology() const {
  if (undecided_) throw StateError("topology: is chosen from the first lengths, expected plan_routing before");
  return topology_;
}

void SequenceBalancer::report(const std::exception& error) noexcept {
  if (watchdog_) watchdog_->post(error);
}

RankPlan& SequenceBalancer::step() const {
  if (!step_ && step_plan_) {
    throw StateError("follow_micro_batch: has not been called, expected after plan_step, before anything moves");
  }
  if (!step_) throw StateError("plan_routing: has made no plan, expected one before anything moves");
  return *step_;
}

const Plan& SequenceBalancer::plan() const { return step().plan; }

const at::Tensor& SequenceBalancer::seq_lens() const { return step().seq_lens; }

const at::Tensor& SequenceBalancer::chunk_lens() const { return step().chunk_lens; }

const RankPlan::PackedTables& SequenceBalancer::tables_on(at::Device device) {
  await_agreement(step());
  return step().tables_on(known_device(device));
}

void SequenceBalancer::expect_device(at::Device device) {
  if (all_) known_device(device);  // alone: nothing moves
}

const TablesDevice& SequenceBalancer::known_device(at::Device device) {
  // As tensors name it: "cuda" is the current one.
  if (!device.is_cpu() && !device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  const auto known = std::ranges::find(devices_, device, &TablesDevice::device);
  return known == devices_.end() ? devices_.emplace_back(device, options_.engine) : *known;
}

void SequenceBalancer::check_mask(const KernelMask& mask) {
  RankPlan& s = step();
  if (!mask || mask == s.kernel_mask) return;
  const PlanInput& input = s.plan.input();
  const auto described = [](const std::optional<Mask>& of, double pairs) {
    return text(of ? text("'", of->str(), "'") : "another mask", ", which leaves ", pairs, " (query, key) pairs");
  };
  // Given work stands for any mask, unless a mask was given, too.
  const bool is_planned = input.given_work.empty() || !input.attention_pairs.empty();
  for (SequenceId id(0); is_planned && id.value < s.plan.num_sequences(); ++id.value) {
    const int64_t length = input.seq_lens[id];
    const auto pairs_of = [&](const Mask& of) { return static_cast<double>(of.pairs(length)); };
    const double pairs = pairs_of(*mask), planned = input.mask_pairs_of(id);
    if (pairs == planned) continue;
    std::optional<Mask> own;
    for (const Mask& known : {options_.mask, Mask(), Mask{.kind = Mask::Kind::kCausal}}) {
      if (!own && pairs_of(known) == planned) own = known;
    }
    throw_argument("mask", text(described(mask, pairs), " of sequence ", id.value, " (", length, " tokens)"),
                   text(described(own, planned), ", as the plan counts: the mask that the kernel applies"));
  }
  s.kernel_mask = mask;
}

Ulysses SequenceBalancer::ulysses_on(at::Device device, const KernelMask& mask) {
  return collective([&] {
    check_mask(mask);
    return ulysses(device);
  });
}

Ulysses SequenceBalancer::ulysses(at::Device device) {
  Ulysses made{.tables = step().attention, .seq_lens = step().attn_lens, .shared_tables = {}, .group = {}};
  if (bag_) {
    made.shared_tables = tables_on(device).shared_levels;
    made.group = bag_->name();
  }
  return made;
}

void SequenceBalancer::watch_backward(const at::Tensor& output) {
  if (!output.requires_grad() || output.is_leaf()) return;  // a leaf is the kernel's own, and not of this step alone
  output.register_hook(
      [state = step_in_backward_, number = step().number](const at::Tensor&) -> void { *state = number; });
}

void SequenceBalancer::check_recomputation(std::string_view call) {
  if (torch::autograd::get_current_graph_task_id() < 0) return;
  const int64_t number = *step_in_backward_;
  if (number != 0 && number != step().number) throw_recomputed(call);
}

Planning SequenceBalancer::planning_of(int64_t d_model, const std::optional<StepShape>& shape) const {
  Planning planning{.d_model = d_model, .topology = topology_, .options = options_, .rank = rank_, .shape = shape};
  planning.options.plan.workload.gamma = feedback_.observer().gamma();
  planning.options.plan.rank_speed = feedback_.observer().rank_speed();
  return planning;
}

void SequenceBalancer::begin_step(std::string_view call, const std::optional<StepShape>& shape) {
  if (all_) {
    Fingerprint fingerprint(call);
    if (shape) add_shape(fingerprint, *shape);
    all_->fingerprints().agree(fingerprint);
    all_->fingerprints().begin_step();
  }
  if (bag_ && bag_ != all_) bag_->fingerprints().begin_step();
  feedback_.begin_step();
  before_step_ = traffic();
}

void SequenceBalancer::take_up(Planned planned) {
  for (const std::string& warning : feedback_.add(planned.observed)) {
    if (rank_.value == 0) TORCH_WARN(warning);  // all ranks know
  }
  step_.reset();
  if (planned.failed || planned.refused) {
    step_plan_.reset();
    micro_batches_.clear();
  }
  // On all ranks alike: there is nothing to tell, and nothing is in flight.
  if (planned.failed) throw StateError(*planned.failed);
  if (planned.refused) throw ArgumentError(*planned.refused);
  if (planned.step_plan) {
    step_plan_ = std::move(planned.step_plan);
    micro_batches_ = std::move(planned.micro_batches);
  } else {
    take_up(std::move(planned.step));
  }
}

const Plan& SequenceBalancer::take_up(std::shared_ptr<RankPlan> step) {
  step_ = std::move(step);
  step_->heads = {};
  *step_in_backward_ = 0;
  feedback_.begin_plan(step_->plan);
  return step_->plan;
}

Planned SequenceBalancer::gather_and_plan(std::string_view call, std::span<const int64_t> seq_lens, int64_t d_model,
                                          std::span<const Mask> masks, std::span<const double> work,
                                          const std::optional<StepShape>& shape) {
  return collective([&] {
    RECORD_USER_SCOPE(text("knapformer::", call));
    GatheredLengths lengths = own_lengths(seq_lens, d_model, masks, work, rank_);
    lengths.observed = {feedback_.take()};
    Planning planning = planning_of(d_model, shape);
    begin_step(call, shape);
    if (all_) lengths = gatherer_->finish(gatherer_->start(std::move(lengths), d_model));
    choose_topology(lengths, planning);
    return planning.plan(std::move(lengths));
  });
}

const Plan& SequenceBalancer::plan_routing(std::span<const int64_t> seq_lens, int64_t d_model,
                                           std::span<const Mask> masks, std::span<const double> work) {
  take_up(gather_and_plan("plan_routing", seq_lens, d_model, masks, work, {}));
  return plan();
}

const StepPlan& SequenceBalancer::plan_step(std::span<const int64_t> seq_lens, int64_t d_model, const StepShape& shape,
                                            std::span<const Mask> masks, std::span<const double> work) {
  take_up(gather_and_plan("plan_step", seq_lens, d_model, masks, work, shape));
  return *step_plan_;
}

const Plan& SequenceBalancer::follow_micro_batch(int64_t micro_batch) {
  return take_up(collective([&] {
    if (!step_plan_) throw StateError("plan_step: has planned no step, expected one before follow_micro_batch");
    if (micro_batch < 0 || micro_batch >= step_plan_->num_micro_batches()) {
      throw_argument("micro_batch", micro_batch, text("0 to ", step_plan_->num_micro_batches() - 1));
    }
    // Calls repeat from step to step, not from micro-batch to micro-batch.
    if (all_) all_->fingerprints().agree(Fingerprint(text("follow_micro_batch(", micro_batch, ")")));
    before_step_ = traffic();
    if (!micro_batches_.empty()) return micro_batches_[static_cast<size_t>(micro_batch)];
    return RankPlan::make(step_plan_->plans()[micro_batch], rank_);
  }));
}

const Plan& SequenceBalancer::follow(const Plan& plan) {
  return take_up(collective([&] {
    RECORD_USER_SCOPE("knapformer::follow");
    if (plan.num_ranks() != num_ranks() || plan.topology() != topology()) {
      throw_argument("plan", text("one of ", plan.topology().str(), " on ", plan.num_ranks(), " ranks"),
                     text("one of ", topology_.str(), " on ", num_ranks(), " ranks, as the balancer's"));
    }
    if (step_) await_agreement(*step_);
    begin_step("follow");
    std::shared_ptr<RankPlan> step = RankPlan::make(plan, rank_);
    if (all_) step->agreement.emplace(*all_, plan);
    return step;
  }));
}

void SequenceBalancer::await_agreement(RankPlan& step) {
  if (step.agreement) std::exchange(step.agreement, std::nullopt)->await(*all_);
}

std::shared_ptr<SequenceBalancer::PlanningAhead> SequenceBalancer::start_planning(std::span<const int64_t> seq_lens,
                                                                                  int64_t d_model,
                                                                                  const AheadOptions& options) {
  return collective([&] {
    RECORD_USER_SCOPE("knapformer::start_planning");
    GatheredLengths own = own_lengths(seq_lens, d_model, options.masks, options.work, rank_);
    own.statuses = {status_of(options)};
    own.observed = {feedback_.take()};
    auto ahead = std::make_shared<PlanningAhead>();
    ahead->planning_ = planning_of(d_model, options.step);
    ahead->thread_ = planning_thread_;
    Fingerprint fingerprint("start_planning");
    if (options.step) add_shape(fingerprint, *options.step);
    if (options.samples) {
      KNAPFORMER_ASSERT(options.step && std::ranges::equal(options.samples->seq_lens(), seq_lens));
      ahead->samples_ = options.samples;
      ahead->max_bytes_in_flight_ = options.max_bytes_in_flight;
      own.sample_bytes = options.samples->bytes();
      fingerprint.add("max_bytes_in_flight", std::to_string(options.max_bytes_in_flight));
      for (const SampleField& field : options.samples->fields()) {
        fingerprint.add(field.name, field.per_token ? "per token" : "per sample");
      }
    }
    if (all_) {
      if (options.failure) watchdog_->leave_note(Watchdog::kFailureNote, *options.failure);
      all_->fingerprints().agree(fingerprint);
      ahead->gather_ = gatherer_->start(own, d_model);
    }
    if (undecided_) {  // once: the groups of bags are made by the threads that call
      GatheredLengths lengths = gatherer_->finish(*ahead->gather_);
      choose_topology(lengths, ahead->planning_);
      ahead->planned_ = known(ahead->planning_.plan_with_tables(std::move(lengths), devices_));
      return ahead;
    }
    // The task has copies of what it needs, so that it may outlive this balancer.
    auto plan = [gather = ahead->gather_, gatherer = gatherer_, own = std::move(own), planning = ahead->planning_,
                 devices = devices_](const std::stop_token& stop) -> Planned {
      std::optional<GatheredLengths> lengths = gather ? gatherer->wait(*gather, stop) : own;
      return lengths ? planning.plan_with_tables(*std::move(lengths), devices) : Planned{};
    };
    auto task = std::make_shared<std::packaged_task<Planned(const std::stop_token&)>>(std::move(plan));
    ahead->planned_ = task->get_future().share();
    ahead->task_ = TaskThread::start(planning_thread_, [task](const std::stop_token& stop) { (*task)(stop); });
    return ahead;
  });
}

std::shared_future<Planned> SequenceBalancer::known(Planned planned) {
  std::promise<Planned> promise;
  promise.set_value(std::move(planned));
  return promise.get_future().share();
}

Planned SequenceBalancer::await(PlanningAhead& ahead) {
  const auto begin = Clock::now();
  if (watchdog_) {
    watchdog_->wait("finish_planning", [&](std::chrono::milliseconds patience) {
      return ahead.planned_.wait_for(patience) == std::future_status::ready;
    });
  }
  Planned planned = ahead.planned_.get();
  waited_for_planning_s_ += seconds_since(begin);
  if (!planned.is_known()) {  // lengths did not fit, on all ranks alike
    planned = ahead.planning_.plan(gatherer_->finish(*ahead.gather_));
    ahead.planned_ = known(planned);
  }
  ahead.num_ended_ = static_cast<int32_t>(std::ranges::count(planned.statuses, DataStatus::kEnded));
  return planned;
}

void SequenceBalancer::check_started(const PlanningAhead& ahead, bool of_step) const {
  if (ahead.thread_ != planning_thread_) throw_argument("ahead", "another balancer's", "what this one started");
  const std::array calls = {"start_planning", "start_planning_step"};
  if (ahead.planning_.shape.has_value() == of_step) return;
  throw_argument("ahead", text("what ", calls[of_step ? 0 : 1], " returned"), text("that of ", calls[of_step ? 1 : 0]));
}

Planned SequenceBalancer::finish(PlanningAhead& ahead, bool of_step) {
  return collective([&] {
    RECORD_USER_SCOPE("knapformer::finish_planning");
    check_started(ahead, of_step);
    begin_step("finish_planning");
    Planned planned = await(ahead);
    if (const auto failed = std::ranges::find(planned.statuses, DataStatus::kFailed);
        failed != planned.statuses.end()) {
      const auto rank = static_cast<int32_t>(failed - planned.statuses.begin());
      const std::optional<std::string> reason =
          watchdog_ ? watchdog_->note_of(rank, Watchdog::kFailureNote) : std::nullopt;
      planned.failed.emplace(text("rank ", rank, ": ", reason.value_or("its data failed")));
    }
    // What ranks observed is heard once, also where a plan is taken up again.
    if (std::exchange(ahead.heard_, true)) planned.observed.clear();
    return planned;
  });
}

const Plan& SequenceBalancer::finish_planning(PlanningAhead& ahead) {
  take_up(finish(ahead, /*of_step=*/false));
  return plan();
}

const StepPlan& SequenceBalancer::finish_planning_step(PlanningAhead& ahead) {
  take_up(finish(ahead, /*of_step=*/true));
  return *step_plan_;
}

bool SequenceBalancer::is_in_force(const PlanningAhead& ahead) const {
  return ahead.ready() && step_plan_ && ahead.planned_.get().step_plan == step_plan_;
}

void SequenceBalancer::start_moving(PlanningAhead& ahead) {
  collective([&] {
    RECORD_USER_SCOPE("knapformer::start_moving");
    check_started(ahead, /*of_step=*/true);
    KNAPFORMER_ASSERT(ahead.samples_);
    if (all_) all_->fingerprints().agree(Fingerprint("start_moving"));
    const Planned planned = await(ahead);
    if (planned.refused || std::ranges::count(planned.statuses, DataStatus::kFailed) > 0) return;
    const bool pinned = std::ranges::any_of(devices_, [](const TablesDevice& known) { return !known.device.is_cpu(); });
    try {
      ahead.moving_ = std::make_unique<SampleExchange>(all_, rank_, *planned.step_plan, ahead.samples_,
                                                       planned.sample_bytes, ahead.max_bytes_in_flight_, pinned);
    } catch (const ArgumentError& error) {  // on all ranks alike
      ahead.too_large_ = error;
      return;
    }
    ahead.moving_->start();
  });
}

std::vector<std::vector<SampleTensors>> SequenceBalancer::finish_moving(PlanningAhead& ahead) {
  if (ahead.too_large_) throw ArgumentError(*ahead.too_large_);
  return collective([&] {
    RECORD_USER_SCOPE("knapformer::finish_moving");
    check_started(ahead, /*of_step=*/true);
    if (!ahead.moving_) throw StateError("start_moving: has not been called, expected once before finish_moving");
    if (all_) all_->fingerprints().agree(Fingerprint("finish_moving"));
    return std::exchange(ahead.moving_, nullptr)->finish();
  });
}

bool SequenceBalancer::PlanningAhead::ready() const {
  return planned_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

int32_t SequenceBalancer::PlanningAhead::num_ended() const {
  if (!num_ended_) throw StateError("finish_planning: has not been called, expected before num_ended");
  return *num_ended_;
}

void SequenceBalancer::observe(double seconds) {
  static_cast<void>(step());  // throws where there is no plan to have observed
  feedback_.observe(seconds);
}

SequenceBalancer::Traffic SequenceBalancer::traffic() const {
  Traffic sum{.bytes_sent = 0, .num_collectives = 0, .waited_s = waited_for_planning_s_};
  for (const CommGroup* group : {all_.get(), bag_ == all_ ? nullptr : bag_.get()}) {
    if (group == nullptr) continue;
    const CommCounters& counters = group->counters();
    sum.bytes_sent += counters.bytes_sent;
    sum.num_collectives += counters.num_collectives;
    sum.waited_s += static_cast<double>(counters.waited_ns) * 1e-9;
  }
  return sum;
}

StepMetrics SequenceBalancer::metrics() {
  const Plan& p = step().plan;
  const LoadBalance before = p.balance_before(), after = p.balance_after();
  const Traffic now = traffic();
  const LoadObserver& observer = feedback_.observer();
  return {{"wir_before", before.wir()},
          {"wir_after", after.wir()},
          {"max_over_mean_before", before.max_over_mean()},
          {"max_over_mean_after", after.max_over_mean()},
          {"tokens_before", p.tokens_before()[rank_.index()]},
          {"tokens_after", p.tokens_after()[rank_.index()]},
          {"tokens_moved", p.tokens_moved()},
          {"attention_tokens_moved", p.attention_tokens_moved()},
          {"bytes_sent", now.bytes_sent - before_step_.bytes_sent},
          {"num_collectives", now.num_collectives - before_step_.num_collectives},
          {"planning_s", step_->planning_s},
          {"waiting_s", now.waited_s - before_step_.waited_s},
          {"gamma", p.input().workload.gamma},
          {"rank_speed", p.input().speed_of(rank_)},
          {"given_model_error", observer.given_error()},
          {"learned_model_error", observer.learned_error()}};
}

SequenceBalancer::Routed SequenceBalancer::route(const at::Tensor& x, at::TensorList features,
                                                 at::TensorList sequence_features) {
  return collective([&]() -> Routed {
    RankPlan& s = step();
    check_rows(x, "x", s.route.tokens.send.num_rows, kOwnToken, 1);
    check_has_memory(x, "x");
    std::string label = "route(x";
    const auto check_list = [&](const char* list, at::TensorList tensors, int64_t num_rows, const char* rows) {
      for (size_t i = 0; i < tensors.size(); ++i) {
        const std::string name = text(list, "[", i, "]");
        check_rows(tensors[i], name, num_rows, rows, 1);
        check_device(tensors[i], name, x, "x");
        label.append(",").append(name);
      }
    };
    check_list("features", features, s.route.tokens.send.num_rows, kOwnToken);
    check_list("sequence_features", sequence_features, s.route.sequences.send.num_rows, kOwnSequence);
    if (is_identity(s.route.tokens)) {
      return {.chunk_lens = s.chunk_lens,
              .x = as_view(x),
              .features = as_views(features),
              .sequence_features = as_views(sequence_features)};
    }
    const RankPlan::PackedTables& tables = tables_on(x.device());
    std::vector<at::Tensor> of_tokens = {x};
    of_tokens.insert(of_tokens.end(), features.begin(), features.end());
    ExchangeArguments arguments{.group = all_->name(), .label = label + ")"};
    arguments.add(tables.tokens, of_tokens, std::vector(of_tokens.size(), HeadRole::kNone));
    arguments.add(tables.sequences, sequence_features.vec(), std::vector(sequence_features.size(), HeadRole::kNone));
    const std::vector<at::Tensor> moved = exchange(std::move(arguments));
    const auto first_sequence_feature = moved.begin() + 1 + static_cast<std::ptrdiff_t>(features.size());
    return {.chunk_lens = s.chunk_lens,
            .x = moved[0],
            .features = {moved.begin() + 1, first_sequence_feature},
            .sequence_features = {first_sequence_feature, moved.end()}};
  });
}

SequenceBalancer::Returned SequenceBalancer::reverse_route(const at::Tensor& x) {
  return collective([&]() -> Returned {
    RankPlan& s = step();
    check_rows(x, "x", s.route.tokens.recv.num_rows, kChunkToken, 1);
    check_has_memory(x, "x");
    Returned returned{.seq_lens = s.seq_lens, .x = as_view(x)};
    if (!is_identity(s.route.tokens)) {
      ExchangeArguments arguments{.group = all_->name(), .label = "reverse_route(x)"};
      arguments.add(tables_on(x.device()).tokens.inverse(), {x}, {HeadRole::kNone});
      returned.x = exchange(std::move(arguments))[0];
    }
    watch_backward(returned.x);
    return returned;
  });
}

void SequenceBalancer::check_attention_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const int64_t num_rows = step().route.tokens.recv.num_rows;
  check_rows(q, "q", num_rows, kChunkToken, 3);
  check_rows(k, "k", num_rows, kChunkToken, 3);
  check_rows(v, "v", num_rows, kChunkToken, 3);
  check_has_memory(q, "q");
  check_device(k, "k", q, "q");
  check_device(v, "v", q, "q");
  if (v.size(1) != k.size(1)) throw_argument("v", text(v.size(1), " heads"), text(k.size(1), " heads, as k has"));
  const HeadCounts heads{.num_heads = q.size(1), .num_kv_heads = k.size(1)};
  if (heads.num_heads == 0) throw_argument("q", "0 heads", "at least 1 head");
  for (const AttentionLevel& level : step().attention.levels) {
    static_cast<void>(head_partition(heads, level.degree));  // checks the counts
  }
}

void SequenceBalancer::check_flat(std::string_view call) const {
  if (topology_.is_flat()) return;
  throw StateError(text(call, ": got the topology ", topology_.str(),
                        ", expected flat bags, such as g4n2: nested ones attend by attention(q, k, v, attend)"));
}

at::Tensor SequenceBalancer::attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                       const Attend& attend, const KernelMask& mask) {
  const at::Tensor o = collective([&] {
    check_recomputation("attention");
    check_attention_inputs(q, k, v);
    check_mask(mask);
    const at::Tensor attended = ulysses(q.device()).run(q, k, v, attend);
    watch_backward(attended);
    return attended;
  });
  return recomputed_to_the_end(o, step().number);  // out here: what ends a recomputation is no error to tell
}

SequenceBalancer::AttentionInputs SequenceBalancer::pre_attn(const at::Tensor& q, const at::Tensor& k,
                                                             const at::Tensor& v, const KernelMask& mask) {
  return collective([&]() -> AttentionInputs {
    RankPlan& s = step();
    check_flat("pre_attn");
    check_recomputation("pre_attn");
    check_attention_inputs(q, k, v);
    check_mask(mask);
    s.heads = {.num_heads = q.size(1), .num_kv_heads = k.size(1)};
    if (s.attention.levels[0].degree == 1) {
      return {.seq_lens = s.attn_lens[0], .q = as_view(q), .k = as_view(k), .v = as_view(v)};
    }
    ExchangeArguments arguments = ulysses(q.device()).to_sequences(s.heads);
    arguments.label = "pre_attn(q,k,v)";
    arguments.tensors = {q, k, v};
    const std::vector<at::Tensor> moved = exchange(std::move(arguments));
    return {.seq_lens = s.attn_lens[0], .q = moved[0], .k = moved[1], .v = moved[2]};
  });
}

SequenceBalancer::AttentionOutput SequenceBalancer::post_attn(const at::Tensor& o) {
  AttentionOutput output = collective([&]() -> AttentionOutput {
    RankPlan& s = step();
    check_flat("post_attn");
    if (s.heads.num_heads == 0)
      throw StateError("pre_attn: has not been called since plan_routing, expected before post_attn");
    const AttentionLevel& level = s.attention.levels[0];
    const int64_t num_rows = level.degree == 1 ? s.route.tokens.recv.num_rows : level.pre_attn.recv.num_rows;
    check_rows(o, "o", num_rows, "token of the sequences that attention saw", 2);
    check_has_memory(o, "o");
    const Ulysses composer = ulysses(o.device());
    const int64_t num_heads = composer.num_query_heads(0, s.heads);
    if (o.size(1) != num_heads)
      throw_argument("o", text(o.size(1), " heads"), text(num_heads, " heads, this rank's share"));
    AttentionOutput back{.chunk_lens = s.chunk_lens, .o = as_view(o)};
    if (level.degree > 1) {
      ExchangeArguments arguments = composer.to_rows(s.heads);
      arguments.label = "post_attn(o)";
      arguments.tensors = {o};
      back.o = exchange(std::move(arguments))[0];
    }
    watch_backward(back.o);
    return back;
  });
  output.o = recomputed_to_the_end(output.o, step().number);
  return output;
}

}  // namespace knapformer
