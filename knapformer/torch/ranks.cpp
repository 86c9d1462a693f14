#include "knapformer/torch/ranks.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "knapformer/core/cost/plan_json.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Keys of this library in a group's store.
constexpr const char* kStorePrefix = "knapformer/";
/// Changes with what ranks say to each other: ranks of different versions do not work together.
constexpr int32_t kProtocolVersion = 9;

/// Of a balancer: ranks that differ in one of them would plan differently. Throws ArgumentError where an option is
/// wrong.
Fingerprint compared_settings(const BalancerOptions& options) {
  PlanInput empty = options.plan;
  empty.seq_lens = SequenceLengths::from_lists(std::vector<std::vector<int64_t>>(empty.topology.num_ranks()));
  empty.d_model = 1;
  static_cast<void>(plan_micro_batch(std::move(empty), options.solver, options.effort));  // checks the options
  Fingerprint fingerprint("SequenceBalancer");
  fingerprint.add("version", std::to_string(kProtocolVersion));
  fingerprint.add("topology", options.plan.topology.str());
  for (const auto& [name, value] : setting_texts(options.plan)) fingerprint.add(name, value);
  fingerprint.add("solver", options.solver);
  fingerprint.add("effort", options.effort.str());
  fingerprint.add("mask", options.mask.str());
  fingerprint.add("sync", step_sync_name(options.sync));
  return fingerprint;
}

}  // namespace

Ranks::Ranks(std::string_view topology, BalancerOptions options, ProcessGroupPtr group,
             const MakeBagGroup& make_bag_group, const MakeCpuGroup& make_cpu_group)
    : options_(std::move(options)) {
  const auto settings_on = [&](int32_t num_ranks) {
    options_.plan.topology = Topology::parse(topology, num_ranks);
    return compared_settings(options_);
  };
  if (!group || group->getSize() == 1) {
    static_cast<void>(settings_on(1));
    return;
  }
  rank_ = Rank(group->getRank());
  const c10::intrusive_ptr<c10d::Store> store = group->getStore();
  if (!store) throw_argument("group", "a group without a store", "one with a store, by which its ranks agree");
  balancer_ = store->add(text(kStorePrefix, rank_.value), 1);
  const std::string prefix = text(kStorePrefix, "number ", balancer_);
  peer_errors_ = std::make_shared<PeerErrors>(c10::make_intrusive<c10d::PrefixStore>(prefix, store), rank_.value,
                                              group->getSize());
  all_ = CommGroup::make(group, prefix + "/all", peer_errors_);
  peer_errors_->guard([&] {
    agree(settings_on(group->getSize()));
    if (make_cpu_group && !all_->control_device().is_cpu()) all_->use_cpu_group(make_cpu_group());
    bag_ = join_bag(group, prefix + "/bag", make_bag_group);
    agree(Fingerprint("SequenceBalancer, with the groups of all bags"));
  });
}

std::shared_ptr<CommGroup> Ranks::join_bag(const ProcessGroupPtr& group, const std::string& store_prefix,
                                           const MakeBagGroup& make_bag_group) const {
  const BagId id = topology().bag_of(rank_);
  const Bag& bag = topology().bag(id);
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
  return CommGroup::make(bag_group, store_prefix, peer_errors_, bag.first_rank.value);
}

void Ranks::report(const std::exception& error) noexcept {
  if (peer_errors_) peer_errors_->post(error);
}

void Ranks::agree(const Fingerprint& call) {
  if (all_) all_->fingerprints().agree(call);
}

void Ranks::enter_step(const Fingerprint& call) {
  agree(call);
  for (const auto& group : {all_, bag_}) {
    if (group) group->fingerprints().enter_step(call.step);
  }
}

TablesDevice& Ranks::known_device(at::Device device) {
  const auto known = std::ranges::find(devices_, device, &TablesDevice::device);
  return known == devices_.end() ? devices_.emplace_back(device, options_.engine) : *known;
}

Ranks::Traffic Ranks::traffic() const {
  Traffic sum;
  for (CommGroup* group : {all_.get(), bag_ == all_ ? nullptr : bag_.get()}) {
    if (group == nullptr) continue;
    const CommCounters& counters = group->counters();
    sum.bytes_sent += counters.bytes_sent;
    sum.num_collectives += counters.num_collectives;
    sum.waited_s += static_cast<double>(counters.waited_ns) * 1e-9;
  }
  return sum;
}

}  // namespace knapformer
