// What a plan leaves for the calls after it: the tables by which tensors move, made once.
#pragma once

#include <ATen/core/Tensor.h>

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

/// A plan's step on one rank.
struct PlannedStep {
  /// Builds the tables. On any thread.
  static std::shared_ptr<PlannedStep> make(Plan plan, Rank rank);

  /// The tables in the form in which the exchange takes them, packed at the first call for a device.
  struct PackedTables {
    PackedTable tokens, sequences;           // of route
    std::vector<PackedTable> shared_levels;  // of each attention level of several ranks
  };
  /// Unset engine: the one for that device (packing_op.h). The same in all calls.
  const PackedTables& tables_on(at::Device device, std::optional<ExchangeEngine> engine);

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
  };
  /// An accelerator, the CPU (what hosts read), or both.
  std::list<TablesOnDevice> packed = {};
};

}  // namespace knapformer
