#include "comm/process_mesh.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/ranges.h"
#include "base/sizes.h"
#include "comm/transports/local_communicator.h"
#include "plan/spaces/space_rule.h"

namespace ds::comm {
namespace {

std::string text_of(const std::vector<int>& ranks, const char* between = ", ") {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : between) + std::to_string(rank);
  return text;
}

}  // namespace

const char* name_of(Purpose purpose) {
  switch (purpose) {
    case Purpose::kReduce: return "reduce";
    case Purpose::kGather: return "gather";
    case Purpose::kPipe: return "pipe";
    case Purpose::kPipeGrads: return "pipe_grads";
    case Purpose::kExperts: return "experts";
    case Purpose::kControl: return "control";
    case Purpose::kTensor: return "tensor";
    case Purpose::kBlocks: return "blocks";
  }
  return "unknown";
}

Job::Job(int rank, int world, Open open, int ranks_of_host)
    : rank_(rank), world_(world), open_(std::move(open)), ranks_of_host_(ranks_of_host) {
  if (rank < 0 || rank >= world)
    fail(ErrorKind::kValue, "rank ", rank, " is not in a job of ", world, " ranks: give one of 0 to ", world - 1);
}

CommunicatorPtr Job::open(const SubMesh& members, Purpose purpose, bool in_memory) {
  const auto& ranks = members.ranks;
  auto sorted = ranks;
  sort(sorted);
  if (sorted.empty() || sorted.front() < 0 || sorted.back() >= world_ ||
      std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    fail(ErrorKind::kValue, "the ranks [", text_of(ranks), "] are not a group of a job of ", world_,
         " ranks: give different ones of 0 to ", world_ - 1);
  if (members.rank < 0 || members.rank >= members.size() || ranks[members.rank] != rank_)
    fail(ErrorKind::kValue, "rank ", rank_, " opens a communicator of the ranks [", text_of(ranks),
         "] without being one of them: only its members do");
  if (members.size() == 1) return local_communicator();
  const std::string group = std::string(name_of(purpose)) + "/" + text_of(ranks, ",");
  int number;
  {
    std::lock_guard lock(mutex_);
    number = opened_[group]++;
  }
  return open_("mesh/" + group + "/" + std::to_string(number), members, in_memory);
}

ProcessMesh::ProcessMesh(plan::ProcessGrid grid, JobPtr job, std::vector<int> ranks)
    : grid_(std::move(grid)), ranks_(std::move(ranks)), job_(std::move(job)) {
  if (ranks_.empty()) {
    ranks_.resize(job_->world());
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }
  if (grid_.world() != static_cast<int>(ranks_.size()))
    fail(ErrorKind::kValue, "a grid of ", grid_.world(), " ranks does not fit a job of ", ranks_.size(),
         ": make it with the size of the job");
  const auto own = std::find(ranks_.begin(), ranks_.end(), job_->rank());
  if (own == ranks_.end())
    fail(ErrorKind::kValue, "rank ", job_->rank(), " is not among the ranks [", text_of(ranks_),
         "] of its mesh: only these make it");
  position_ = static_cast<int>(own - ranks_.begin());
}

ProcessMeshPtr ProcessMesh::adopt(const std::map<std::string, std::vector<int>>& own, JobPtr job) {
  const int me = job->rank();
  std::vector<plan::Axis> axes;
  std::vector<int> at;  // this rank's index along each axis
  std::string known;    // for messages
  const auto list_of = [&](const std::string& name) {
    const auto found = own.find(name);
    return found == own.end() ? std::vector<int>{me} : found->second;
  };
  for (const auto& [name, ranks] : own) {
    if (!contains(ranks, me))
      fail(ErrorKind::kValue, "rank ", me, " is not among the ranks [", text_of(ranks), "] that it was given for ",
           name, ": each rank gives the group that it is in");
    known += " " + name + " [" + text_of(ranks) + "]";
  }
  const auto refuse = [&] {
    fail(ErrorKind::kValue, "the groups of rank ", me, " form no grid:", known,
         ". Ranks of one group differ along one axis only; number ranks with tp innermost, then sp, dp and pp");
  };
  for (const char* axis : {"pp", "dp", "sp", "tp"}) {
    const std::vector<int> ranks = list_of(axis);
    axes.push_back({axis, static_cast<int>(ranks.size()), ""});
    at.push_back(static_cast<int>(index_of(ranks, me)));
  }
  int size = 1, position = 0;
  for (size_t i = 0; i < axes.size(); ++i) {
    size = sizes::product("ranks of a mesh", size, axes[i].size);
    position = position * axes[i].size + at[i];
  }
  if (size > job->world()) refuse();
  const plan::ProcessGrid grid(size, axes);
  std::vector<int> ranks(size, kUnknown);
  ranks[position] = me;
  bool in_rows = true;  // the lists are those of `size` neighbours, numbered row by row
  for (const Axes& along : std::vector<Axes>{{"pp"}, {"dp"}, {"sp"}, {"tp"}, {"dp", "sp"}}) {
    const bool both = along.size() == 2;
    if (both && (grid.size({"dp"}) == 1 || grid.size({"sp"}) == 1)) continue;
    const std::vector<int> given = list_of(both ? "dp,sp" : along[0]), positions = grid.list(along, position);
    if (given.size() != positions.size()) refuse();
    for (size_t i = 0; i < given.size(); ++i) {
      int& rank = ranks[positions[i]];
      if (rank != kUnknown && rank != given[i]) refuse();
      rank = given[i];
      in_rows = in_rows && rank == me - position + positions[i];
    }
  }
  if (in_rows && (me - position) % size == 0) std::iota(ranks.begin(), ranks.end(), me - position);
  std::vector<int> told;
  for (int rank : ranks)
    if (rank != kUnknown) told.push_back(rank);
  sort(told);
  if (std::adjacent_find(told.begin(), told.end()) != told.end()) refuse();
  return std::make_shared<ProcessMesh>(grid, std::move(job), std::move(ranks));
}

void ProcessMesh::fold(const std::string& name, const Axes& from, const std::vector<plan::Axis>& to) {
  grid_.fold(name, from, to);
}

void ProcessMesh::fold_lists(const std::string& name, const std::vector<ListAlong>& lists) {
  if (lists.size() != 2)
    fail(ErrorKind::kValue, "the fold ", name, " was given ", lists.size(),
         " lists of ranks: give one for each of two axes");
  const auto& [outer, inner] = std::tie(lists[0], lists[1]);
  Axes axes = plan::same_weights();
  if (outer.second.size() * inner.second.size() > static_cast<size_t>(size(axes))) axes.push_back("tp");
  const SubMesh line = sub(axes);
  const auto axis_of = [](const ListAlong& list) {
    return plan::Axis{list.first, static_cast<int>(list.second.size()), ""};
  };
  if (all_of(lists, [&](const ListAlong& list) {
        return all_of(list.second, [&](int rank) { return contains(line.ranks, rank); });
      })) {
    const plan::ProcessGrid before = grid_;
    const auto& ranks = inner.second;
    const bool neighbours = ranks.size() == 1 || index_of(line.ranks, ranks[1]) - index_of(line.ranks, ranks[0]) == 1;
    grid_.fold(name, axes, {axis_of(neighbours ? outer : inner), axis_of(neighbours ? inner : outer)});
    if (all_of(lists, [&](const ListAlong& list) { return sub({name + "." + list.first}).ranks == list.second; }))
      return;
    grid_ = before;
  }
  fail(ErrorKind::kValue, "rank ", job_->rank(), ": the ranks [", text_of(outer.second), "] along ", name, ".",
       outer.first, " and [", text_of(inner.second), "] along ", name, ".", inner.first,
       " do not form a grid over the data-parallel ranks [", text_of(line.ranks),
       "]. Use consecutive ranks of these for one of the two");
}

SubMesh ProcessMesh::sub(const Axes& axes) const {
  SubMesh found;
  for (int position : grid_.list(axes, position_)) found.ranks.push_back(ranks_[position]);
  if (contains(found.ranks, kUnknown)) {
    std::string along;
    for (const std::string& axis : axes) along += (along.empty() ? "" : ", ") + axis;
    fail(ErrorKind::kValue, "rank ", job_->rank(), " does not know the ranks along ", along,
         ", because its groups do not name them. Number ranks with tp innermost, then sp, dp and pp");
  }
  found.rank = static_cast<int>(index_of(found.ranks, job_->rank()));
  return found;
}

std::vector<CommunicatorPtr> ProcessMesh::open(const std::vector<Opening>& openings, bool in_memory) {
  // Two ranks that share two communicators come to them in the same order, and so does a ring of ranks.
  std::vector<size_t> order(openings.size());
  std::iota(order.begin(), order.end(), 0);
  const auto place = [&](size_t i) {
    Axes axes = openings[i].axes;
    sort(axes);
    return std::pair(openings[i].purpose, axes);
  };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return place(a) < place(b); });
  std::vector<CommunicatorPtr> opened(openings.size());
  for (size_t i : order) {
    const Opening& one = openings[i];
    opened[i] = communicator(sub(one.axes), one.purpose, in_memory && one.purpose == Purpose::kReduce);
  }
  return opened;
}

CommunicatorPtr ProcessMesh::communicator(const SubMesh& members, Purpose purpose, bool in_memory) {
  std::weak_ptr<Communicator>& known = made_[{members.ranks, purpose}];
  CommunicatorPtr made = known.lock();
  if (!made) known = made = job_->open(members, purpose, in_memory);
  return made;
}

}  // namespace ds::comm
