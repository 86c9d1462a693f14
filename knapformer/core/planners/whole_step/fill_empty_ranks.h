// No rank without a sequence, for programs that cannot run such a micro-batch.
#pragma once

#include "knapformer/core/plan/plan.h"

namespace knapformer {

/// The plan, changed so that every rank has a sequence in each micro-batch. A rank that has none gets one, of which
/// every rank keeps at least one other: a whole sequence if its bag takes one, otherwise one that a group around it
/// shares, with little work. The fullest rank holds no more tokens than before. A rank stays empty if its replica has
/// no such sequence left.
Plan fill_empty_ranks(const Plan& plan);

}  // namespace knapformer
