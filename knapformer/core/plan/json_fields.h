// Reads the JSON of plans. A field that is missing, has another type, or is too large for its place causes an
// ArgumentError (argument "plan") that names the field.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "knapformer/core/util/error.h"

namespace knapformer {

using Json = nlohmann::ordered_json;

namespace json_detail {

/// The library's get<T>() would truncate a number that does not fit.
template <std::integral T>
  requires(!std::same_as<T, bool>)
void convert(const Json& json, const char* name, T& value) {
  if (!json.is_number_integer()) {
    throw_argument("plan", text("'", name, "' with ", json.is_number() ? json.dump() : json.type_name()), "integers");
  }
  const bool fits =
      json.is_number_unsigned() ? std::in_range<T>(json.get<uint64_t>()) : std::in_range<T>(json.get<int64_t>());
  if (!fits) {
    throw_argument("plan", text("'", name, "' with ", json.dump()),
                   text("integers from ", std::numeric_limits<T>::min(), " to ", std::numeric_limits<T>::max()));
  }
  value = json.get<T>();
}

template <class T>
void convert(const Json& json, const char* name, T& value) {
  try {
    value = json.get<T>();
  } catch (const nlohmann::json::exception&) {
    throw_argument("plan", text("'", name, "' of type ", json.type_name()), "what a plan has there");
  }
}

template <class T>
void convert(const Json& json, const char* name, std::vector<T>& values) {
  if (!json.is_array()) throw_argument("plan", text("'", name, "' of type ", json.type_name()), "a list");
  values.reserve(json.size());
  for (const Json& item : json) convert(item, name, values.emplace_back());
}

}  // namespace json_detail

template <class T>
T json_field(const Json& json, const char* name) {
  const auto it = json.find(name);
  if (it == json.end()) throw_argument("plan", text("JSON without '", name, "'"), "a plan as knapformer writes it");
  T value{};
  json_detail::convert(*it, name, value);
  return value;
}

/// Parses an object.
inline Json parse_json(std::string_view json_text) {
  Json json;
  try {
    json = Json::parse(json_text, [](int depth, Json::parse_event_t, Json&) {
      constexpr int kMostNested = 32;  // copies and destructors recurse
      if (depth > kMostNested)
        throw_argument("plan", text("JSON of more than ", kMostNested, " levels"), "a plan as JSON");
      return true;
    });
  } catch (const nlohmann::json::parse_error& error) {
    throw_argument("plan", text("malformed JSON at byte ", error.byte), "a plan as JSON");
  } catch (const nlohmann::json::exception& error) {  // a number that overflows
    throw_argument("plan", text("JSON that cannot be read (", error.what(), ")"), "numbers in the range of a double");
  }
  if (!json.is_object()) throw_argument("plan", text("JSON of type ", json.type_name()), "an object");
  return json;
}

inline void check_format(const Json& json, std::string_view format) {
  const auto got = json_field<std::string>(json, "format");
  if (got != format) throw_argument("plan", text("format '", got, "'"), text("'", format, "'"));
}

}  // namespace knapformer
