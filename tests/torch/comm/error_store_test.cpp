#include "knapformer/torch/comm/error_store.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "knapformer/core/util/error.h"
#include "tests/torch/in_process_group.h"

namespace knapformer {
namespace {

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
  ErrorStore first(store, 3), second(store, 4), third(store, 5);
  EXPECT_EQ(error_of([&] { second.check(); }), "");
  EXPECT_EQ(error_of([&] { first.guard([] { throw ArgumentError("x: got 1"); }); }), "ArgumentError: x: got 1");
  second.post(StateError("later"));
  EXPECT_EQ(error_of([&] { third.check(); }), "ArgumentError: rank 3: x: got 1");
  EXPECT_EQ(error_of([&] { second.check(); }), "ArgumentError: rank 3: x: got 1");
}

TEST(ErrorStore, IsNotUsableAfterAnErrorThatThisRankKnowsOf) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ErrorStore poster(store, 0), finder(store, 1), unaware(store, 2);
  poster.post(StateError("no memory"));
  EXPECT_THROW(finder.check(), StateError);
  for (ErrorStore* errors : {&poster, &finder}) {
    const std::string message = error_of([&] { errors->check_usable(); });
    EXPECT_NE(message.find("stopped by an earlier error"), std::string::npos) << message;
    EXPECT_NE(message.find("no memory"), std::string::npos) << message;
  }
  unaware.check_usable();
}

TEST(ErrorStore, KeepsANoteOfEachRank) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ErrorStore one(store, 1), two(store, 2);
  EXPECT_FALSE(two.note_of(1, "failure").has_value());
  one.leave_note("failure", "disk full");
  two.leave_note("failure", "");
  one.leave_note("position", "elsewhere");
  EXPECT_EQ(two.note_of(1, "failure"), "disk full");
  EXPECT_EQ(one.note_of(2, "failure"), "");
  two.check_usable();  // a note is no error
  two.check();
}

}  // namespace
}  // namespace knapformer
