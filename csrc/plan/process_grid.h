// The grid of a job's ranks: axes with sizes, and the lists of ranks along any of them.
//
// Ranks are numbered row by row over the axes, outer to inner: with (pp 2, dp 2, tp 2) ranks 0 and 1 differ in tp, 0
// and 2 in dp, 0 and 4 in pp. A fold gives the ranks along some axes other coordinates: dp x sp as edp x ep. A split is
// the fold of one axis: dp as dp.outer x dp.inner. Both add axes, named "<fold>.<axis>", and keep those they are made
// of; a question names axes of one fold, and axes that it leaves alone. Integers only.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace ds::plan {

using Axes = std::vector<std::string>;  // names, in any order
using RankList = std::vector<int>;
using RankLists = std::vector<RankList>;

struct Axis {
  std::string name;
  int size = 1;     // 0: the rest, after the other axes
  std::string key;  // the name of its size in the user's configuration; "": its own name
};

class ProcessGrid {
 public:
  // Outer to inner. Fails with the key, the size and sizes that work where they do not multiply to `world`.
  ProcessGrid(int world, std::vector<Axis> axes);

  // Ranks along `from`, in rank order, are numbered row by row over `to`, outer to inner, as `<name>.<axis>`.
  void fold(const std::string& name, const Axes& from, const std::vector<Axis>& to);

  int world() const { return world_; }
  bool has(const std::string& axis) const { return coordinates_.count(axis) != 0; }
  int size(const Axes& axes) const;
  // The index of `rank` in its list.
  int index(const Axes& axes, int rank) const;
  int coordinate(const std::string& axis, int rank) const;
  // The ranks that differ from `rank` in these axes only, ascending, itself among them. {}: itself.
  RankList list(const Axes& axes, int rank) const;
  // All of them; each rank is in one. Ordered by the axes that are not asked for, those of a fold last.
  RankLists lists(const Axes& axes) const;

 private:
  using Numbering = std::vector<std::string>;  // axes that together tell all ranks apart
  const Numbering& numbering_of(const Axes& axes) const;
  void check(int rank) const;

  int world_;
  std::map<std::string, RankList> coordinates_;  // of every rank
  std::map<std::string, int> sizes_;
  std::vector<Numbering> numberings_;
};

}  // namespace ds::plan
