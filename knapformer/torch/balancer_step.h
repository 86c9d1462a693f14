// What a plan leaves for the calls that follow it.
#pragma once

#include <optional>
#include <vector>

#include "knapformer/torch/balancer.h"

namespace knapformer {

struct SequenceBalancer::Step {
  int64_t number = 0;  // no other step of this process has it
  Plan plan;
  RouteTables route;
  AttentionTables attention;
  at::Tensor seq_lens, chunk_lens;
  std::vector<at::Tensor> attn_lens;  // of each attention level
  double planning_s = 0;              // what it took to make all this
  HeadCounts heads;                   // of the last pre_attn

  std::optional<at::Device> device;  // of the tables; none before the first exchange
  std::vector<TableTensors> tables;
  /// In tables. From the last on, one for each attention level of several ranks.
  static constexpr size_t kTokenTable = 0, kSequenceTable = 1, kFirstLevelTable = 2;
};

}  // namespace knapformer
