// Gathering the lengths of all ranks' sequences: the only synchronisation of ranks that planning costs.
//
// One all-gather of a buffer of fixed capacity in the steady state,
//
//   | header: width, status, a measured step, counts | lengths | masks | work | bytes | unused | int64
//
// on CPU tensors where the group has a CPU backend, so that an accelerator never waits for the host. Where some rank
// has more sequences than fit, all ranks see that in the counts, grow the capacity alike, and gather once more.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <vector>

#include "knapformer/core/plan/micro_batch_plan.h"
#include "knapformer/torch/comm/comm_group.h"

namespace knapformer {

/// Whether a rank's data goes on: sent beside its lengths.
enum class DataStatus : int64_t { kActive, kEnded, kFailed };

/// What a rank measured of an earlier step, or of some of its micro-batches.
struct ObservedStep {
  int64_t first_plan = 0, last_plan = 0;  // their numbers, counted from 1 alike on all ranks; 0: nothing measured
  double seconds = 0;
};

/// The size of a sample in bytes, where samples move (torch/sample_exchange.h).
struct SampleBytes {
  int64_t fixed = 0, per_token = 0;
};

/// What all ranks sent; before the gather, what one rank sends.
struct GatheredLengths {
  SequenceLengths lengths;
  std::vector<std::optional<Mask>> masks = {};  // of each sequence, none where its rank sent none; empty: none sent any
  std::vector<double> work = {};                // of each sequence, as given (PlanInput::give_work); empty: not given
  std::vector<SampleBytes> sample_bytes = {};   // of each sequence; empty where no samples move
  std::vector<DataStatus> statuses = {};        // one a rank
  std::vector<ObservedStep> observed = {};      // one a rank
};

class LengthGatherer {
 public:
  /// `group`: of all ranks. balancer: the number of the one that gathers, on which ranks must agree.
  explicit LengthGatherer(std::shared_ptr<CommGroup> group, int64_t balancer = 0);

  /// A gather in flight: start it for the next step while this one computes.
  struct Pending {
    GatheredLengths said;  // what this rank sends
    int64_t d_model = 0;
    at::Tensor own = {}, gathered = {};
    WorkPtr work = {};
  };

  /// Collective over the group, also for ranks without sequences. `own`: what this rank sends; d_model: width of the
  /// blocks, on which ranks must agree.
  Pending start(GatheredLengths own, int64_t d_model);
  /// Waits for the gather. Any thread may call it, as it starts no collective. Returns nothing where some rank's
  /// lengths did not fit. Throws on every rank alike where ranks disagree (on the width, or on whether work is given),
  /// and on this rank alone where `stop` asks for it.
  std::optional<GatheredLengths> wait(const Pending& pending, const std::stop_token& stop = {}) const;
  /// Waits, and where lengths did not fit gathers once more, which is collective.
  GatheredLengths finish(Pending pending);

 private:
  std::shared_ptr<CommGroup> group_;
  int64_t balancer_ = 0;
  at::Device device_;
  int64_t capacity_ = 64;  // numbers after the header; the same on all ranks, always
};

}  // namespace knapformer
