#include "storage/tier.h"

#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "storage/tiers/counted.h"

namespace ds::storage {
namespace {

struct Entry {
  std::string name;
  TierFactory factory;
};

// Filled before main, only read afterwards.
std::vector<Entry>& registered() {
  static std::vector<Entry> all;
  return all;
}

// Those of the enumeration first, the others by name: numbers do not depend on the order of linking.
std::vector<Entry> in_order() {
  const std::vector<std::string> first = {"device", "host", "file"};
  const auto rank = [&](const Entry& entry) { return index_of(first, entry.name); };
  std::vector<Entry> entries = registered();
  sort(entries, [&](const Entry& a, const Entry& b) {
    return std::make_pair(rank(a), a.name) < std::make_pair(rank(b), b.name);
  });
  return entries;
}

}  // namespace

TierRegistration::TierRegistration(const char* name, TierFactory factory) { registered().push_back({name, factory}); }

Medium medium_named(const std::string& name) {
  const std::vector<Entry> entries = in_order();
  std::string known;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].name == name) return static_cast<Medium>(i);
    known += (i ? ", " : "") + entries[i].name;
  }
  fail(ErrorKind::kValue, "there is no memory tier '", name, "'; there are ", known);
}

std::string name_of(Medium medium) {
  const std::vector<Entry> entries = in_order();
  const auto number = static_cast<size_t>(medium);
  return number < entries.size() ? entries[number].name : "tier " + std::to_string(number);
}

Tiers make_tiers(const TierContext& context) {
  if (context.device.is_meta()) return counted_tiers(registered().size(), context.scratch);
  Tiers tiers;
  for (const Entry& entry : in_order()) tiers.push_back(entry.factory(context));
  return tiers;
}

void Part::read(size_t block, char* data) { fail(ErrorKind::kRuntime, "memory is not read block by block"); }
void Part::write(size_t block, char* data) { fail(ErrorKind::kRuntime, "memory is not written block by block"); }
void Part::read_device(size_t, const at::Tensor&, int64_t) { fail(ErrorKind::kRuntime, "the host has to read it"); }
void Part::write_device(size_t, const at::Tensor&, int64_t) { fail(ErrorKind::kRuntime, "the host has to write it"); }

}  // namespace ds::storage
