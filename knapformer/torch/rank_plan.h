// A micro-batch of a plan on one rank, with the tables by which its tensors move.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "knapformer/core/model/mask.h"
#include "knapformer/core/plan/attention_tables.h"
#include "knapformer/core/plan/micro_batch_plan.h"
#include "knapformer/core/plan/plan.h"
#include "knapformer/torch/attention.h"
#include "knapformer/torch/comm/comm_group.h"
#include "knapformer/torch/exchange/arguments.h"
#include "knapformer/torch/exchange/copies.h"
#include "knapformer/torch/exchange/table_tensors.h"

namespace knapformer {

/// Whether all ranks follow the same plan: a hash of it is gathered while the host goes on.
class PlanAgreement {
 public:
  /// Collective: starts one all-gather of a number.
  PlanAgreement(CommGroup& group, const MicroBatchPlan& plan);
  /// Waits for it. Throws ArgumentError, on all ranks, where plans differ.
  void await(CommGroup& group);

 private:
  at::Tensor own_, gathered_;
  WorkPtr work_;
};

/// A device on which exchanges take their tables.
struct TablesDevice {
  /// given: unset, the engine for the device (copies.h).
  TablesDevice(at::Device on, std::optional<ExchangeEngine> given)
      : device(on), engine(given ? *given : engine_for(on)) {}

  at::Device device;
  ExchangeEngine engine;
  /// Whether attention has gone by the planned masks there: then those of plans to come are made ahead.
  bool takes_masks = false;
};

/// The mask that an attention kernel applies. Unset: to each sequence the one that was planned for it.
using KernelMask = std::optional<Mask>;

/// A micro-batch on one rank.
struct RankPlan {
  /// Builds the tables. On any thread.
  static std::shared_ptr<RankPlan> make(std::shared_ptr<Plan> of_step, int32_t micro_batch, Rank rank, int64_t number);

  /// The tables in the form in which the exchange takes them.
  struct PackedTables {
    std::vector<PackedTable> all;

    const PackedTable& tokens() const { return all[0]; }  // of route, as the next
    const PackedTable& sequences() const { return all[1]; }
    /// Of each level of several ranks: its queries, and its keys if it has them.
    std::span<const PackedTable> attention() const { return std::span(all).subspan(2); }
  };
  /// For the present stream of the device. Packed at the first call, where they have not been packed ahead; then copied
  /// to an accelerator without a wait of the host.
  const PackedTables& tables_on(const TablesDevice& on);
  /// Gives `attended` the masks of its sequences.
  void make_masks();
  /// Packs the tables before anyone asks. On any thread: none of this step's other members are in use meanwhile.
  void pack_ahead(const TablesDevice& on);

  int64_t number;  // of the step: the same on all ranks, and no other step of this balancer has it
  std::shared_ptr<Plan> of_step;
  std::shared_ptr<const MicroBatchPlan> plan;  // of the micro-batch
  RouteTables route;
  AttentionTables attention;
  at::Tensor seq_lens = {}, chunk_lens = {};  // int32 CPU: tokens of this rank's sequences and chunks
  std::vector<SequenceRows> attended = {};    // by each attention level
  double planning_s = 0;                      // what it took to make all this
  HeadCounts heads = {};                      // of the last pre_attn
  std::optional<Mask> common_mask = {};       // of all sequences, as PlanInput has it
  KernelMask kernel_mask = {};                // the last that was found to be the planned one
  /// Set until it is known: exchanges wait for it.
  std::optional<PlanAgreement> agreement = {};

  struct TablesOnDevice {
    at::Device device;
    PackedTables on_host;  // for an accelerator in pinned memory
    /// An accelerator's copies: each stream that uses the tables has its own, so that none waits for another.
    std::list<std::pair<c10::Stream, PackedTables>> on_streams = {};
  };
  /// An accelerator, the CPU (what hosts read), or both.
  std::list<TablesOnDevice> packed = {};

 private:
  TablesOnDevice& pack(const TablesDevice& on);
};

}  // namespace knapformer
