#include "knapformer/torch/lookout.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "knapformer/core/error.h"
#include "knapformer/torch/agreement.h"

namespace knapformer {
namespace {

constexpr std::chrono::milliseconds kFirstLook{200}, kLastLook{1000};
constexpr int32_t kMostNamed = 8;  // ranks in a message

}  // namespace

std::shared_ptr<Agreement> Lookout::agreement(size_t i) const {
  return i < agreements_.size() ? agreements_[i].lock() : nullptr;
}

Lookout::Counts Lookout::counts() const {
  Counts counts = {};
  for (size_t i = 0; i < kMostAgreements; ++i) {
    if (const std::shared_ptr<Agreement> alive = agreement(i)) counts[i] = alive->num_come_to();
  }
  return counts;
}

void Lookout::look(const Agreement* but) const {
  board_->check();
  for (size_t i = 0; i < agreements_.size(); ++i) {
    const std::shared_ptr<Agreement> alive = agreement(i);
    if (alive && alive.get() != but) alive->check_announcements();
  }
}

Wait::Wait(const Lookout& lookout, std::string_view label) : lookout_(lookout), label_(label), patience_(kFirstLook) {}

void Wait::look(const Agreement* but) {
  lookout_.look(but);
  if (!shown_) show(call_name(label_));
  shown_ = true;
  compare_order();
  patience_ = std::min(patience_ * 2, kLastLook);
}

void Wait::look_aside() {
  lookout_.look();
  patience_ = std::min(patience_ * 2, kLastLook);
}

void Wait::end() noexcept {
  if (!std::exchange(shown_, false)) return;
  try {
    show("");
  } catch (...) {  // NOLINT: where this rank was is of use to messages alone
  }
}

void Wait::show(const std::string& call) {
  const Lookout::Counts counts = lookout_.counts();
  lookout_.board_->leave_place(text(counts[0], ' ', counts[1], ' ', call));
}

std::optional<Wait::Place> Wait::place_of(int32_t rank) const {
  const std::optional<std::string> left = lookout_.board_->place_of(rank);
  if (!left) return std::nullopt;
  std::istringstream in(*left);
  Place place;
  in >> place.counts[0] >> place.counts[1] >> std::ws;
  std::getline(in, place.call);
  return place;
}

void Wait::compare_order() const {
  const std::shared_ptr<Agreement> bag = lookout_.agreement(1);
  if (!bag) return;
  const Lookout::Counts own = lookout_.counts();
  for (int32_t i = 0; i < bag->num_ranks(); ++i) {
    const int32_t rank = bag->number_of(i);
    if (i == bag->rank()) continue;
    const std::optional<Place> other = place_of(rank);
    if (!other) continue;
    const int64_t ahead_in_all = own[0] - other->counts[0], ahead_in_bag = own[1] - other->counts[1];
    const bool crossed = (ahead_in_all > 0 && ahead_in_bag < 0) || (ahead_in_all < 0 && ahead_in_bag > 0);
    if (!crossed) continue;
    const std::string theirs = other->call.empty() ? "another call" : other->call;
    throw StateError(text("call: got ", call_name(label_), " on rank ", bag->number_of(bag->rank()), ", expected ",
                          theirs, ", as on rank ", rank, ": they would wait for each other"));
  }
}

std::string Wait::absent(const Agreement& agreement) const {
  size_t index = 0;
  while (index < Lookout::kMostAgreements && lookout_.agreement(index).get() != &agreement) ++index;
  if (index == Lookout::kMostAgreements) return "";
  std::string names;
  int32_t num_absent = 0;
  for (int32_t i = 0; i < agreement.num_ranks(); ++i) {
    const int32_t rank = agreement.number_of(i);
    if (i == agreement.rank()) continue;
    const std::optional<Place> place = place_of(rank);
    if (place && place->counts[index] >= agreement.num_come_to()) continue;
    if (++num_absent > kMostNamed) continue;
    const bool waits = place && !place->call.empty();
    names += text(num_absent == 1 ? "" : ", ", "rank ", rank, " (in ", waits ? place->call : "no call", ")");
  }
  if (num_absent > kMostNamed) names += text(" and ", num_absent - kMostNamed, " more");
  return names;
}

}  // namespace knapformer
