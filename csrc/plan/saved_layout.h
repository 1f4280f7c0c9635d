// The table of saved layouts: which elements of which parameter are in which tensor of which rank's file, and which
// rank writes what several ranks have. Saving, loading, conversion and export use it.
//
// A *unit* is one tensor of each kind (masters, a state) in the file of every rank: the partition of a parameter group
// at ZeRO stages 1 and 2, a sub-group of slices at stage 3, a whole group without ZeRO. A parameter's elements, in the
// order of rows, are runs of such tensors. Integers only: readers and writers ask for the runs of a parameter.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ds::plan {

struct SavedRun {
  int64_t param_offset;  // first element within the parameter
  int64_t numel;         // > 0
  int32_t rank;          // of the file
  int64_t begin;         // first element within the unit's tensor
};

class SavedLayout {
 public:
  // Each group's parameters end to end, cut into one partition of `partitions[group]` elements for each of `ranks`.
  // `origin` names the checkpoint in errors: ErrorKind::kValue where a group does not fit its partitions.
  static SavedLayout flat(const std::vector<std::vector<int64_t>>& numels, const std::vector<int64_t>& partitions,
                          int32_t ranks, const std::string& origin);

  // The same of one group to be saved: its partitions have an equal, even number of elements, the last
  // ones with padding. A parameter that is saved elsewhere counts as one without elements.
  static SavedLayout partitioned(const std::vector<int64_t>& numels, int32_t ranks);

  // Every parameter cut into `ranks` slices of ceil(numel / ranks) elements; a rank's slices end to end, in units of
  // `units[i]` elements. No units: there are no files of states. ErrorKind::kValue where the slices do not fill them.
  static SavedLayout sliced(const std::vector<int64_t>& numels, const std::vector<int64_t>& units, int32_t ranks,
                            const std::string& origin);

  // The same of the groups of an optimizer to be saved: the parameters of a group in units of at most
  // `most` elements of all ranks; a larger parameter has a unit of its own. A parameter that is saved elsewhere has -1
  // elements and the unit -1.
  static SavedLayout sub_grouped(const std::vector<std::vector<int64_t>>& numels, int64_t most, int32_t ranks);

  int32_t unit(size_t param) const { return entries_.at(param).unit; }
  // The first element of a parameter in the row of all ranks' partitions (flat), or in a rank's slices of its unit.
  int64_t begin(size_t param) const { return entries_.at(param).begin; }
  // Elements of a rank's partition of a unit; of flat layouts only.
  int64_t partition(int32_t unit) const { return partitions_.at(static_cast<size_t>(unit)); }
  // The number of parameters of the same unit before it.
  int32_t index_in_unit(size_t param) const { return entries_.at(param).index; }
  // The parameters of each unit, in order.
  std::vector<std::vector<int64_t>> units() const;
  // In order of param_offset, all elements of the parameter; none for a parameter without elements.
  std::vector<SavedRun> runs(size_t param) const;

 private:
  struct Entry {
    int32_t unit, index;
    int64_t begin;  // in the unit: of the row of all ranks' partitions, or of one rank's slices
    int64_t numel;
  };

  SavedLayout(int32_t ranks, bool is_sliced) : ranks_(ranks), is_sliced_(is_sliced) {}

  int32_t ranks_;
  bool is_sliced_;
  std::vector<int64_t> partitions_;  // of each unit, where they are not sliced
  std::vector<Entry> entries_;
};

// For each tensor, the one of `count` ranks with the same tensors that writes it: about the same number of elements for
// each rank, neighbours together. `numels`: of the tensors.
std::vector<int32_t> writers_of(const std::vector<int64_t>& numels, int32_t count);

}  // namespace ds::plan
