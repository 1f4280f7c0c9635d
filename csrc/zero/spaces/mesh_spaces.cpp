#include "zero/spaces/mesh_spaces.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "base/error.h"
#include "base/ranges.h"
#include "comm/calls/numbers.h"
#include "comm/segments/shared_segments.h"

namespace ds::zero {

namespace {

using comm::Opening;
using comm::Purpose;
using plan::SpaceAxes;

// The communicators of one space, in this order: its shards, its replicas, then those of its norm.
std::vector<Opening> openings_of(const SpaceAxes& space) {
  std::vector<Opening> found{{space.shard, space.purpose}, {space.replicas, space.purpose}};
  for (const plan::NormAxes& norm : space.norm_over)
    found.push_back({norm.axes, norm.axes == space.shard ? space.purpose : Purpose::kControl});
  return found;
}

// The communicators of several ranks that are opened, in their order: "reduce dp sp; experts experts.edp".
std::string text_of(const comm::ProcessMesh& mesh, const std::vector<Opening>& openings) {
  std::set<std::string> all;
  for (const Opening& one : openings) {
    if (mesh.size(one.axes) == 1) continue;
    std::string text = comm::name_of(one.purpose);
    for (const std::string& axis : one.axes) text += " " + axis;
    all.insert(text);
  }
  std::string text;
  for (const std::string& one : all) text += (text.empty() ? "" : "; ") + one;
  return text;
}

// Fails on all `ranks` where two of them are about to open different communicators, in which they would wait for each
// other.
void check_alike(comm::Communicator& ranks, const std::string& plan, c10::Device device) {
  if (ranks.size() == 1 || device.is_meta()) return;
  constexpr int64_t kShown = 1024;  // bytes of each rank's plan
  const at::Tensor own = at::zeros({kShown}, at::kByte);
  std::memcpy(own.data_ptr(), plan.data(), std::min<size_t>(plan.size(), kShown));
  const at::Tensor all = comm::gather_numbers(ranks, own, device, "which communicators are opened");
  const auto row = [&](int rank) { return all[rank]; };
  for (int rank = 1; rank < ranks.size(); ++rank) {
    if (at::equal(row(0), row(rank))) continue;
    const auto shown = [&](int of) {
      const char* text = static_cast<const char*>(row(of).data_ptr());
      return std::string(text, strnlen(text, kShown));
    };
    fail(ErrorKind::kValue, "data-parallel ranks train different parameters: rank 0 needs communicators for ", shown(0),
         ", rank ", rank, " for ", shown(rank), ". Give all data-parallel ranks the same layers with experts");
  }
}

}  // namespace

MeshSpaces::MeshSpaces(comm::ProcessMeshPtr mesh, const StagePolicy& policy, const std::vector<ParamSpec>& params,
                       const std::vector<ShardedParamPtr>& others)
    : mesh_(std::move(mesh)), shards_(policy.shards_states()) {
  std::vector<c10::Device> devices;
  std::map<Key, SpaceAxes> axes{{{"dense", ""}, {}}};
  for (const ParamSpec& param : params) {
    axes[{param.rule, param.copied_along}];
    devices.push_back(param.sharded ? param.sharded->device() : param.tensor.device());
  }
  for (const ShardedParamPtr& other : others) {
    axes[{other->rule, ""}];
    devices.push_back(other->device());
  }
  if (!devices.empty()) device_ = devices.front();
  in_memory_ = all_of(devices, [](c10::Device device) { return device.is_cpu(); });
  std::vector<Opening> openings;
  for (auto& [key, space] : axes) {
    space = plan::space_axes({mesh_->grid(), key.first, shards_, key.second});
    append(openings, openings_of(space));
  }
  // Those of dense parameters come first in every plan.
  const SpaceAxes& dense = axes.at({"dense", ""});
  const auto first = mesh_->open({{dense.shard, dense.purpose}, {dense.replicas, dense.purpose}}, in_memory_);
  check_alike(*first[shards_ ? 0 : 1], text_of(*mesh_, openings), device_);
  const std::vector<comm::CommunicatorPtr> opened = mesh_->open(openings, in_memory_);
  size_t next = 0;
  for (const auto& [key, space] : axes) {
    SpaceRanks& ranks = spaces_[key];
    ranks.shard = opened[next++];
    ranks.replicas = opened[next++];
    for (const plan::NormAxes& norm : space.norm_over) ranks.norm_over.push_back({opened[next++], norm.first});
    ranks.axes = space;
    ranks.open = [this](const plan::Axes& along, Purpose purpose) {
      const comm::CommunicatorPtr made = mesh_->communicator(mesh_->sub(along), purpose);
      keep({made});
      return made;
    };
    ranks.by_host = [this, key = key]() -> const comm::HostRanks& { return by_host(key); };
  }
  keep(opened);
}

const comm::HostRanks& MeshSpaces::by_host(const Key& key) {
  const auto known = by_host_.find(key);
  if (known != by_host_.end()) return known->second;
  const SpaceRanks& ranks = spaces_.at(key);
  const int size = ranks.shard->size(), rank = ranks.shard->rank();
  comm::HostRanks& made = by_host_[key];
  const std::vector<int> job_ranks = mesh_->sub(ranks.axes.shard).ranks;
  std::vector<int64_t> hosts;
  if (size == 1 || device_.is_meta()) {
    for (const int job_rank : job_ranks) hosts.push_back(mesh_->job().planned_host(job_rank));
  } else {
    const at::Tensor all = comm::gather_numbers(*ranks.shard, at::full({1}, comm::host_id(), at::kLong), device_,
                                                "which ranks share a host");
    hosts.assign(all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + size);
  }
  made.hosts = comm::group_by_host(hosts, rank);
  const size_t width = made.hosts.ranks[0].size();
  const bool even = all_of(made.hosts.ranks, [&](const auto& host) { return host.size() == width; });
  if (!even || made.hosts.ranks.size() == 1 || width == 1) return made;
  const auto open_among = [&](const std::vector<int>& members, int place) {
    comm::SubMesh some;
    for (const int member : members) some.ranks.push_back(job_ranks[static_cast<size_t>(member)]);
    some.rank = place;
    return mesh_->communicator(some, Purpose::kBlocks, in_memory_);
  };
  std::vector<int> apart;
  for (const std::vector<int>& host : made.hosts.ranks) apart.push_back(host[static_cast<size_t>(made.hosts.local)]);
  made.inner = open_among(made.hosts.ranks[static_cast<size_t>(made.hosts.mine)], made.hosts.local);
  made.outer = open_among(apart, made.hosts.mine);
  keep({made.inner, made.outer});
  return made;
}

void MeshSpaces::keep(const std::vector<comm::CommunicatorPtr>& made) {
  for (const comm::CommunicatorPtr& one : made)
    if (one->size() > 1 && !contains(opened_, one)) opened_.push_back(one);
}

const SpaceRanks& MeshSpaces::of(const std::string& rule, const std::string& copied_along) const {
  const auto found = spaces_.find({rule, copied_along});
  if (found == spaces_.end())
    fail(ErrorKind::kRuntime, "the ranks of the rule '", rule,
         "' were not opened: no parameter that the engine was given has it");
  return found->second;
}

const comm::CommunicatorPtr& MeshSpaces::data_parallel() const {
  return shards_ ? everyone().shard : everyone().replicas;
}

void MeshSpaces::abort(const std::string& why) const {
  for (const comm::CommunicatorPtr& one : opened_) one->abort(why);
}

}  // namespace ds::zero
