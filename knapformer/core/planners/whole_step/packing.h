// Packing: the micro-batch and the ranks of each sequence of a step, over all micro-batches at once. Sequences are
// placed by descending work in trees of bags (balanced/placement_tree.h), where most time is left below the level
// (levels.h).
#pragma once

#include <optional>
#include <vector>

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/planners/balanced/choose_groups.h"
#include "knapformer/core/planners/balanced/effort.h"

namespace knapformer {

struct Packing {
  std::vector<int32_t> micro_batches = {};  // by sequence id
  std::vector<Placement> placements = {};   // by sequence id
  std::vector<double> times_s = {};         // by micro-batch, of one block in its slowest group
  std::vector<double> levels_s = {};        // by micro-batch, up to which its ranks were to be filled
  bool keeps_limit = true;                  // of tokens
};

/// The times up to which the ranks of each micro-batch are filled.
struct Levels {
  std::vector<double> levels_s = {};  // by micro-batch, of one block
  double margin_s = 0;                // by which groups may exceed them
  GroupChooser::Sharing sharing = GroupChooser::Sharing::kToFit;
  double time_s = 0;  // of a step that was packed under them
};

class Packer {
 public:
  /// `stride`: of so many bags and sequences, or replicas, one is packed, to see how long all take.
  /// `enforces_limit`: places sequences within the limit of tokens; otherwise a packing only says whether it keeps it.
  Packer(const PlanInput& input, int32_t num_micro_batches, bool enforces_limit, int32_t stride = 1);

  Packing pack(const Levels& levels);
  /// Anneals the last packing, so that its micro-batches exceed their levels less.
  Packing anneal(const Packing& last, Effort effort);

  const std::vector<PlacementTrees>& trees() const { return trees_; }

 private:
  Packing packing(const std::vector<double>& levels_s) const;

  const PlanInput& input_;
  int32_t num_micro_batches_, stride_;
  std::vector<PlacementTrees> trees_;        // by replica
  std::vector<std::vector<int32_t>> nodes_;  // of their items
};

/// By tokens alone, for limits that no packing by time keeps: each sequence goes to the smallest group with room, or
/// over a whole bag.
Packing pack_by_tokens(const PlanInput& input, int32_t num_micro_batches, bool in_whole_bags);

/// The given order, each sequence in the smallest group around its home rank: it keeps any limit that ranks keep which
/// compute what they are given.
Packing pack_at_home(const StepInput& input);

/// Each sequence of a replica in its own micro-batch, over a largest bag: what keeps a limit if anything does. Nothing
/// where there are fewer micro-batches.
std::optional<Packing> pack_one_by_one(const StepInput& input);

}  // namespace knapformer
