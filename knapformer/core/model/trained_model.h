// The trained model: what a step runs, as far as its cost depends on it.
#pragma once

#include <cstdint>
#include <string_view>

#include "knapformer/core/util/record.h"

namespace knapformer {

/// What a step computes.
enum class StepMode {
  kTraining,   // every parameter
  kLora,       // low-rank adapters on a frozen base: no gradients of the base's matrices
  kInference,  // forward only
};

/// Passes over a block in one step, in units of its forward pass.
struct Passes {
  double forwards = 1;            // with the recomputation
  double token_backward = 0;      // per-token layers
  double attention_backward = 0;  // attention has no parameters: both of its gradients are always needed
  double backwards = 0;           // 1 if there is a backward pass, which exchanges as much as a forward pass
  double routes = 2;              // route and reverse_route, with their gradients; 0 if nothing is routed

  double token() const { return forwards + token_backward; }
  double attention() const { return forwards + attention_backward; }
  double exchanges() const { return forwards + backwards; }
};

/// The default is the paper's: FLUX, 19 double-stream and 38 single-stream blocks, trained with recomputation.
struct TrainedModel {
  int32_t num_blocks = 57;
  double num_parameters = 12e9;
  int32_t element_size = 2;
  StepMode mode = StepMode::kTraining;
  bool recomputes = true;
  bool routed = true;
  int32_t shard_ranks = 32;
  int32_t side_bytes_per_token = 0;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  bool cuts_queries = false;
  double max_stage_bytes = 0;

  Passes passes() const;

  /// Throws ArgumentError, which names the field.
  void validate() const;
  bool operator==(const TrainedModel&) const = default;

  static constexpr auto fields() {
    return std::tuple{
        field("num_blocks", &TrainedModel::num_blocks, "Transformer blocks, all alike.", 1, 1 << 20),
        field("num_parameters", &TrainedModel::num_parameters, "Of all blocks: what FSDP gathers."),
        field("element_size", &TrainedModel::element_size, "Bytes of a number that travels.", 1, 16),
        field("mode", &TrainedModel::mode, "'training', 'lora' (a frozen base) or 'inference'."),
        field("recomputes", &TrainedModel::recomputes,
              "Activation checkpointing: every block's forward runs again before its backward."),
        field("routed", &TrainedModel::routed,
              "Tokens travel from their home rank and back. False where ranks load what they compute."),
        field("shard_ranks", &TrainedModel::shard_ranks,
              "Ranks over which FSDP shards the parameters; more ranks hold copies and all-reduce gradients.", 1,
              1 << 20),
        field("side_bytes_per_token", &TrainedModel::side_bytes_per_token,
              "Bytes that route moves with each token beside its features (positions and the like).", 0, 1 << 30),
        field("num_heads", &TrainedModel::num_heads,
              "Query heads; where a group's ranks do not divide them, some compute more. 0: as if evenly shared.", 0,
              1 << 20),
        field("num_kv_heads", &TrainedModel::num_kv_heads,
              "Key/value heads, a divisor of num_heads. 0: as many as query heads.", 0, 1 << 20),
        field("cuts_queries", &TrainedModel::cuts_queries,
              "The attention kernel takes a part of a sequence's queries beside all of its keys, as PackedAttention "
              "does: ranks whose number does not divide the heads then share queries as well."),
        field("max_stage_bytes", &TrainedModel::max_stage_bytes,
              "With cuts_queries: about how many bytes of keys and values a stage is to bring a rank, for each degree, "
              "by the mean load of a group. The cut that exceeds it least is taken, with at most 4 stages: one where "
              "sequences have masks, or where nothing overlaps. 0: no limit.")};
  }
};
static_assert(kListsEveryField<TrainedModel>);

/// "training", "lora", "inference". Throws ArgumentError (argument "mode").
StepMode parse_step_mode(std::string_view name);
std::string_view step_mode_name(StepMode mode);

}  // namespace knapformer
