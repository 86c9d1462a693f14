// PeerErrors of ranks whose counts of calls the test sets. Nothing here waits: polls say at once that they would.
#include "knapformer/torch/comm/peer_errors.h"

#include <gtest/gtest.h>

#include <functional>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "knapformer/core/util/error.h"
#include "tests/torch/in_process_group.h"

namespace knapformer {
namespace {

class Group : public WatchedGroup {
 public:
  using WatchedGroup::WatchedGroup;
  void set_calls(int64_t count) { *num_calls_begun_ = count; }
  void check_announcements() override {
    ++num_checks;
    if (announced) throw StateError("announced");
    if (meanwhile) meanwhile();
  }
  int32_t num_checks = 0;
  bool announced = false;
  std::function<void()> meanwhile;  // what others do in the middle of a look
};

/// Rank `rank` of 4, in bags of 2.
struct Watched {
  std::shared_ptr<Group> all, bag;
  PeerErrors peer_errors;

  Watched(const c10::intrusive_ptr<c10d::Store>& store, int32_t rank)
      : all(std::make_shared<Group>(RankInGroup{.rank = rank, .num_ranks = 4})),
        bag(std::make_shared<Group>(RankInGroup{.rank = rank % 2, .num_ranks = 2, .first_number = rank / 2 * 2})),
        peer_errors(store, rank) {
    peer_errors.watch(all);
    peer_errors.watch(bag);
  }
  void come_to(int64_t calls_of_all, int64_t calls_of_bag) {
    all->set_calls(calls_of_all);
    bag->set_calls(calls_of_bag);
  }
  /// Waits in `label` for `looks` looks.
  std::string wait(std::string_view label, int32_t looks, bool in_background = false) {
    try {
      peer_errors.wait(label, [&](std::chrono::milliseconds) { return looks-- == 0; }, in_background);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }
  /// Comes to wait in `label`, and stays there.
  void stay(std::string_view label) {
    EXPECT_THROW(peer_errors.wait(label,
                                  [n = 0](std::chrono::milliseconds) mutable {
                                    return n++ == 0 ? false : throw std::runtime_error("left");
                                  }),
                 std::runtime_error);
  }
};

TEST(PeerErrors, LooksOnlyWhereAWaitIsLong) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Watched rank(store, 0);
  EXPECT_EQ(rank.wait("route(x)", 0), "");
  EXPECT_EQ(rank.all->num_checks, 0);
  EXPECT_EQ(store->getNumKeys(), 0);
  EXPECT_EQ(rank.wait("route(x)", 2), "");
  EXPECT_EQ(rank.all->num_checks, 2);
  EXPECT_EQ(rank.bag->num_checks, 2);
}

TEST(PeerErrors, WaitsLongerBetweenLooks) {
  Watched rank(c10::make_intrusive<c10d::HashStore>(), 0);
  std::vector<int64_t> patience;
  rank.peer_errors.wait("route(x)", [&](std::chrono::milliseconds p) {
    patience.push_back(p.count());
    return patience.size() == 5;
  });
  EXPECT_EQ(patience, (std::vector<int64_t>{200, 400, 800, 1000, 1000}));
}

TEST(PeerErrors, ThrowsWhatOthersPostedOrAnnounced) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Watched rank(store, 0), other(store, 1);
  rank.bag->announced = true;
  EXPECT_EQ(rank.wait("route(x)", 1), "announced");
  rank.bag->announced = false;
  other.peer_errors.post(StateError("no memory"));
  EXPECT_EQ(rank.wait("route(x)", 1), "rank 1: no memory");
}

TEST(PeerErrors, NamesRanksThatWaitForEachOtherCrosswise) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Watched rank(store, 0), other(store, 1);
  other.come_to(3, 5);
  other.stay("reverse_route(x)");
  for (const auto& [all, bag] : {std::pair<int64_t, int64_t>{3, 5}, {2, 4}, {3, 6}, {4, 5}}) {  // level, behind, ahead
    rank.come_to(all, bag);
    EXPECT_EQ(rank.wait("pre_attn(q,k,v)", 1), "") << all << " " << bag;
  }
  rank.come_to(2, 6);
  EXPECT_EQ(
      rank.wait("pre_attn(q,k,v)", 1),
      "call: got pre_attn(q,k,v) on rank 0, expected reverse_route(x), as on rank 1: they would wait for each other");
  EXPECT_EQ(rank.wait("plan_routing", 1, /*in_background=*/true), "");  // that thread knows nothing of the order
}

TEST(PeerErrors, NamesRanksThatHaveNotCome) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Watched rank(store, 0), same(store, 1), behind(store, 2);
  rank.come_to(4, 1);
  same.come_to(4, 0);
  same.stay("route(x)");
  behind.come_to(3, 1);
  behind.stay("attention backward(q/2)");
  EXPECT_EQ(rank.peer_errors.absent_ranks(*rank.all), "rank 2 (in attention backward(q/2)), rank 3 (in no call)");
  EXPECT_EQ(rank.peer_errors.absent_ranks(*rank.bag), "rank 1 (in route(x))");
  EXPECT_EQ(behind.wait("attention backward(q/2)", 1), "");  // and goes on
  EXPECT_EQ(rank.peer_errors.absent_ranks(*rank.all), "rank 2 (in no call), rank 3 (in no call)");
}

template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (...) {
    return testing::describe(std::current_exception());
  }
  return "";
}

TEST(ErrorStore, TellsTheFirstErrorToAllWithItsKindAndRank) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  PeerErrors first(store, 3), second(store, 4), third(store, 5);
  EXPECT_EQ(error_of([&] { second.check_errors(); }), "");
  EXPECT_EQ(error_of([&] { first.guard([] { throw ArgumentError("x: got 1"); }); }), "ArgumentError: x: got 1");
  second.post(StateError("later"));
  EXPECT_EQ(error_of([&] { third.check_errors(); }), "ArgumentError: rank 3: x: got 1");
  EXPECT_EQ(error_of([&] { second.check_errors(); }), "ArgumentError: rank 3: x: got 1");
}

TEST(ErrorStore, NamesTheErrorOfARankThatRaisedAndLeftInTheMiddleOfALook) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  PeerErrors waiting(store, 0, /*num_ranks=*/2), failing(store, 1, 2);
  const auto group = std::make_shared<Group>(RankInGroup{.rank = 0, .num_ranks = 2});
  waiting.watch(group);
  group->set_calls(1);
  group->meanwhile = [&] {
    EXPECT_NE(error_of([&] { failing.guard([] { throw ArgumentError("x: got 1"); }); }), "");
    failing.leave();
  };
  EXPECT_EQ(error_of([&] { waiting.look(); }), "ArgumentError: rank 1: x: got 1");
}

TEST(ErrorStore, IsNotUsableAfterAnErrorThatThisRankKnowsOf) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  PeerErrors poster(store, 0), finder(store, 1), unaware(store, 2);
  poster.post(StateError("no memory"));
  EXPECT_THROW(finder.check_errors(), StateError);
  for (PeerErrors* rank : {&poster, &finder}) {
    const std::string message = error_of([&] { rank->check_usable(); });
    EXPECT_NE(message.find("stopped by an earlier error"), std::string::npos) << message;
    EXPECT_NE(message.find("no memory"), std::string::npos) << message;
  }
  unaware.check_usable();
}

TEST(ErrorStore, KeepsANoteOfEachRank) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  PeerErrors one(store, 1), two(store, 2);
  EXPECT_FALSE(two.note_of(1, "failure").has_value());
  one.leave_note("failure", "disk full");
  two.leave_note("failure", "");
  one.leave_note("position", "elsewhere");
  EXPECT_EQ(two.note_of(1, "failure"), "disk full");
  EXPECT_EQ(one.note_of(2, "failure"), "");
  two.check_usable();  // a note is no error
  two.check_errors();
}

TEST(ErrorStore, KeepsTheReasonOfARankThatHasLeftUntilAllHave) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  PeerErrors failed(store, 0, /*num_ranks=*/3), slow(store, 1, 3), last(store, 2, 3);
  failed.leave_note(PeerErrors::kFailureNote, "disk full");
  failed.show_call("route");
  failed.leave();
  EXPECT_EQ(slow.note_of(0, PeerErrors::kFailureNote), "disk full");
  slow.leave();
  EXPECT_EQ(last.note_of(0, PeerErrors::kFailureNote), "disk full");
  last.leave();
  EXPECT_EQ(store->getNumKeys(), 0);
}

/// A store in which something happens between a rank's question for a key and its reading.
class BusyStore : public c10d::HashStore {
 public:
  std::function<void()> meanwhile;

  BusyStore() { setTimeout(std::chrono::milliseconds(300)); }
  std::vector<uint8_t> get(const std::string& key) override {
    if (meanwhile) std::exchange(meanwhile, nullptr)();
    return HashStore::get(key);
  }
};

TEST(ErrorStore, DoesNotMakeARankWaitForOneThatLeavesInTheMiddleOfALook) {
  const auto store = c10::make_intrusive<BusyStore>();
  PeerErrors waiting(store, 0, /*num_ranks=*/3), leaving(store, 1, 3);
  const auto group = std::make_shared<Group>(RankInGroup{.rank = 0, .num_ranks = 3});
  waiting.watch(group);
  group->set_calls(1);
  leaving.show_call("route");
  store->meanwhile = [&] { leaving.leave(); };
  EXPECT_EQ(waiting.absent_ranks(*group), "rank 1 (in no call), rank 2 (in no call)");
  EXPECT_EQ(store->meanwhile, nullptr);
}

}  // namespace
}  // namespace knapformer
