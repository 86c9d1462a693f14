// LoadObserver against times made from a known gamma and known speeds.
#include "knapformer/core/model/load_observer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "knapformer/core/model/cluster.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

struct World {
  double k = 2.5e-15;
  double gamma = 0.45;
  std::vector<double> speed;
  double noise = 0;
  bool alike = false;  // the same mix of both kinds of work everywhere, as perfect balance gives
};

/// Steps of seeded work, measured in `world`.
void observe(LoadObserver& observer, const World& world, int num_steps, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> work(1e12, 5e13);
  std::normal_distribution<double> noise(0, 1);
  for (int step = 0; step < num_steps; ++step) {
    std::vector<LoadMeasurement> measured;
    for (size_t r = 0; r < world.speed.size(); ++r) {
      const double tokens = work(random), attention = world.alike ? 2 * tokens : work(random);
      const double seconds =
          world.k / world.speed[r] * (tokens + world.gamma * attention) * std::exp(world.noise * noise(random));
      measured.push_back(
          {.rank = static_cast<int32_t>(r), .token_work = tokens, .attention_work = attention, .seconds = seconds});
    }
    observer.add(measured);
  }
}

TEST(LoadObserver, SaysNothingBeforeItHasSeenEnough) {
  LoadObserver observer(1.0, {}, 4);
  observe(observer, {.speed = {1, 1, 1, 1}}, 3);
  EXPECT_EQ(observer.gamma(), 1.0);
  EXPECT_TRUE(observer.rank_speed().empty());
  EXPECT_EQ(observer.given_error(), 0);
  EXPECT_FALSE(observer.drifted());
}

TEST(LoadObserver, FindsGammaExactlyWithoutNoise) {
  LoadObserver observer(1.0, {}, 4);
  observe(observer, {.speed = {1, 1, 1, 1}}, 10);
  EXPECT_NEAR(observer.gamma(), 0.45, 1e-9);
  EXPECT_TRUE(observer.rank_speed().empty());
  EXPECT_GT(observer.given_error(), 0.1);
  EXPECT_LT(observer.learned_error(), 1e-6);
  EXPECT_TRUE(observer.drifted());
}

TEST(LoadObserver, FindsGammaAndSpeedsUnderNoise) {
  const std::vector<double> speed = {1.2, 1.0, 1.0, 0.8};
  LoadObserver observer(0.7, {}, 4);
  observe(observer, {.speed = speed, .noise = 0.03}, 60);
  EXPECT_NEAR(observer.gamma(), 0.45, 0.03);
  ASSERT_EQ(observer.rank_speed().size(), 4u);
  for (size_t r = 0; r < 4; ++r) EXPECT_NEAR(observer.rank_speed()[r], speed[r], 0.03);
  EXPECT_NEAR(observer.learned_error(), 0.03, 0.01);
}

TEST(LoadObserver, KeepsTheGivenGammaWhereItCanNotShow) {
  LoadObserver observer(0.7, {}, 4);
  observe(observer, {.gamma = 0.45, .speed = {1, 1, 1, 1}, .noise = 0.02, .alike = true}, 60);
  EXPECT_NEAR(observer.gamma(), 0.7, 1e-6);
  EXPECT_FALSE(observer.drifted());
}

TEST(LoadObserver, ForgetsWhatWasLongAgo) {
  LoadObserver observer(1.0, {}, 2);
  observe(observer, {.gamma = 1.0, .speed = {1, 1}, .noise = 0.01}, 50);
  EXPECT_NEAR(observer.gamma(), 1.0, 0.05);
  EXPECT_FALSE(observer.drifted());
  observe(observer, {.gamma = 0.4, .speed = {1.3, 0.7}, .noise = 0.01}, 400, 2);
  EXPECT_NEAR(observer.gamma(), 0.4, 0.02);
  ASSERT_EQ(observer.rank_speed().size(), 2u);
  EXPECT_NEAR(observer.rank_speed()[0], 1.3, 0.02);
  EXPECT_TRUE(observer.drifted());
}

TEST(LoadObserver, TakesSomeRanksAlone) {
  LoadObserver observer(1.0, {}, 3);
  for (int step = 1; step <= 20; ++step) {
    const double t = 1e13 * (1 + step % 3), a = 1e13 * (1 + step % 5);
    const LoadMeasurement idle{.rank = 0, .token_work = 0, .attention_work = 0, .seconds = 1};
    const LoadMeasurement busy{.rank = 2, .token_work = t, .attention_work = a, .seconds = 1e-15 * (t + 0.5 * a)};
    observer.add(std::vector<LoadMeasurement>{idle, busy});
  }
  EXPECT_NEAR(observer.gamma(), 0.5, 1e-6);
}

/// Steps in which `rank` (or each, where -1) measures in a unit of `unit` seconds. Returns in how many something was
/// left out.
int observe_in(LoadObserver& observer, double unit, int32_t rank, int num_ranks, int num_steps) {
  int num_left_out = 0;
  for (int step = 0; step < num_steps; ++step) {
    std::vector<LoadMeasurement> measured;
    for (int32_t r = 0; r < num_ranks; ++r) {
      const double t = 1e13 * (1 + (step + r) % 3), a = 1e13 * (1 + (step + 2 * r) % 5);
      const double seconds = 1e-15 * (t + 0.5 * a) / (r == rank || rank < 0 ? unit : 1);
      measured.push_back({.rank = r, .token_work = t, .attention_work = a, .seconds = seconds});
    }
    num_left_out += observer.add(measured).has_value() ? 1 : 0;
  }
  return num_left_out;
}

TEST(LoadObserver, LeavesOutMeasurementsInAnotherUnit) {
  for (const int num_ranks : {2, 4}) {
    for (const int num_good_steps : {0, 20}) {
      for (const double unit : {1e-3, 1e-9, 3600.0}) {
        LoadObserver observer(1.0, {}, num_ranks);
        EXPECT_EQ(observe_in(observer, 1, 0, num_ranks, num_good_steps), 0);
        EXPECT_EQ(observe_in(observer, unit, 1, num_ranks, 60), 60);
        EXPECT_NEAR(observer.gamma(), 0.5, 1e-6) << num_ranks << " ranks, after " << num_good_steps << ", " << unit;
        EXPECT_TRUE(observer.rank_speed().empty());
      }
    }
  }
}

TEST(LoadObserver, TakesAnyUnitThatIsEverybodys) {
  LoadObserver observer(1.0, {}, 2);
  EXPECT_EQ(observe_in(observer, 1e-3, -1, 2, 1), 0);  // as slow as a first step may be
  EXPECT_EQ(observe_in(observer, 1, -1, 2, 300), 0);
  EXPECT_NEAR(observer.gamma(), 0.5, 0.01);
  EXPECT_EQ(observe_in(observer, 1e-3, -1, 2, 300), 4);  // until it is that of most of the steps compared
}

TEST(LoadObserver, TeachesOnlyWhatPlansTake) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> digits(-12, 12), work(-20, 50);
  for (const double gamma : {0.0, 1e-20, 1.0, 1e20}) {
    for (int trial = 0; trial < 50; ++trial) {
      LoadObserver observer(gamma, {}, 3);
      for (int step = 0; step < 30; ++step) {
        std::vector<LoadMeasurement> measured;
        for (int32_t r = 0; r < 3; ++r) {
          measured.push_back({.rank = r,
                              .token_work = std::pow(10, work(random)),
                              .attention_work = std::pow(10, work(random)),
                              .seconds = std::pow(10, digits(random))});
        }
        observer.add(measured);
        EXPECT_TRUE(observer.gamma() >= 0 && observer.gamma() <= kMaxMagnitude) << observer.gamma();
        for (const double speed : observer.rank_speed()) {
          for (const double other : observer.rank_speed()) EXPECT_LE(speed, kMaxSpeedRatio * other);
        }
      }
    }
  }
}

}  // namespace
}  // namespace knapformer
