#include "comm/process_mesh.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "base/error.h"
#include "base/ranges.h"
#include "comm/transports/local_communicator.h"

namespace ds::comm {
namespace {

std::string text_of(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
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
  }
  return "unknown";
}

Job::Job(int rank, int world, Open open) : rank_(rank), world_(world), open_(std::move(open)) {
  if (rank < 0 || rank >= world)
    fail(ErrorKind::kValue, "rank ", rank, " is not in a job of ", world, " ranks: give one of 0 to ", world - 1);
}

CommunicatorPtr Job::open(const SubMesh& members, Purpose purpose) {
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
  const std::string group = std::string(name_of(purpose)) + "/" + text_of(ranks);
  int number;
  {
    std::lock_guard lock(mutex_);
    number = opened_[group]++;
  }
  return open_("mesh/" + group + "/" + std::to_string(number), members);
}

ProcessMesh::ProcessMesh(plan::ProcessGrid grid, JobPtr job, std::vector<int> ranks)
    : grid_(std::move(grid)), ranks_(std::move(ranks)), job_(std::move(job)) {
  if (ranks_.empty()) {
    ranks_.resize(job_->world());
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }
  if (grid_->world() != static_cast<int>(ranks_.size()))
    fail(ErrorKind::kValue, "a grid of ", grid_->world(), " ranks does not fit a job of ", ranks_.size(),
         ": make it with the size of the job");
  const auto own = std::find(ranks_.begin(), ranks_.end(), job_->rank());
  if (own == ranks_.end())
    fail(ErrorKind::kValue, "rank ", job_->rank(), " is not among the ranks [", text_of(ranks_),
         "] of its mesh: only these make it");
  position_ = static_cast<int>(own - ranks_.begin());
}

ProcessMesh::ProcessMesh(std::map<std::string, std::vector<int>> own, JobPtr job)
    : own_(std::move(own)), job_(std::move(job)) {}

ProcessMeshPtr ProcessMesh::adopt(std::map<std::string, std::vector<int>> own, JobPtr job) {
  for (const auto& [axis, ranks] : own)
    if (!contains(ranks, job->rank()))
      fail(ErrorKind::kValue, "rank ", job->rank(), " is not among the ranks [", text_of(ranks),
           "] that it was given for ", axis, ": each rank gives the group that it is in");
  const std::vector<int> alone{job->rank()};
  own.insert({"sp", alone});  // the ranks that the lists leave out train other weights
  if (auto grid = plan::ProcessGrid::suggested(job->world(), job->rank(), own))
    return std::make_shared<ProcessMesh>(std::move(*grid), std::move(job));
  for (const char* axis : {"pp", "dp", "tp"}) own.insert({axis, alone});
  return ProcessMeshPtr(new ProcessMesh(std::move(own), std::move(job)));
}

const plan::ProcessGrid& ProcessMesh::grid(const char* what) const {
  if (grid_) return *grid_;
  std::string known;
  for (const auto& [axis, ranks] : own_) known += " " + axis + " [" + text_of(ranks) + "]";
  fail(ErrorKind::kValue, what, " needs a grid of all ranks, but no grid has the lists that rank ", job_->rank(),
       " was given:", known, ". Number ranks with tp innermost, then sp, dp and pp");
}

void ProcessMesh::split(const std::string& axis, const plan::Axis& outer, const plan::Axis& inner) {
  fold(axis, {axis}, {outer, inner});
}

void ProcessMesh::fold(const std::string& name, const Axes& from, const std::vector<plan::Axis>& to) {
  if (grid_) return grid_->fold(name, from, to);
  const SubMesh along = sub(from);
  plan::ProcessGrid line(along.size(), {{from.at(0), along.size(), ""}});
  line.fold(name, {from[0]}, to);
  for (const plan::Axis& one : to) {
    const std::string axis = name + "." + one.name;
    if (own_.count(axis)) fail(ErrorKind::kValue, "the axis ", axis, " exists already: give it another name");
    for (int rank : line.list({axis}, along.rank)) own_[axis].push_back(along.ranks[rank]);
  }
}

SubMesh ProcessMesh::sub(const Axes& axes) const {
  SubMesh found{{job_->rank()}, 0};
  if (grid_) {
    found.ranks = of_job(grid_->list(axes, position_));
  } else {
    std::set<std::string> longer;  // than one rank
    for (const std::string& axis : axes) {
      if (!own_.count(axis)) grid(("the axis " + axis).c_str());
      if (own_.at(axis).size() > 1) longer.insert(axis);
    }
    if (longer.empty()) return found;
    std::string joined;
    for (const std::string& axis : longer) joined += (joined.empty() ? "" : ",") + axis;
    if (!own_.count(joined)) grid(("a list along " + joined).c_str());
    found.ranks = own_.at(joined);
  }
  found.rank = static_cast<int>(index_of(found.ranks, job_->rank()));
  return found;
}

std::vector<std::vector<int>> ProcessMesh::lists(const Axes& axes) const {
  std::vector<std::vector<int>> found;
  for (const std::vector<int>& list : grid("a list of all groups").lists(axes)) found.push_back(of_job(list));
  return found;
}

std::vector<int> ProcessMesh::of_job(std::vector<int> ranks) const {
  for (int& rank : ranks) rank = ranks_[rank];
  return ranks;
}

CommunicatorPtr ProcessMesh::communicator(const SubMesh& members, Purpose purpose) {
  std::weak_ptr<Communicator>& known = made_[{members.ranks, purpose}];
  CommunicatorPtr made = known.lock();
  if (!made) known = made = job_->open(members, purpose);
  return made;
}

}  // namespace ds::comm
