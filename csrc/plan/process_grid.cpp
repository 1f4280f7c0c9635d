#include "plan/process_grid.h"

#include "base/error.h"
#include "base/ranges.h"
#include "base/sizes.h"

namespace ds::plan {
namespace {

const std::string& called(const Axis& axis) { return axis.key.empty() ? axis.name : axis.key; }

void check_divides(int size, int whole, const std::string& key, const std::string& of) {
  if (size >= 1 && whole % size == 0) return;
  std::string fits;
  for (int n = 1; n <= whole; ++n)
    if (whole % n == 0) fits += (fits.empty() ? "" : ", ") + std::to_string(n);
  fail(ErrorKind::kValue, key, " ", size, " does not divide the ", whole, " ", of, ": use one of ", fits);
}

[[noreturn]] void fail_product(int whole, const std::vector<Axis>& axes, const std::string& of) {
  std::string sizes, fix = "use sizes whose product it is";
  for (const Axis& axis : axes)
    if (axis.size != 1 || !axis.key.empty())
      sizes += (sizes.empty() ? "" : " x ") + called(axis) + " " + std::to_string(axis.size);
  for (const Axis& axis : axes) {
    int others = 1;
    bool fits = true;
    for (const Axis& other : axes)
      if (&other != &axis) fits = fits && sizes::multiply(others, other.size, &others);
    if ((axis.size == 1 && axis.key.empty()) || !fits || whole % others != 0) continue;
    fix = "leave " + called(axis) + " out, or give " + std::to_string(whole / others);
    break;
  }
  fail(ErrorKind::kValue, sizes, " is not the ", whole, " ", of, " there are; ", fix);
}

// The sizes, with what is left instead of 0.
std::vector<int> fitted(int whole, const std::vector<Axis>& axes, const std::string& of) {
  std::vector<int> sizes;
  int left = whole, open = -1, product = 1;
  const bool all_given = none_of(axes, [](const Axis& axis) { return axis.size == 0; });
  for (size_t i = 0; i < axes.size(); ++i) {
    if (axes[i].size == 0) {
      if (open >= 0)
        fail(ErrorKind::kValue, "the sizes of the axes ", axes[open].name, " and ", axes[i].name,
             " are both left open: give one of them");
      open = static_cast<int>(i);
    } else {
      check_divides(axes[i].size, all_given ? whole : left, called(axes[i]), of);
      if (!all_given) left /= axes[i].size;
      if (!sizes::multiply(product, axes[i].size, &product)) fail_product(whole, axes, of);
    }
    sizes.push_back(axes[i].size);
  }
  if (all_given && product != whole) fail_product(whole, axes, of);
  if (open >= 0) sizes[open] = left;
  return sizes;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::string ranks_along(const Axes& axes) {
  const bool data = all_of(axes, [](const auto& axis) { return axis == "dp" || axis == "sp"; });
  return data ? "data-parallel ranks" : "ranks along " + joined(axes);
}

}  // namespace

ProcessGrid::ProcessGrid(int world, std::vector<Axis> axes) : world_(world) {
  if (world < 1) fail(ErrorKind::kValue, "a job of ", world, " ranks has no grid: it needs at least one rank");
  const auto sizes = fitted(world, axes, "ranks");
  Numbering names;
  int stride = world;
  for (size_t i = 0; i < axes.size(); ++i) {
    if (contains(names, axes[i].name))
      fail(ErrorKind::kValue, "the axis ", axes[i].name, " is given twice: give each axis a name of its own");
    names.push_back(axes[i].name);
    stride /= sizes[i];
    sizes_[axes[i].name] = sizes[i];
    RankList& coordinates = coordinates_[axes[i].name];
    for (int rank = 0; rank < world; ++rank) coordinates.push_back(rank / stride % sizes[i]);
  }
  if (stride != 1) fail(ErrorKind::kValue, "a grid without axes has one rank, not ", world, ": give an axis");
  numberings_.push_back(std::move(names));
}

void ProcessGrid::fold(const std::string& name, const Axes& from, const std::vector<Axis>& to) {
  const Numbering old = numbering_of(from);
  const auto sizes = fitted(size(from), to, ranks_along(from));
  Numbering made;
  for (const std::string& axis : old)
    if (!contains(from, axis)) made.push_back(axis);
  for (const Axis& axis : to) {
    if (has(name + "." + axis.name))
      fail(ErrorKind::kValue, "the axis ", name, ".", axis.name, " exists already: give it another name");
  }
  RankList indices(world_);
  for (const RankList& list : lists(from))
    for (size_t index = 0; index < list.size(); ++index) indices[list[index]] = static_cast<int>(index);
  int stride = size(from);
  for (size_t i = 0; i < to.size(); ++i) {
    const std::string axis = name + "." + to[i].name;
    stride /= sizes[i];
    sizes_[axis] = sizes[i];
    RankList& coordinates = coordinates_[axis];
    for (int index : indices) coordinates.push_back(index / stride % sizes[i]);
    made.push_back(axis);
  }
  numberings_.push_back(std::move(made));
}

const ProcessGrid::Numbering& ProcessGrid::numbering_of(const Axes& axes) const {
  for (const std::string& axis : axes) {
    if (has(axis)) continue;
    std::vector<std::string> known;
    for (const auto& entry : coordinates_) known.push_back(entry.first);
    fail(ErrorKind::kValue, "there is no axis ", axis, ": the grid has ", joined(known));
  }
  for (const Numbering& numbering : numberings_)
    if (all_of(axes, [&](const auto& axis) { return contains(numbering, axis); })) return numbering;
  fail(ErrorKind::kValue, "the axes ", joined(axes),
       " overlap: an axis and what it was split or folded into do not go together; ask for one of them");
}

void ProcessGrid::check(int rank) const {
  if (rank < 0 || rank >= world_)
    fail(ErrorKind::kIndex, "rank ", rank, " is not in the job: its ranks are 0 to ", world_ - 1);
}

int ProcessGrid::size(const Axes& axes) const {
  numbering_of(axes);
  int product = 1;
  for (const std::string& axis : axes) product = sizes::product("ranks along axes", product, sizes_.at(axis));
  return product;
}

int ProcessGrid::coordinate(const std::string& axis, int rank) const {
  numbering_of({axis});
  check(rank);
  return coordinates_.at(axis)[rank];
}

int ProcessGrid::index(const Axes& axes, int rank) const {
  const RankList members = list(axes, rank);
  return static_cast<int>(index_of(members, rank));
}

RankList ProcessGrid::list(const Axes& axes, int rank) const {
  const Numbering& numbering = numbering_of(axes);
  check(rank);
  std::vector<const RankList*> same;
  for (const std::string& axis : numbering)
    if (!contains(axes, axis)) same.push_back(&coordinates_.at(axis));
  RankList members;
  for (int other = 0; other < world_; ++other)
    if (all_of(same, [&](const RankList* of) { return (*of)[other] == (*of)[rank]; })) members.push_back(other);
  return members;
}

RankLists ProcessGrid::lists(const Axes& axes) const {
  const Numbering& numbering = numbering_of(axes);
  std::map<RankList, RankList> found;  // by the coordinates that the members share
  for (int rank = 0; rank < world_; ++rank) {
    RankList shared;
    for (const std::string& axis : numbering)
      if (!contains(axes, axis)) shared.push_back(coordinates_.at(axis)[rank]);
    found[shared].push_back(rank);
  }
  RankLists lists;
  for (auto& entry : found) lists.push_back(std::move(entry.second));
  return lists;
}

}  // namespace ds::plan
