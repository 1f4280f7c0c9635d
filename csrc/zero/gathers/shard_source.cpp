#include "zero/gathers/shard_source.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "base/error.h"
#include "base/ranges.h"
#include "zero/gathers/sources/staged_gather.h"

namespace ds::zero {

std::vector<ShardedParam*> ShardSource::absent(const std::vector<ShardedParam*>& params, Values values) {
  std::vector<ShardedParam*> result;
  for (ShardedParam* param : params)
    if (!param->shows(values) && !contains(result, param)) result.push_back(param);
  return result;
}

void ShardSource::take_full(const std::vector<std::pair<ShardedParam*, at::Tensor>>& params, Values values) {
  if (params.empty()) return;
  const StatusScope together(*params.front().first);
  for (const auto& [param, buffer] : params) {
    if (param->available()) {
      param->buffer().copy_(buffer);
      param->note_values(values);
      param->know_values();
    } else {
      param->take_full(buffer, values);
    }
  }
}

// In one collective where it takes several tensors, else in some of at most the size that is staged.
void ShardSource::refresh_together(comm::Communicator& communicator, const std::vector<ShardedParam*>& params,
                                   Values values) {
  at::NoGradGuard no_grad;
  std::vector<std::unique_ptr<StagedGather>> pending;
  for (size_t begin = 0, end = 0; begin < params.size(); begin = end) {
    int64_t bytes = 0;
    while (end < params.size() && (end == begin || communicator.groups() || bytes < StagedGather::kLimit / 2)) {
      const ShardedParam& param = *params[end++];
      bytes += param.row_bytes(values) * communicator.size();
    }
    const auto first = params.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = params.begin() + static_cast<std::ptrdiff_t>(end);
    pending.push_back(std::make_unique<StagedGather>(communicator, buffers_, std::vector<ShardedParam*>(first, last),
                                                     values,
                                                     /*in_place=*/true));
    collectives_ += pending.back()->collectives();
  }
  for (const auto& gather : pending)
    for (ShardedParam* param : gather->params()) {
      gather->take(*param);
      param->note_values(values);
    }
}

namespace {

// By order. Filled before main.
std::vector<ShardSourceRow>& source_rows() {
  static std::vector<ShardSourceRow> all;
  return all;
}

bool fits(const ShardSourceRow& row, const SourceParts& parts, const std::function<bool(bool)>& on_all) {
  return row.fits == nullptr || on_all(row.fits(parts));
}

}  // namespace

ShardSourceRegistration::ShardSourceRegistration(ShardSourceRow row) {
  source_rows().push_back(std::move(row));
  std::stable_sort(source_rows().begin(), source_rows().end(),
                   [](const ShardSourceRow& a, const ShardSourceRow& b) { return a.order < b.order; });
}

ShardSourcePtr source_of(SourceParts parts, const std::string& named, const std::function<bool(bool)>& on_all) {
  std::string known;
  for (const ShardSourceRow& row : source_rows()) {
    known += (known.empty() ? "" : ", ") + row.name;
    if (!named.empty() && row.name != named) continue;
    if (fits(row, parts, on_all)) return row.make(std::move(parts));
    if (!named.empty())
      fail(ErrorKind::kValue, "the source '", named, "' of gathered parameters does not fit the ranks of this engine");
  }
  fail(ErrorKind::kValue, "'", named, "' is not a source of gathered parameters; the sources are: ", known);
}

}  // namespace ds::zero
