// Call fingerprints over a store alone: who announces when, and what ranks that differ get told.
#include "knapformer/torch/comm/fingerprint.h"

#include <gtest/gtest.h>

#include <barrier>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "knapformer/core/util/error.h"
#include "tests/torch/in_process_group.h"

namespace knapformer {
namespace {

using namespace std::chrono_literals;

/// Counts what ranks ask of it.
class CountingStore : public c10d::HashStore {
 public:
  using HashStore::set;
  std::atomic<int64_t> num_asked = 0;
  std::atomic<int64_t> num_compared = 0;  // one an announcement; unlike waits, their number does not hang on timing

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++num_asked;
    HashStore::set(key, value);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& value) override {
    ++num_asked;
    ++num_compared;
    return HashStore::compareSet(key, expected, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    ++num_asked;
    return HashStore::check(keys);
  }
  int64_t add(const std::string& key, int64_t value) override {
    ++num_asked;
    return HashStore::add(key, value);
  }
};

struct Callers {
  c10::intrusive_ptr<CountingStore> store = c10::make_intrusive<CountingStore>();
  testing::InProcessWorld ranks;

  explicit Callers(int32_t num_ranks) : ranks(num_ranks) {}

  std::shared_ptr<PeerErrors> peer_errors(int32_t rank) {
    return std::make_shared<PeerErrors>(c10::make_intrusive<c10d::PrefixStore>("errors", store), rank);
  }

  std::shared_ptr<CallFingerprints> join(int32_t rank, std::chrono::milliseconds timeout = 10s) {
    const auto peer_errors = this->peer_errors(rank);
    auto fingerprints = std::make_shared<CallFingerprints>(c10::make_intrusive<c10d::PrefixStore>("calls", store),
                                                           RankInGroup{.rank = rank, .num_ranks = ranks.num_ranks()},
                                                           timeout, peer_errors);
    peer_errors->watch(fingerprints);
    return fingerprints;
  }
};

Fingerprint fingerprint(std::string_view call, std::string_view dtype = "float", std::string_view gradient = "True") {
  Fingerprint f(call);
  f.add("x", dtype);
  f.add("x.requires_grad", gradient);
  return f;
}

TEST(CallFingerprints, AskTheStoreOnlyUntilCallsRepeat) {
  Callers world(3);
  std::atomic<int64_t> asked_by_first_steps = 0, asked_by_all_steps = 0, compared_by_first_steps = 0;
  std::barrier all_here(3);
  world.ranks.run_all([&](int32_t rank) {
    const auto calls = world.join(rank);
    const auto step = [&](int32_t num_layers) {
      calls->agree(Fingerprint("plan_routing"));
      calls->agree(fingerprint("route"));
      for (int32_t i = 0; i < num_layers; ++i) {
        calls->agree(fingerprint("pre_attn"));
        calls->agree(fingerprint("post_attn"));
      }
      calls->agree(fingerprint("reverse_route"));
    };
    step(20);
    // The third layer onwards repeats what followed before; the end and the next step's beginning do not.
    step(20);
    all_here.arrive_and_wait();
    if (rank == 0) {
      asked_by_first_steps = world.store->num_asked.load();
      compared_by_first_steps = world.store->num_compared.load();
    }
    all_here.arrive_and_wait();
    for (int32_t i = 0; i < 50; ++i) step(20);
    all_here.arrive_and_wait();
    if (rank == 0) asked_by_all_steps = world.store->num_asked.load();
    all_here.arrive_and_wait();  // a rank that leaves says so in the store
  });
  EXPECT_EQ(asked_by_all_steps, asked_by_first_steps);
  // Of the 86 calls of the first two steps, each rank announces plan_routing, route, pre_attn, post_attn, pre_attn
  // after post_attn, reverse_route after post_attn, and plan_routing after reverse_route.
  EXPECT_EQ(compared_by_first_steps, 3 * 7);
}

TEST(CallFingerprints, PredictStepsOfTwoKindsByWhatCameBefore) {
  Callers world(2);
  std::atomic<int64_t> compared_by_first_steps = 0;
  std::barrier all_here(2);
  world.ranks.run_all([&](int32_t rank) {
    const auto calls = world.join(rank);
    int64_t number = 0;
    const auto step = [&](int32_t i) {  // every third step has one like it inside, then goes on
      const int64_t own = ++number;
      const auto call = [&](std::string_view name, int64_t of_step) {
        Fingerprint called = fingerprint(name);
        called.step = of_step;
        calls->agree(called);
      };
      calls->enter_step(own);
      for (int32_t layer = 0; layer < 20; ++layer) call("attention", own);
      if (i % 3 == 0) {
        calls->enter_step(++number);
        for (int32_t layer = 0; layer < 20; ++layer) call("attention", number);
        call("reverse_route", number);
      }
      for (int32_t layer = 0; layer < 20; ++layer) call("attention backward", own);
    };
    for (int32_t i = 0; i < 6; ++i) step(i);
    all_here.arrive_and_wait();
    if (rank == 0) compared_by_first_steps = world.store->num_compared.load();
    all_here.arrive_and_wait();
    for (int32_t i = 0; i < 6; ++i) step(i);
  });
  EXPECT_EQ(world.store->num_compared, compared_by_first_steps);
}

TEST(CallFingerprints, LetAllRanksChangeTogether) {
  Callers world(2);
  world.ranks.run_all([&](int32_t rank) {
    const auto calls = world.join(rank);
    for (int32_t i = 0; i < 30; ++i)
      calls->agree(fingerprint("route", i % 3 == 0 ? "float" : "double", i % 2 == 0 ? "False" : "True"));
  });
}

TEST(CallFingerprints, LeaveFewKeysBehind) {
  Callers world(2);
  world.ranks.run_all([&](int32_t rank) {
    const auto calls = world.join(rank);
    for (int32_t i = 0; i < 100; ++i) calls->agree(fingerprint("route", std::to_string(i)));
  });
  EXPECT_LT(world.store->getNumKeys(), 12);
}

TEST(CallFingerprints, NameACallOfTheStepBefore) {
  Callers world(2);
  const auto errors = world.ranks.run([&](int32_t rank) {
    const auto calls = world.join(rank);
    for (int32_t step = 0; step < 3; ++step) {
      calls->agree(fingerprint("route", rank == 0 && step == 2 ? "half" : "float"));
      calls->agree(fingerprint("plan_routing"));
    }
    for (;;) {  // rank 1 alone comes to here
      std::this_thread::sleep_for(1ms);
      world.peer_errors(rank)->guard([&] { calls->check_announcements(); });
    }
  });
  EXPECT_NE(testing::describe(errors[1]).find("route: x: got float on rank 1, expected half, as on rank 0"),
            std::string::npos)
      << testing::describe(errors[1]);
}

}  // namespace
}  // namespace knapformer
