// LoadObserver against times made from a known gamma and known speeds.
#include "knapformer/core/model/load_observer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

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
  EXPECT_EQ(observer.num_measurements(), 12);
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
  EXPECT_EQ(observer.num_measurements(), 20);
  EXPECT_NEAR(observer.gamma(), 0.5, 1e-6);
}

}  // namespace
}  // namespace knapformer
