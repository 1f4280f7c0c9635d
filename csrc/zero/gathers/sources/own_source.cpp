// Parameters that this rank shares with no other: its slices are whole parameters.
#include <c10/core/GradMode.h>

#include <utility>

#include "base/ranges.h"
#include "zero/gathers/shard_source.h"

namespace ds::zero {

namespace {

class OwnSource : public ShardSource {
 public:
  explicit OwnSource(SourceParts parts)
      : ShardSource(std::move(parts.storage)),
        has_all_(none_of(parts.params, [](const ShardedParamPtr& param) { return is_copied(*param); })) {}

  // A parameter becomes its slice where that rests on the device; elsewhere it becomes a copy.
  void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>& ahead,
              Values values) override {
    at::NoGradGuard no_grad;
    prefetch(params, values);
    std::vector<std::pair<ShardedParam*, at::Tensor>> here;
    for (ShardedParam* param : absent(params, values)) {
      here.emplace_back(param, is_copied(*param) ? copied(*param) : param->shard());
      gathered_ += is_copied(*param) ? param->slice_numel() : 0;
    }
    prefetch(ahead, values);
    take_full(here, values);
  }
  bool looks_ahead() const override { return !has_all_; }
  bool has_all() const override { return has_all_; }
  // One that an earlier engine has gathered may lie elsewhere.
  void refresh(const std::vector<ShardedParam*>& params, Values) override {
    at::NoGradGuard no_grad;
    for (ShardedParam* param : params) {
      if (is_copied(*param)) {
        param->buffer().copy_(param->slice(storage::Access::kRead).data());
      } else if (!param->is_own_slice()) {
        param->take_full(param->shard());
      }
    }
  }
  bool meet_writes(bool wrote, int64_t) override { return wrote; }
  void before_write() override {}
  void after_write() override {}
  const char* name() const override { return "own slices"; }

 private:
  // Its elements are not where modules could read them.
  static bool is_copied(const ShardedParam& param) { return param.offloaded() || param.rests_as_codes(); }
  at::Tensor copied(const ShardedParam& param) {
    const at::Tensor buffer = buffers_.take(param.padded_numel(), param.dtype(), param.device());
    buffer.copy_(param.slice(storage::Access::kRead).data());
    return buffer;
  }

  const bool has_all_;
};

bool shares_nothing(const SourceParts& parts) {
  return all_of(parts.groups, [](const GatherGroup& group) { return group.ranks->size() == 1; });
}

ShardSourcePtr make_own(SourceParts parts) { return std::make_shared<OwnSource>(std::move(parts)); }

const ShardSourceRegistration own_registration({"own slices", 0, &shares_nothing, &make_own});

}  // namespace

}  // namespace ds::zero
