// Records: plain structs of parameters that list their fields once.
//
// A record has a static member `fields()`, a tuple of Field. All other uses of its fields (bounds, JSON, Python, the
// fingerprint that ranks compare) are derived from that list, so a new field is written in one place. A field that is
// not in the list does not compile (kListsEveryField).
#pragma once

#include <tuple>
#include <type_traits>

#include "knapformer/core/util/error.h"

namespace knapformer {

/// A field, its bounds where it is a number, and its unit and meaning in one line.
template <class Record, class Value>
struct Field {
  const char* name;
  Value Record::*member;
  const char* doc;
  double min = 0;
  double max = kMaxMagnitude;
};

template <class Record, class Value>
constexpr Field<Record, Value> field(const char* name, Value Record::*member, const char* doc, double min = 0,
                                     double max = kMaxMagnitude) {
  return {name, member, doc, min, max};
}

template <class T>
concept IsRecord = requires { T::fields(); };

/// Visits each Field of the record's list, in order.
template <class Record, class Visit>
void for_each_field(Visit visit) {
  std::apply([&](const auto&... fields) { (visit(fields), ...); }, Record::fields());
}

/// Throws ArgumentError, which names the field, if a number is out of its bounds.
template <class Record>
void check_fields(const Record& record) {
  for_each_field<Record>([&](const auto& f) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(record.*f.member)>>)
      check_range(f.name, static_cast<double>(record.*f.member), f.min, f.max);
  });
}

namespace internal {
struct AnyValue {
  template <class T>
  operator T() const;
};
/// How many values an aggregate can be made of.
template <class Record, class... Values>
consteval size_t count_fields() {
  if constexpr (requires { Record{Values{}..., AnyValue{}}; }) {
    return count_fields<Record, Values..., AnyValue>();
  } else {
    return sizeof...(Values);
  }
}
}  // namespace internal

template <class Record>
inline constexpr bool kListsEveryField =
    std::tuple_size_v<decltype(Record::fields())> == internal::count_fields<Record>();

}  // namespace knapformer
