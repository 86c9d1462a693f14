#include "knapformer/core/model/cluster.h"

#include <algorithm>
#include <array>

namespace knapformer {
namespace {

constexpr double kPublishedHostSPerPiece = 4.55e-6;  // fitted, see docs/cluster_model.md

struct NamedCluster {
  std::string_view name;
  Cluster cluster;
};

/// A published H100 rank sustains 298 of its 989 TFLOP/s over whole blocks, and 120 of its 450 GB/s of NVLink in an
/// all-to-all with its packing (both fitted to the paper's table). The other accelerators are taken to sustain the same
/// shares of their data sheets' dense bf16 rate and NVLink bandwidth a direction; networks count half their line rate.
/// None of these others was measured. docs/cluster_model.md has the sheets' figures.
constexpr double kSustained = 2.98e14 / 989e12, kNvlinkShare = 1.20e11 / 450e9, kNetworkShare = 0.5;

constexpr Cluster from_sheet(double peak_flops_per_s, double link_bytes_per_s, double network_line_bytes_per_s) {
  return {.flops_per_s = kSustained * peak_flops_per_s,
          .node_bytes_per_s = kNvlinkShare * link_bytes_per_s,
          .network_bytes_per_s = kNetworkShare * network_line_bytes_per_s};
}

/// Ranks of one thread each over Gloo's loopback, as the simulator starts them. The values are orders of magnitude for
/// one core of a present server. Where they matter, measure them: knapformer calibrate.
constexpr Cluster kCpu = {.flops_per_s = 5e10,
                          .node_bytes_per_s = 1e9,
                          .network_bytes_per_s = 1e9,
                          .node_latency_s = 2e-4,
                          .network_latency_s = 2e-4,
                          .fixed_s = 0,
                          .overlaps_attention = false};

constexpr std::array<NamedCluster, 6> kNamed = {{
    {"h100", Cluster{}},
    {"h100-pcie", from_sheet(756e12, 64e9, 25e9)},
    {"h200", Cluster{}},
    {"b200", from_sheet(2250e12, 900e9, 50e9)},
    {"a100", from_sheet(312e12, 300e9, 25e9)},
    {"cpu", kCpu},
}};

}  // namespace

std::vector<std::string_view> Cluster::names() {
  std::vector<std::string_view> names;
  for (const NamedCluster& cluster : kNamed) names.push_back(cluster.name);
  return names;
}

Cluster Cluster::named(std::string_view name) {
  const auto found = std::ranges::find(kNamed, name, &NamedCluster::name);
  if (found != kNamed.end()) return found->cluster;
  std::string expected;
  for (const std::string_view known : names()) expected += text(expected.empty() ? "one of '" : "', '", known);
  throw_argument("cluster", text("'", name, "'"), expected + "'");
}

Cluster Cluster::published() { return {.host_s_per_piece = kPublishedHostSPerPiece, .overlaps_attention = false}; }

}  // namespace knapformer
