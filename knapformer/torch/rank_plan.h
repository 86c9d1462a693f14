// What a plan leaves for the calls after it: the tables by which tensors move, made once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "knapformer/core/plan/exchange_table.h"
#include "knapformer/core/plan/plan.h"
#include "knapformer/torch/comm/comm_group.h"
#include "knapformer/torch/exchange/arguments.h"
#include "knapformer/torch/exchange/packed_table.h"

namespace knapformer {

/// Whether all ranks follow the same plan: a hash of it is gathered while the host goes on.
class PlanAgreement {
 public:
  /// Collective: starts one all-gather of a number.
  PlanAgreement(CommGroup& group, const Plan& plan);
  /// Waits for it. Throws ArgumentError, on all ranks, where plans differ.
  void await(CommGroup& group);

 private:
  at::Tensor own_, gathered_;
  WorkPtr work_;
};

/// A device on which exchanges take their tables.
struct TablesDevice {
  explicit TablesDevice(at::Device on);

  at::Device device;
  /// On which tables that are packed ahead reach it, so that they wait for nothing that it computes. None: the CPU.
  std::optional<c10::Stream> stream;
};

/// A plan's step on one rank.
struct RankPlan {
  /// Builds the tables. On any thread.
  static std::shared_ptr<RankPlan> make(Plan plan, Rank rank);

  /// The tables in the form in which the exchange takes them.
  struct PackedTables {
    PackedTable tokens, sequences;           // of route
    std::vector<PackedTable> shared_levels;  // of each attention level of several ranks
  };
  /// For the present stream of the device. Packed at the first call, where they have not been packed ahead. Unset
  /// engine: the one for that device (packing_op.h). The same in all calls, and in pack_ahead.
  const PackedTables& tables_on(at::Device device, std::optional<ExchangeEngine> engine);
  /// Packs them before anyone asks, and launches their copy to the device. On any thread: none of this step's other
  /// members are in use meanwhile.
  void pack_ahead(const TablesDevice& on, std::optional<ExchangeEngine> engine);

  int64_t number;  // no other step of this process has it
  Plan plan;
  RouteTables route;
  AttentionTables attention;
  at::Tensor seq_lens = {}, chunk_lens = {};  // int32 CPU: tokens of this rank's sequences and chunks
  std::vector<at::Tensor> attn_lens = {};     // of each attention level
  double planning_s = 0;                      // what it took to make all this
  HeadCounts heads = {};                      // of the last pre_attn
  /// Set until it is known: exchanges wait for it.
  std::optional<PlanAgreement> agreement = {};

  struct TablesOnDevice {
    at::Device device;
    PackedTables tables;
    /// Where they were packed ahead: when they have reached the device, and the streams that know of it.
    std::optional<c10::Event> copied = {};
    std::vector<c10::Stream> streams = {};
  };
  /// An accelerator, the CPU (what hosts read), or both.
  std::list<TablesOnDevice> packed = {};

 private:
  TablesOnDevice& pack(at::Device device, std::optional<ExchangeEngine> engine);
};

}  // namespace knapformer
