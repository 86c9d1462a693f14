#include "knapformer/core/model/topology.h"

#include <algorithm>
#include <tuple>

#include "knapformer/core/util/error.h"
#include "knapformer/core/util/text_reader.h"

namespace knapformer {
namespace {

BagShape parse_term(TextReader& reader) {
  BagShape shape;
  reader.skip_spaces();
  if (!reader.accept('g')) reader.fail("topology", "terms like 'g8n4' or 'g8/4/2/1n4' joined by '+'; 'g'");
  do {
    const TextReader start = reader;
    const auto degree = reader.number(1, kMaxRanks);
    if (!degree) reader.fail("topology", text("a number of ranks from 1 to ", kMaxRanks));
    if (!shape.degrees.empty() && (*degree >= shape.degrees.back() || shape.degrees.front() % *degree != 0 ||
                                   shape.degrees.back() % *degree != 0)) {
      start.fail("topology",
                 text("degrees that fall and divide each other, so a divisor of ", shape.degrees.back(), " below it"));
    }
    shape.degrees.push_back(*degree);
  } while (reader.accept('/'));
  std::reverse(shape.degrees.begin(), shape.degrees.end());
  if (!reader.accept('n')) reader.fail("topology", "'n' and a number of bags");
  const auto num_bags = reader.number(1, kMaxRanks);
  if (!num_bags) reader.fail("topology", text("a number of bags from 1 to ", kMaxRanks));
  shape.num_bags = *num_bags;
  reader.skip_spaces();
  return shape;
}

/// Neighbours of equal shape become one.
std::vector<BagShape> joined(std::vector<BagShape> shapes) {
  std::vector<BagShape> joined;
  for (BagShape& shape : shapes) {
    if (!joined.empty() && joined.back().degrees == shape.degrees) {
      joined.back().num_bags += shape.num_bags;
    } else {
      joined.push_back(std::move(shape));
    }
  }
  return joined;
}

/// Small bags first; of equal size, those with fewer degrees first. Equal shapes are joined.
std::vector<BagShape> canonical(std::vector<BagShape> shapes) {
  std::ranges::stable_sort(shapes, {}, [](const BagShape& shape) {
    return std::tuple(shape.num_ranks_per_bag(), shape.degrees.size(), shape.degrees);
  });
  return joined(std::move(shapes));
}

}  // namespace

Topology Topology::parse(std::string_view text) {
  std::vector<BagShape> shapes;
  TextReader reader(text);
  int64_t num_ranks = 0;
  do {
    shapes.push_back(parse_term(reader));
    num_ranks += int64_t{shapes.back().num_ranks_per_bag()} * shapes.back().num_bags;
  } while (reader.accept('+'));
  if (!reader.at_end()) reader.fail("topology", "'+' or the end");

  Topology topology;
  if (num_ranks > kMaxRanks) {
    throw_argument("topology", knapformer::text("'", text, "' with ", num_ranks, " ranks"),
                   knapformer::text("at most ", kMaxRanks, " ranks"));
  }
  topology.shapes_ = canonical(std::move(shapes));
  topology.num_ranks_per_replica_ = static_cast<int32_t>(num_ranks);
  topology.repeat(1);
  return topology;
}

Topology Topology::parse(std::string_view text, int64_t num_ranks) {
  Topology topology = parse(text);
  if (num_ranks < 1 || num_ranks > kMaxRanks || num_ranks % topology.num_ranks_per_replica_ != 0) {
    throw_argument("topology",
                   knapformer::text("'", text, "', which is ", topology.num_ranks_per_replica_, " ranks, for ",
                                    num_ranks, num_ranks == 1 ? " rank" : " ranks"),
                   "a topology whose ranks divide the ranks of the group");
  }
  topology.repeat(static_cast<int32_t>(num_ranks / topology.num_ranks_per_replica_));
  return topology;
}

Topology Topology::nested(int32_t bag_ranks, int32_t num_bags) {
  std::string degrees = text('g', bag_ranks);
  for (int32_t degree = bag_ranks; degree > 1;) {
    int32_t prime = 2;  // the smallest each time: this gives the most degrees that divide each other
    while (degree % prime != 0) ++prime;
    degree /= prime;
    degrees += text('/', degree);
  }
  return parse(text(degrees, 'n', num_bags));
}

void Topology::repeat(int32_t num_replicas) {
  num_replicas_ = num_replicas;
  bags_.clear();
  bag_of_rank_.clear();
  int32_t rank = 0;
  for (int32_t replica = 0; replica < num_replicas; ++replica) {
    for (size_t s = 0; s < shapes_.size(); ++s) {
      for (int32_t i = 0; i < shapes_[s].num_bags; ++i) {
        const int32_t size = shapes_[s].num_ranks_per_bag();
        bag_of_rank_.insert(bag_of_rank_.end(), static_cast<size_t>(size), BagId(bags_.size()));
        bags_.push_back({.first_rank = Rank(rank), .num_ranks = size, .shape = static_cast<int32_t>(s)});
        rank += size;
      }
    }
  }
}

std::string Topology::str() const {
  std::string out;
  for (const BagShape& shape : shapes_) {
    if (!out.empty()) out += '+';
    out += 'g';
    for (auto degree = shape.degrees.rbegin(); degree != shape.degrees.rend(); ++degree) {
      if (degree != shape.degrees.rbegin()) out += '/';
      out += std::to_string(*degree);
    }
    out += 'n' + std::to_string(shape.num_bags);
  }
  return out;
}

Topology Topology::within(int32_t num_ranks) const {
  std::vector<BagShape> shapes = shapes_;
  for (BagShape& shape : shapes) {
    const auto end = std::ranges::upper_bound(shape.degrees, num_ranks);
    if (end == shape.degrees.begin()) continue;
    const int32_t size = shape.num_ranks_per_bag();
    shape.degrees.erase(end, shape.degrees.end());
    shape.num_bags *= size / shape.num_ranks_per_bag();
  }
  Topology smaller;
  smaller.shapes_ = joined(std::move(shapes));
  smaller.num_ranks_per_replica_ = num_ranks_per_replica_;
  smaller.repeat(num_replicas_);
  return smaller;
}

int32_t Topology::max_ranks_per_bag() const {
  return std::ranges::max_element(shapes_, {}, &BagShape::num_ranks_per_bag)->num_ranks_per_bag();
}

bool Topology::is_flat() const { return std::ranges::all_of(shapes_, &BagShape::is_flat); }

}  // namespace knapformer
