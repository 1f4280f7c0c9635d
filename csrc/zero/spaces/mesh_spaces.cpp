#include "zero/spaces/mesh_spaces.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "base/error.h"
#include "base/ranges.h"

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
  at::Tensor own = at::zeros({kShown}, at::kByte);
  std::memcpy(own.data_ptr(), plan.data(), std::min<size_t>(plan.size(), kShown));
  own = own.to(device);
  at::Tensor all = at::empty({ranks.size(), kShown}, own.options());
  ranks.all_gather(own, all, "which communicators are opened")->wait();
  all = all.to(at::kCPU);
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
  const bool in_memory = all_of(devices, [](c10::Device device) { return device.is_cpu(); });
  std::vector<Opening> openings;
  for (auto& [key, space] : axes) {
    space = plan::space_axes({mesh_->grid(), key.first, shards_, key.second});
    append(openings, openings_of(space));
  }
  // Those of dense parameters come first in every plan.
  const SpaceAxes& dense = axes.at({"dense", ""});
  const auto first = mesh_->open({{dense.shard, dense.purpose}, {dense.replicas, dense.purpose}}, in_memory);
  check_alike(*first[shards_ ? 0 : 1], text_of(*mesh_, openings), devices.empty() ? at::kCPU : devices.front());
  const std::vector<comm::CommunicatorPtr> opened = mesh_->open(openings, in_memory);
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
  }
  keep(opened);
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
