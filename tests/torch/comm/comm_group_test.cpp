#include "knapformer/torch/comm/comm_group.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "knapformer/core/util/error.h"
#include "tests/torch/in_process_group.h"

namespace knapformer {
namespace {

std::shared_ptr<CommGroup> join(testing::InProcessWorld& world, int32_t rank, const std::string& name) {
  const ProcessGroupPtr group = world.all(rank);
  const auto watchdog = std::make_shared<Watchdog>(group->getStore(), rank);
  return CommGroup::make(name, group, "comm_group_test", watchdog);
}

TEST(CommGroup, IsKnownByAUniqueNameAsLongAsItLives) {
  testing::InProcessWorld world(1);
  auto first = join(world, 0, "name"), second = join(world, 0, "name");
  EXPECT_EQ(first->name(), "name");
  EXPECT_NE(second->name(), "name");
  EXPECT_EQ(CommGroup::find("name"), first);
  EXPECT_EQ(CommGroup::find(second->name()), second);
  first.reset();
  EXPECT_THROW(CommGroup::find("name"), StateError);
}

TEST(CommGroup, CountsWhatItMoves) {
  testing::InProcessWorld world(2);
  world.run_all([&](int32_t rank) {
    const auto group = join(world, rank, "counts");
    const std::vector<int64_t> splits = rank == 0 ? std::vector<int64_t>{0, 3} : std::vector<int64_t>{3, 0};
    at::Tensor sent = at::full({3}, rank, at::kByte), received = at::empty({3}, at::kByte);
    group->wait(*group->start_all_to_all(received, sent, splits, splits), at::kCPU, "swap");
    EXPECT_TRUE(at::equal(received, at::full({3}, 1 - rank, at::kByte)));
    at::Tensor own = at::full({2}, rank, at::kLong), all = at::empty({4}, at::kLong);
    group->wait(*group->start_all_gather(all, own), at::kCPU, "gather");
    EXPECT_TRUE(at::equal(all, at::tensor({0, 0, 1, 1}, at::kLong)));
    EXPECT_EQ(group->counters().bytes_sent, 3 + 2 * 8);
    EXPECT_EQ(group->counters().num_collectives, 2);
    EXPECT_GE(group->counters().waited_ns, 0);
  });
}

}  // namespace
}  // namespace knapformer
