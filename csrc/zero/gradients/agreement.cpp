#include "zero/gradients/agreement.h"

#include <ATen/Functions.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "comm/calls/numbers.h"

namespace ds::zero {

namespace {

uint64_t mixed(uint64_t hash, const void* bytes, size_t count) {  // FNV-1a
  for (size_t i = 0; i < count; ++i) hash = (hash ^ static_cast<const unsigned char*>(bytes)[i]) * 0x100000001b3u;
  return hash;
}

constexpr uint64_t kEmpty = 0xcbf29ce484222325u;

uint64_t fingerprint(const std::vector<std::string>& names, const std::vector<double>& numbers) {
  uint64_t hash = kEmpty;
  for (const std::string& name : names) hash = mixed(hash, name.c_str(), name.size() + 1);
  for (const double number : numbers) {
    const double value = number == 0.0 ? 0.0 : number;  // of the two zeros one
    hash = mixed(hash, &value, sizeof value);
  }
  return hash;
}

void add_up(const at::Tensor& numbers, const SpaceRanks& ranks, const c10::Device& device) {
  for (const comm::CommunicatorPtr& group : {ranks.shard, ranks.replicas})
    comm::sum_numbers(*group, numbers, device, "numbers that must be alike");
}

// "0.01 on rank 0 and 0.05 on ranks 1, 2"
std::string told(const std::map<double, std::vector<int>>& ranks_of) {
  std::ostringstream text;
  size_t number = 0;
  for (const auto& [value, ranks] : ranks_of) {
    if (number > 0) text << (number + 1 == ranks_of.size() ? " and " : ", ");
    text << value << " on rank" << (ranks.size() > 1 ? "s " : " ");
    for (size_t i = 0; i < ranks.size() && i < 8; ++i) text << (i > 0 ? ", " : "") << ranks[i];
    if (ranks.size() > 8) text << " and " << ranks.size() - 8 << " more";
    ++number;
  }
  return text.str();
}

}  // namespace

void Agreement::tell(int rank, std::vector<std::string> names, std::vector<double> numbers) {
  if (names.size() != numbers.size())
    fail(ErrorKind::kValue, "agree: ", names.size(), " names for ", numbers.size(), " numbers");
  rank_ = rank;
  names_ = std::move(names);
  numbers_ = std::move(numbers);
}

Agreement::Bits Agreement::bits() const {
  uint64_t hash = fingerprint(names_, numbers_);
  for (const auto& [name, value] : values_(false)) {
    hash = mixed(hash, name.c_str(), name.size());
    hash = mixed(hash, &value, sizeof value);
  }
  Bits bits{};
  for (size_t i = 0; i + 1 < bits.size(); ++i) bits[i] = static_cast<float>((hash >> i) & 1u);
  bits.back() = 1.0f;
  return bits;
}

bool Agreement::agrees(const Bits& sums) {
  return all_of(sums, [&](float sum) { return sum == 0.0f || sum == sums.back(); });
}

std::string Agreement::difference(const SpaceRanks& ranks, const c10::Device& device) const {
  const int64_t all = ranks.shard->size() * ranks.replicas->size();
  const int64_t row = ranks.replicas->rank() * ranks.shard->size() + ranks.shard->rank();
  // First how many each rank has, and its number among all ranks; then the numbers, as many as the one with most has.
  std::vector<std::string> names_of = names_;
  std::vector<double> numbers_of = numbers_;
  for (const auto& [name, value] : values_(true)) {
    names_of.push_back(name);
    numbers_of.push_back(value);
  }
  const at::Tensor facts = at::zeros({all, 3}, at::kDouble);
  const uint64_t names = fingerprint(names_of, {});
  facts[row][0] = static_cast<double>(rank_);
  facts[row][1] = static_cast<double>(names_of.size());
  facts[row][2] = static_cast<double>(names >> 11);  // exact in a double
  add_up(facts, ranks, device);
  const auto fact = [&](int64_t of, int64_t which) { return facts[of][which].item<double>(); };
  std::map<double, std::vector<int>> counts, kinds;
  for (int64_t of = 0; of < all; ++of) {
    counts[fact(of, 1)].push_back(static_cast<int>(fact(of, 0)));
    kinds[fact(of, 2)].push_back(static_cast<int>(fact(of, 0)));
  }
  if (counts.size() > 1) return "the number of hyperparameters is " + told(counts);
  if (kinds.size() > 1) return "the hyperparameters of parameter groups have other names on some ranks";
  const at::Tensor numbers = at::zeros({all, static_cast<int64_t>(numbers_of.size())}, at::kDouble);
  for (size_t i = 0; i < numbers_of.size(); ++i) numbers[row][static_cast<int64_t>(i)] = numbers_of[i];
  add_up(numbers, ranks, device);
  std::string text;
  for (size_t i = 0; i < numbers_of.size(); ++i) {
    std::map<double, std::vector<int>> values;
    for (int64_t of = 0; of < all; ++of)
      values[numbers[of][static_cast<int64_t>(i)].item<double>()].push_back(static_cast<int>(fact(of, 0)));
    if (values.size() > 1) text += (text.empty() ? "" : "; ") + names_of[i] + " is " + told(values);
  }
  return text;
}

void Agreement::refuse(const SpaceRanks& ranks, const c10::Device& device, const std::string& more) const {
  fail(ErrorKind::kRuntime, "ranks do not train with the same settings: ", difference(ranks, device),
       ". Set the same values on every rank.", more);
}

void Agreement::meet(const SpaceRanks& ranks, const c10::Device& device) const {
  if (ranks.alone()) return;
  const Bits own = bits();
  const at::Tensor sums = at::empty({static_cast<int64_t>(own.size())}, at::kFloat);
  std::memcpy(sums.data_ptr(), own.data(), sizeof own);
  add_up(sums, ranks, device);
  Bits found;
  std::memcpy(found.data(), sums.data_ptr(), sizeof found);
  if (!agrees(found)) refuse(ranks, device);
}

}  // namespace ds::zero
