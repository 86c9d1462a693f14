// Topology: how the ranks of a group are cut into bags, written "g1n2+g2n1+g4n1".
//
//   text      := term ('+' term)*
//   term      := 'g' degrees 'n' count        N bags of G ranks
//   degrees   := G ('/' G')*                   descending divisors of G: how many ranks may share a sequence
//
// "g4n2" is a flat bag: each of its sequences is shared by all 4 ranks. "g8/4/2/1n4" is a nested one: a sequence may
// be shared by 8, 4, 2 or 1 ranks, in aligned groups (a group of degree g starts at a multiple of g inside the bag).
//
// A bag's ranks are consecutive; bags are ordered by size, small first. Where the group has a multiple of the
// topology's ranks, the topology repeats: each copy is a replica, which balances within itself.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "knapformer/core/util/ids.h"

namespace knapformer {

inline constexpr int32_t kMaxRanks = 1 << 20;  // of a group

struct BagShape {
  /// Ascending; the last one is the bag's size. A flat bag has one.
  std::vector<int32_t> degrees;
  int32_t num_bags = 0;

  int32_t num_ranks_per_bag() const { return degrees.back(); }
  bool is_flat() const { return degrees.size() == 1; }
  bool operator==(const BagShape&) const = default;
};

struct Bag {
  Rank first_rank;
  int32_t num_ranks = 0;
  int32_t shape = 0;  // index into Topology::shapes()

  bool operator==(const Bag&) const = default;
};

class Topology {
 public:
  /// One replica. Throws ArgumentError (argument "topology") where the text is malformed.
  static Topology parse(std::string_view text);
  /// Repeated over `num_ranks` ranks. Throws ArgumentError where `num_ranks` is no multiple of the topology's ranks.
  static Topology parse(std::string_view text, int64_t num_ranks);
  /// `num_bags` bags of `bag_ranks` ranks, nested with as many degrees as nest, down to 1: "g8/4/2/1n4".
  static Topology nested(int32_t bag_ranks, int32_t num_bags);

  /// The canonical text of one replica: terms of equal shape are joined, small bags come first.
  std::string str() const;

  int32_t num_ranks() const { return num_replicas_ * num_ranks_per_replica_; }
  int32_t num_ranks_per_replica() const { return num_ranks_per_replica_; }
  int32_t num_replicas() const { return num_replicas_; }
  int32_t num_bags_per_replica() const { return static_cast<int32_t>(bags_.size()) / num_replicas_; }
  bool is_flat() const;
  int32_t max_ranks_per_bag() const;
  /// The same ranks in the same order, without groups of more than `num_ranks`: each bag becomes its largest groups of
  /// no more. A bag whose groups are all larger stays.
  Topology within(int32_t num_ranks) const;
  std::span<const BagShape> shapes() const { return shapes_; }
  /// The bags of all replicas, those of replica 0 first.
  std::span<const Bag> bags() const { return bags_; }
  const Bag& bag(BagId id) const { return bags_[id.index()]; }
  BagId bag_of(Rank rank) const { return bag_of_rank_[rank.index()]; }

  bool operator==(const Topology&) const = default;

 private:
  void repeat(int32_t num_replicas);

  std::vector<BagShape> shapes_;  // ascending by size, unless from `within`
  std::vector<Bag> bags_;
  std::vector<BagId> bag_of_rank_;
  int32_t num_ranks_per_replica_ = 0;
  int32_t num_replicas_ = 1;
};

}  // namespace knapformer
