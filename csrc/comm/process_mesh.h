// The ranks of a job along its axes, and the communicators over them: the only maker of those of an engine.
//
// A communicator belongs to a set of ranks and a purpose: all its ranks make the calls of one purpose in the same
// order, and calls of two purposes may overlap, so two purposes never share a communicator. Its members make it at its
// first use, without other ranks. All members ask for their communicators in the same order, axis by axis; otherwise
// two of them would wait for each other in different communicators.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "plan/process_grid.h"

namespace ds::comm {

using plan::Axes;

// Some ranks of the job, in the order of their group, and the rank of this process there.
struct SubMesh {
  std::vector<int> ranks;
  int rank = 0;
  int size() const { return static_cast<int>(ranks.size()); }
};

enum class Purpose { kReduce, kGather, kPipe, kPipeGrads, kExperts, kControl };
const char* name_of(Purpose purpose);

// The job of this process, shared by all meshes over it; it opens communicators among its ranks.
class Job {
 public:
  // Makes a communicator of `members`, which all call it with the same `key`, the prefix of its keys in the job's
  // store. No two communicators share a key. Never called for one member.
  using Open = std::function<CommunicatorPtr(const std::string& key, const SubMesh& members)>;

  Job(int rank, int world, Open open);
  int rank() const { return rank_; }
  int world() const { return world_; }
  // A new communicator at each call. The n-th call of each member with these arguments joins the same one.
  CommunicatorPtr open(const SubMesh& members, Purpose purpose);

 private:
  const int rank_, world_;
  const Open open_;
  std::mutex mutex_;
  std::map<std::string, int> opened_;  // by members and purpose
};
using JobPtr = std::shared_ptr<Job>;

// One per engine, so that two engines in one process never wait in each other's communicators.
class ProcessMesh {
 public:
  // `ranks`: those of the job that the grid numbers, in its order; {}: all of them.
  ProcessMesh(plan::ProcessGrid grid, JobPtr job, std::vector<int> ranks = {});
  // From the groups of an mpu: the lists of this rank by axis (pp, dp, sp, tp), or by several axes ("dp,sp"). Axes
  // without a list have one rank. Where a grid fits all lists, the mesh has that grid, and the ranks outside of the
  // lists are along pp or tp. Otherwise the mesh has these lists and their folds only.
  static std::shared_ptr<ProcessMesh> adopt(std::map<std::string, std::vector<int>> own, JobPtr job);

  // As in ProcessGrid; the axes they add are those of the mesh.
  void split(const std::string& axis, const plan::Axis& outer, const plan::Axis& inner);
  void fold(const std::string& name, const Axes& from, const std::vector<plan::Axis>& to);

  bool has_grid() const { return grid_.has_value(); }
  int size(const Axes& axes) const { return sub(axes).size(); }
  int rank(const Axes& axes) const { return sub(axes).rank; }
  SubMesh sub(const Axes& axes) const;  // {}: only this rank
  std::vector<std::vector<int>> lists(const Axes& axes) const;

  // The communicator of these ranks, this one among them. It is made at first use and kept while it is referenced.
  CommunicatorPtr communicator(const SubMesh& members, Purpose purpose);

 private:
  ProcessMesh(std::map<std::string, std::vector<int>> own, JobPtr job);
  const plan::ProcessGrid& grid(const char* what) const;
  std::vector<int> of_job(std::vector<int> ranks) const;  // from ranks of the grid

  std::optional<plan::ProcessGrid> grid_;
  std::vector<int> ranks_;                       // of the job, as the grid numbers them
  int position_ = 0;                             // of this process among them
  std::map<std::string, std::vector<int>> own_;  // without a grid
  JobPtr job_;
  std::map<std::pair<std::vector<int>, Purpose>, std::weak_ptr<Communicator>> made_;
};
using ProcessMeshPtr = std::shared_ptr<ProcessMesh>;

}  // namespace ds::comm
