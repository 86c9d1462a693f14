// The cluster: what a rank computes and what its links carry. The parameters of the one cost model (cost/step_time.h)
// that belong to the machine; those of what runs on it are in trained_model.h.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "knapformer/core/util/ids.h"
#include "knapformer/core/util/record.h"

namespace knapformer {

/// How many times as fast as the slowest rank a plan's fastest may be: far beyond any machine, near enough that no time
/// or level overflows.
inline constexpr double kMaxSpeedRatio = 1e6;

/// The default is "h100". Values marked "fitted" are fitted to the 15 rows of the paper's Table 1 by
/// docs/cluster_model.py, which prints the residuals; docs/cluster_model.md also has the sources of the
/// other named clusters.
struct Cluster {
  double flops_per_s = 2.98e14;  // fitted
  int32_t ranks_per_node = 8;
  double node_bytes_per_s = 1.20e11;  // fitted
  double network_bytes_per_s = 2.5e10;
  double node_latency_s = 11.8e-6;
  double network_latency_s = 22.4e-6;
  double fixed_s = 0.525;  // fitted
  double host_s_per_piece = 0;
  bool overlaps_attention = true;

  /// Throws ArgumentError (argument "cluster") for a name that is not in names().
  static Cluster named(std::string_view name);
  static std::vector<std::string_view> names();
  /// The cluster and the implementation that the paper measured: the default with the host's cost per piece (fitted),
  /// and without overlap.
  static Cluster published();

  bool same_node(Rank a, Rank b) const { return a.value / ranks_per_node == b.value / ranks_per_node; }

  /// Throws ArgumentError, which names the field. Bandwidths may be infinite: communication is then free.
  void validate() const { check_fields(*this); }
  bool operator==(const Cluster&) const = default;

  static constexpr auto fields() {
    constexpr double kMin = 1 / kMaxMagnitude;
    return std::tuple{
        field("flops_per_s", &Cluster::flops_per_s,
              "Matrix-product FLOP/s that a rank of speed 1 sustains over whole blocks.", kMin),
        field("ranks_per_node", &Cluster::ranks_per_node, "Ranks of one node.", 1, 1 << 20),
        field("node_bytes_per_s", &Cluster::node_bytes_per_s,
              "Bytes/s that a rank sends in an all-to-all inside its node, packing included.", kMin, kInfinity),
        field("network_bytes_per_s", &Cluster::network_bytes_per_s, "Bytes/s that a rank sends to other nodes.", kMin,
              kInfinity),
        field("node_latency_s", &Cluster::node_latency_s,
              "Seconds before the first byte of an exchange inside a node: launch and one hop."),
        field("network_latency_s", &Cluster::network_latency_s, "The same, between nodes."),
        field("fixed_s", &Cluster::fixed_s,
              "Seconds a micro-batch, whatever its load: kernel launches, embeddings, loss."),
        field("host_s_per_piece", &Cluster::host_s_per_piece,
              "Host seconds per block for every piece (a chunk, times the ranks that share it) that is copied one by "
              "one; 0 here, not in the published implementation."),
        field("overlaps_attention", &Cluster::overlaps_attention,
              "Attention on sequences that are whole on a rank runs while the others' q, k and v travel.")};
  }
};
static_assert(kListsEveryField<Cluster>);

}  // namespace knapformer
