#include "zero/step/strategies/zenflow_choice.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "base/error.h"
#include "base/ranges.h"
#include "zero/step/stepper.h"

namespace ds::zero {

namespace {

using storage::Access;
using storage::Medium;

int64_t width_of(const ParamSpec& spec) {
  const auto sizes = spec.sizes();
  const auto strides = spec.strides();
  if (sizes.size() < 2 || spec.numel() == 0) return 0;
  const auto outermost = std::max_element(strides.begin(), strides.end()) - strides.begin();
  return spec.numel() / sizes[outermost];
}

// The numbers of the largest, rising.
std::vector<int64_t> largest(const double* sums, int64_t count, double ratio) {
  auto wanted = static_cast<int64_t>(static_cast<double>(count) * ratio + 1e-9);
  if (ratio > 0) wanted = std::max<int64_t>(1, wanted);
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](int64_t i) { return std::isnan(sums[i]) ? INFINITY : sums[i]; };
  std::partial_sort(order.begin(), order.begin() + wanted, order.end(),
                    [&](int64_t a, int64_t b) { return value(a) != value(b) ? value(a) > value(b) : a < b; });
  order.resize(wanted);
  sort(order);
  return order;
}

}  // namespace

ZenFlowChoice::ZenFlowChoice(ParamStore& store, DeviceContext& device, Stepper& stepper, const ZenFlowOptions& options)
    : store_(store),
      device_(device),
      stepper_(stepper),
      ratio_(options.topk_ratio),
      at_(options.offload ? Medium::kHost : Medium::kDevice),
      squares_(store, at::zeros({1}, device.sum_tensor().options())) {
  if (options.offload && !device.device().is_cpu()) host_ = std::make_unique<DeviceContext>(device.threads());
  for (size_t param = 0; param < store.size(); ++param) widths_.push_back(width_of(store.spec(param)));
}

// ---- the choice ---------------------------------------------------------------------------------------------------

void ZenFlowChoice::choose(const GradReducer& grads) {
  std::vector<std::vector<int64_t>> columns(store_.size());
  for (const SpaceSet& set : store_.sets()) {
    std::vector<int64_t> begins(store_.size());
    int64_t total = 0;
    for (int32_t param : set.params) begins[param] = std::exchange(total, total + widths_[param]);
    if (total == 0) continue;
    const at::Tensor sums = at::zeros({total}, at::TensorOptions().device(device_.device()).dtype(at::kDouble));
    for (size_t s : set.spaces) {
      const ParamSpace& space = store_.spaces()[s];
      const DType type = kernel_dtype(space.grad.dtype, "gradient");
      for (size_t b = 0; b < space.map.buckets.size(); ++b) {
        LeasedRow row;
        for (size_t e : space.owned) {
          const plan::Extent& extent = space.map.extents[e];
          const auto param = static_cast<size_t>(space.params[extent.param]);
          if (space.map.bucket_of[extent.param] != static_cast<int32_t>(b) || widths_[param] == 0 || !grads.used(param))
            continue;
          if (!row.data().defined())
            row = LeasedRow(*store_.storage(), space, space.grad, static_cast<int32_t>(b), Access::kRead,
                            Medium::kDevice);
          const auto width = static_cast<size_t>(widths_[param]);
          device_.run([&](const kernels::Launch& launch) {
            device_.table().column_sums(launch, row.address(static_cast<int32_t>(b), extent.shard_offset), type,
                                        static_cast<size_t>(extent.numel),
                                        static_cast<size_t>(extent.param_offset) % width, width,
                                        sums.data_ptr<double>() + begins[param]);
          });
        }
      }
    }
    if (set.ranks.shard->size() > 1) set.ranks.shard->all_reduce(sums, comm::ReduceOp::kSum, "sums of columns")->wait();
    const at::Tensor here = sums.to(at::kCPU);
    for (int32_t param : set.params)
      columns[param] = largest(here.data_ptr<double>() + begins[param], widths_[param], ratio_);
  }
  set_columns(std::move(columns));
}

void ZenFlowChoice::set_columns(std::vector<std::vector<int64_t>> columns) {
  columns_ = std::move(columns);
  parts_.clear();
  taken_ = false;
  chosen_ = rest_ = 0;
  if (!made()) return;
  for (size_t param = 0; param < store_.size(); ++param) {
    const auto numel = static_cast<double>(store_.spec(param).numel());
    const double share =
        widths_[param] == 0 ? 1.0 : static_cast<double>(columns_[param].size()) / static_cast<double>(widths_[param]);
    chosen_ += numel * share;
    rest_ += numel * (1.0 - share);
  }
  locate();
}

// Finds the chosen elements in the rows of this rank.
void ZenFlowChoice::locate() {
  for (const ParamSpace& space : store_.spaces()) {
    std::vector<std::vector<int64_t>> positions(space.map.buckets.size());
    std::vector<Part> parts(space.map.buckets.size());
    for (size_t b = 0; b < parts.size(); ++b) {
      parts[b].space = parts_.size();
      parts[b].bucket = static_cast<int32_t>(b);
    }
    for (size_t e : space.owned) {
      const plan::Extent& extent = space.map.extents[e];
      const auto param = static_cast<size_t>(space.params[extent.param]);
      const int32_t bucket = space.map.bucket_of[extent.param];
      std::vector<int64_t>& found = positions[bucket];
      const auto begin = static_cast<int64_t>(found.size());
      const int64_t start = extent.shard_offset - space.map.buckets[bucket].shard_begin - extent.param_offset;
      const int64_t end = extent.param_offset + extent.numel, width = widths_[param];
      if (width == 0) {
        for (int64_t i = extent.param_offset; i < end; ++i) found.push_back(start + i);
      } else {
        for (int64_t row = extent.param_offset / width * width; row < end; row += width)
          for (int64_t column : columns_[param])
            if (row + column >= extent.param_offset && row + column < end) found.push_back(start + row + column);
      }
      const auto last = static_cast<int64_t>(found.size());
      if (last > begin) parts[bucket].runs.push_back({param, begin, last});
      parts[bucket].rest = parts[bucket].rest || last - begin < extent.numel;
    }
    for (size_t b = 0; b < parts.size(); ++b)
      parts[b].positions = at::tensor(positions[b], at::kLong).to(device_.device());
    parts_.push_back(std::move(parts));
  }
}

const ZenFlowChoice::Part& ZenFlowChoice::part(const ParamSpace& space, int32_t bucket) const {
  return parts_[&space - store_.spaces().data()][bucket];
}

bool ZenFlowChoice::leaves_rest(const ParamSpace& space, int32_t bucket) const { return part(space, bucket).rest; }

// ---- masters and states -------------------------------------------------------------------------------------------

// visit(row of the plane, positions in it, what is taken of it)
template <typename Visit>
void ZenFlowChoice::each_plane(Part& part, Access access, const Visit& visit) {
  ParamSpace& space = store_.spaces()[part.space];
  const auto one = [&](const Buffer& buffer, storage::Lease& taken) {
    const plan::Range range = part_of(space, buffer, part.bucket);
    const Medium at = store_.storage()->resting(buffer.plane, range).value_or(Medium::kHost);
    const storage::Lease row = store_.storage()->acquire(buffer.plane, range, access, at);
    visit(row.data(), part.positions.to(row.data().device()), taken);
  };
  one(space.master, part.master);
  part.slots.resize(space.slots.size());
  for (size_t slot = 0; slot < space.slots.size(); ++slot) one(space.slots[slot], part.slots[slot]);
}

void ZenFlowChoice::take() {
  for (std::vector<Part>& parts : parts_) {
    for (Part& part : parts) {
      if (part.runs.empty()) continue;
      stepper_.ensure_slots(store_.spaces()[part.space]);
      each_plane(part, Access::kRead, [&](const at::Tensor& row, const at::Tensor& positions, storage::Lease& taken) {
        if (!taken) taken = store_.storage()->scratch(positions.numel(), row.scalar_type(), at_);
        taken.data().copy_(row.index_select(0, positions));
      });
    }
  }
  taken_ = true;
}

void ZenFlowChoice::put_back() {
  if (!std::exchange(taken_, false)) return;
  for (std::vector<Part>& parts : parts_) {
    for (Part& part : parts) {
      if (part.runs.empty()) continue;
      each_plane(part, Access::kUpdate, [&](const at::Tensor& row, const at::Tensor& positions, storage::Lease& taken) {
        row.index_copy_(0, positions, taken.data().to(row.device()));
      });
    }
  }
}

// ---- the update ---------------------------------------------------------------------------------------------------

void ZenFlowChoice::update(const StepInputs& inputs, const GradReducer& grads, const float* steps) {
  DeviceContext& context = host_ ? *host_ : device_;
  if (host_) host_->set_step_scale(device_.read_step_scale());
  squares_.clear();
  for (size_t s = 0; s < store_.spaces().size(); ++s) {
    const ParamSpace& space = store_.spaces()[s];
    const at::Tensor sum = squares_.of(s);
    const at::Tensor squares = host_ && sum.defined() ? at::zeros({1}, sum.options().device(context.device())) : sum;
    const optim::Rule& rule = stepper_.rule(space.key.param_group);
    kernels::UpdateArgs args;
    args.grad_dtype = kernel_dtype(space.grad.dtype, "gradient");
    const auto grad_bytes = static_cast<int64_t>(c10::elementSize(space.grad.dtype));
    for (const Part& part : parts_[s]) {
      const auto used = [&](const Run& run) { return grads.used(run.param); };
      if (none_of(part.runs, used)) continue;
      at::Tensor grad;
      {
        const LeasedRow row(*store_.storage(), space, space.grad, part.bucket, Access::kRead, Medium::kDevice);
        grad = row.data().index_select(0, part.positions).to(context.device());
      }
      const auto grad_at = [&](const Run& run) { return static_cast<char*>(grad.data_ptr()) + run.begin * grad_bytes; };
      std::map<float, std::vector<kernels::UpdateSegment>> by_count;
      std::vector<kernels::Segment> in_norm;
      for (const Run& run : part.runs) {
        if (!used(run)) continue;
        kernels::UpdateSegment segment;
        segment.master = part.master.data().data_ptr<float>() + run.begin;
        for (size_t slot = 0; slot < part.slots.size(); ++slot)
          segment.states[slot] = part.slots[slot].data().data_ptr<float>() + run.begin;
        segment.grad = grad_at(run);
        segment.numel = static_cast<size_t>(run.end - run.begin);
        by_count[steps[run.param]].push_back(segment);
        in_norm.push_back({grad_at(run), segment.numel});
      }
      if (squares.defined()) {
        context.run([&](const kernels::Launch& launch) {
          context.table().sum_squares(launch, in_norm.data(), in_norm.size(), args.grad_dtype,
                                      squares.data_ptr<double>());
        });
      }
      for (const auto& [count, segments] : by_count) {
        context.run([&, count = count, &segments = segments](const kernels::Launch& launch) {
          optim::run_pass(context.table(), launch, rule, rule.passes[0], segments, args,
                          inputs.hyper.at(space.key.param_group), count + 1.0, context.step_scale());
        });
      }
      const LeasedRow lp(*store_.storage(), space, space.lp, part.bucket, Access::kUpdate, Medium::kDevice);
      write_weights(space, part.bucket, lp.data());
    }
    if (host_ && sum.defined()) sum.add_(squares.to(sum.device()));
  }
}

void ZenFlowChoice::write_weights(const ParamSpace& space, int32_t bucket, const at::Tensor& row) const {
  const Part& chosen = part(space, bucket);
  if (chosen.runs.empty()) return;
  row.index_copy_(0, chosen.positions, chosen.master.data().to(row.device(), row.scalar_type()));
}

}  // namespace ds::zero
