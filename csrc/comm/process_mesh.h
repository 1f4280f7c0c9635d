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
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "plan/process_grid.h"
#include "plan/purpose.h"

namespace ds::comm {

using plan::Axes;
using plan::Purpose;

// Some ranks of the job, in the order of their group, and the rank of this process there.
struct SubMesh {
  std::vector<int> ranks;
  int rank = 0;
  int size() const { return static_cast<int>(ranks.size()); }
};

const char* name_of(Purpose purpose);

// Ranks along some axes that exchange values for a purpose.
struct Opening {
  Axes axes;
  Purpose purpose;
};

// The job of this process, shared by all meshes over it; it opens communicators among its ranks.
class Job {
 public:
  // Makes a communicator of `members`, which all call it with the same `key`, the prefix of its keys in the job's
  // store. No two communicators share a key. `in_memory`: ranks of one host exchange through its memory, because all
  // tensors are there. Never called for one member.
  using Open = std::function<CommunicatorPtr(const std::string& key, const SubMesh& members, bool in_memory)>;

  // `ranks_of_host`: in a plan, whose ranks cannot tell each other their hosts, how many consecutive ranks share one;
  // 0: all of them.
  Job(int rank, int world, Open open, int ranks_of_host = 0);
  int rank() const { return rank_; }
  int world() const { return world_; }
  // The planned host of a rank.
  int planned_host(int rank) const { return ranks_of_host_ > 0 ? rank / ranks_of_host_ : 0; }
  // A new communicator at each call. The n-th call of each member with these arguments joins the same one.
  CommunicatorPtr open(const SubMesh& members, Purpose purpose, bool in_memory = false);

 private:
  const int rank_, world_;
  const Open open_;
  const int ranks_of_host_;
  std::mutex mutex_;
  std::map<std::string, int> opened_;  // by members and purpose
};
using JobPtr = std::shared_ptr<Job>;

// One per engine, so that two engines in one process never wait in each other's communicators.
class ProcessMesh {
 public:
  // `ranks`: those of the job that the grid numbers, in its order; {}: all of them. kUnknown stands for a rank that
  // nobody has told this one.
  ProcessMesh(plan::ProcessGrid grid, JobPtr job, std::vector<int> ranks = {});
  // From the groups of an mpu: the lists of this rank by axis (pp, dp, sp, tp), and by "dp,sp" where both have several
  // ranks. An axis without a list has one rank. Other ranks of the job are not in the mesh. Fails with the lists where
  // they form no grid.
  static std::shared_ptr<ProcessMesh> adopt(const std::map<std::string, std::vector<int>>& own, JobPtr job);

  // A mesh of one rank, without a job.
  static std::shared_ptr<ProcessMesh> alone() { return adopt({}, std::make_shared<Job>(0, 1, nullptr)); }

  // As in ProcessGrid; the axes that it adds are those of the mesh.
  void fold(const std::string& name, const Axes& from, const std::vector<plan::Axis>& to);
  // Adds the fold `name` of two axes along which this rank has these lists: of the data-parallel ranks, or, where these
  // are fewer, of them and the tensor-parallel ones. Fails with the lists where there is none.
  using ListAlong = std::pair<std::string, std::vector<int>>;  // axis, ranks
  void fold_lists(const std::string& name, const std::vector<ListAlong>& lists);

  const plan::ProcessGrid& grid() const { return grid_; }
  const Job& job() const { return *job_; }
  int size(const Axes& axes) const { return grid_.size(axes); }
  int rank(const Axes& axes) const { return grid_.index(axes, position_); }
  // {}: only this rank. Fails where a rank is unknown.
  SubMesh sub(const Axes& axes) const;

  // The communicators of the ranks along these axes, this one among them. Each is opened at first use and kept while it
  // is referenced. All members open those of one call in one order, whatever the order here: by purpose, then by axes.
  std::vector<CommunicatorPtr> open(const std::vector<Opening>& openings, bool in_memory = false);
  CommunicatorPtr communicator(const SubMesh& members, Purpose purpose, bool in_memory = false);

  static constexpr int kUnknown = -1;

 private:
  plan::ProcessGrid grid_;
  std::vector<int> ranks_;  // of the job, as the grid numbers them
  int position_ = 0;        // of this process among them
  JobPtr job_;
  std::map<std::pair<std::vector<int>, Purpose>, std::weak_ptr<Communicator>> made_;
};
using ProcessMeshPtr = std::shared_ptr<ProcessMesh>;

}  // namespace ds::comm
