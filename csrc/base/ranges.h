// Algorithms of the standard library for all elements of a container.
#pragma once
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <type_traits>
#include <utility>

namespace ds {

template <typename All, typename Holds>
bool any_of(const All& all, const Holds& holds) {
  return std::any_of(std::begin(all), std::end(all), holds);
}

template <typename All, typename Holds>
bool all_of(const All& all, const Holds& holds) {
  return std::all_of(std::begin(all), std::end(all), holds);
}

template <typename All, typename Holds>
bool none_of(const All& all, const Holds& holds) {
  return !any_of(all, holds);
}

template <typename All, typename Holds>
auto find_if(All& all, const Holds& holds) {
  return std::find_if(std::begin(all), std::end(all), holds);
}

template <typename All, typename Value>
std::ptrdiff_t index_of(const All& all, const Value& value) {  // its length where the value is not among them
  return std::find(std::begin(all), std::end(all), value) - std::begin(all);
}

template <typename All, typename Value>
bool contains(const All& all, const Value& value) {
  return std::find(std::begin(all), std::end(all), value) != std::end(all);
}

template <typename All>
auto sum_of(const All& all) {
  return std::accumulate(std::begin(all), std::end(all), std::decay_t<decltype(*std::begin(all))>{});
}

template <typename All, typename... Less>
void sort(All& all, const Less&... less) {
  std::sort(std::begin(all), std::end(all), less...);
}

template <typename All>
void sort_unique(All& all) {
  sort(all);
  all.erase(std::unique(all.begin(), all.end()), all.end());
}

template <typename All, typename Value>
void fill(All& all, const Value& value) {
  std::fill(std::begin(all), std::end(all), value);
}

template <typename All, typename Goes>
void erase_if(All& all, const Goes& goes) {
  all.erase(std::remove_if(all.begin(), all.end(), goes), all.end());
}

template <typename All, typename More>
void append(All& all, const More& more) {
  all.insert(all.end(), more.begin(), more.end());
}

}  // namespace ds
