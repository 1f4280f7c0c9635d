// DeviceContext tests: copies, sums, and the numbers that a step reads on the host.
#include "zero/device_context.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <cmath>

#include "../test_device.h"
#include "storage/fence.h"
#include "storage/side_stream.h"
#include "zero/any_kernels.h"

namespace ds::zero {
namespace {

using Unmissed = std::vector<std::string>;

const at::ScalarType kTypes[] = {at::kFloat, at::kHalf, at::kBFloat16};

at::Tensor numbers(int64_t numel, at::ScalarType type, int64_t first = 0) {
  return at::arange(first, first + numel, at::kLong).remainder(100).to(type).to(test_device(), /*non_blocking=*/true);
}

at::Tensor fp32(const at::Tensor& tensor) { return tensor.cpu().to(at::kFloat); }

TEST(DeviceContext, CopiesAndSumsOfAnyTypes) {
  DeviceContext device(test_device(), 2);
  for (const int64_t numel : {0, 1, 33, 1025})
    for (const at::ScalarType to : kTypes)
      for (const at::ScalarType from : kTypes) {
        const at::Tensor source = numbers(numel, from), target = numbers(numel, to, 7);
        const at::Tensor sum = fp32(target) + 0.5 * fp32(source);
        device.accumulate(target, source, 0.5f);
        EXPECT_TRUE(fp32(target).equal(sum.to(to).to(at::kFloat)));
        device.copy(target, source, 0.5f);
        EXPECT_TRUE(fp32(target).equal((0.5 * fp32(source)).to(to).to(at::kFloat)));
        device.move(target.data_ptr(), to, source.data_ptr(), from, numel, 1.0f, /*add=*/false);
        EXPECT_TRUE(fp32(target).equal(fp32(source)));
        device.move(target.data_ptr(), to, source.data_ptr(), from, numel, 1.0f, /*add=*/true);
        EXPECT_TRUE(fp32(target).equal(2 * fp32(source)));
      }
  device.check();
}

// Any device codes values to the bytes of the CPU, and decodes them to the same values.
TEST(DeviceContext, CodesAreThoseOfTheReference) {
  using kernels::BlockRun;
  const kernels::CodeKernels& ref = *ds_cpu_code_kernels_isa(kernels::kCodesAbi, "ref");
  const kernels::BlockCode code = {4, 32, DType::kBF16, true};
  constexpr int64_t kNumel = 1001, kGroups = 32, kBits = 126;
  const auto bytes = at::TensorOptions().dtype(at::kByte), floats = at::TensorOptions().dtype(at::kFloat);
  // All results of one place: bits, errors, a sum of squares, signs again; codes, scales, offsets, values again.
  const auto results = [&](const c10::Device& place, const auto& call) {
    const at::Tensor values = (at::arange(kNumel, at::kLong).remainder(37).to(at::kFloat) - 17).to(place);
    const at::Tensor error = at::ones({kNumel}, floats.device(place)), block_error = error.clone();
    const at::Tensor bits = at::zeros({kBits}, bytes.device(place)), scale = at::full({1}, 3, floats.device(place));
    const at::Tensor sum = at::zeros({1}, floats.dtype(at::kDouble).device(place)), signs = at::zeros_like(values);
    const at::Tensor codes = at::zeros({501}, bytes.device(place)),
                     scales = at::zeros({2 * kGroups}, bytes.device(place));
    const at::Tensor offsets = at::zeros_like(scales), back = at::ones_like(values);
    auto* const x = values.data_ptr<float>();
    const kernels::ErrorSum squares = {x, error.data_ptr<float>(), kNumel, sum.data_ptr<double>()};
    const kernels::SignRun run = {x, error.data_ptr<float>(), kNumel, bits.data_ptr<uint8_t>(),
                                  scale.data_ptr<float>()};
    const kernels::SignSum again = {signs.data_ptr<float>(), kNumel, bits.data_ptr<uint8_t>(),
                                    scale.data_ptr<float>(), 1,      0};
    const BlockRun blocks = {
        x,   kNumel, codes.data_ptr<uint8_t>(), scales.data_ptr(), offsets.data_ptr(), block_error.data_ptr<float>(),
        0.5f};
    const kernels::BlockSum decoded = {
        back.data_ptr(), kNumel, codes.data_ptr<uint8_t>(), scales.data_ptr(), offsets.data_ptr(), 1, 0};
    call([&](const kernels::CodeKernels& table, const kernels::Launch& launch) {
      table.sum_squares_with_error(launch, &squares, 1);
      table.encode_signs(launch, &run, 1);
      table.decode_signs(launch, &again, 1, 0.5f);
      table.encode_blocks(launch, code, DType::kF32, &blocks, 1);
      table.decode_blocks(launch, code, DType::kF32, &decoded, 1, 2.0f, true);
    });
    return std::vector<at::Tensor>{bits.cpu(),   error.cpu(),   sum.cpu(),         signs.cpu(), codes.cpu(),
                                   scales.cpu(), offsets.cpu(), block_error.cpu(), back.cpu()};
  };
  const auto want = results(at::kCPU, [&](const auto& run) { run(ref, {}); });
  DeviceContext device(test_device(), 2), any(test_device(), 2, &any_kernels(test_device().type()));
  for (const DeviceContext* context : {&device, &any}) {
    const auto got = results(test_device(), [&](const auto& run) {
      context->run([&](const kernels::Launch& launch) { run(context->codes(), launch); });
    });
    context->check();
    for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(got[i].equal(want[i])) << i;
  }
}

TEST(DeviceContext, SourcesInAnotherOrderOfMemory) {
  const DeviceContext device(test_device(), 1);
  const at::Tensor turned = numbers(60, at::kFloat).view({6, 10}).t();
  const at::Tensor target = at::zeros({10, 6}, turned.options().memory_format(at::MemoryFormat::Contiguous));
  device.copy(target, turned, 2.0f);
  EXPECT_TRUE(fp32(target).equal(2 * fp32(turned)));
  device.accumulate(target, turned, 1.0f);
  EXPECT_TRUE(fp32(target).equal(3 * fp32(turned)));
  EXPECT_TRUE(fp32(device.flattened(turned, {10, 6}, {6, 1})).equal(fp32(turned).reshape({60})));
  const at::Tensor counts = at::zeros({60}, turned.options().dtype(at::kDouble));
  device.copy(counts, numbers(60, at::kFloat), 1.0f);  // of a type that no kernel knows
  device.accumulate(counts, numbers(60, at::kDouble), 1.0f);
  EXPECT_TRUE(fp32(counts).equal(2 * fp32(numbers(60, at::kFloat))));
}

// The scale of each step is found on the device, and read on the host while the device goes on.
TEST(DeviceContext, TheStepScaleIsReadWhenItIsThere) {
  const auto body = [](bool sound) {
    DeviceContext device(test_device(), 1);
    device.reserve(0, 1000);
    const at::Tensor values = at::full({1000}, 2.0, at::TensorOptions().device(test_device()));
    const kernels::Segment segment = {values.data_ptr(), 1000};
    for (int step = 1; step <= 3; ++step) {
      device.run_reserved([&](const kernels::Launch& launch) {
        device.table().scale(launch, values.data_ptr(), DType::kF32, 1000, 2.0f);
        device.sum_tensor().zero_();
        device.table().sum_squares(launch, &segment, 1, DType::kF32, device.sum());
        device.table().finish_norm(launch, device.sum(), nullptr, 1.0f, 0.0f, true, device.step_scale());
      });
      device.post_step_scale();
      const kernels::StepScale found = device.read_step_scale();
      const double norm = std::pow(2.0, step + 1) * std::sqrt(1000.0);
      if (sound) {
        EXPECT_NEAR(found.norm, norm, 1e-3 * norm);
      }
    }
    device.check();
  };
  // A scale that is written while the last one is copied out waits on the same stream.
  EXPECT_EQ(waits_that_nothing_misses(body), Unmissed{});
}

// The error of a failed kernel is kept until take_failure() returns it, once.
TEST(DeviceContext, FailuresAreToldOnce) {
  DeviceContext device(test_device(), 1);
  device.note_failure("no memory for a kernel");
  device.note_failure("and another one");
  EXPECT_TRUE(device.failed());
  EXPECT_EQ(device.take_failure(), "no memory for a kernel");
  EXPECT_FALSE(device.failed());
  EXPECT_EQ(device.may_fail(), on_standin());
}

// A context is used by the streams of whoever calls it, one after the other.
TEST(DeviceContext, WorksOnTheCurrentStream) {
  const DeviceContext device(test_device(), 1);
  const at::Tensor target = numbers(500, at::kFloat);
  at::Tensor expected;
  {
    const storage::FencePtr made = storage::Fence::after(target);  // none on the CPU
    const storage::SideStream side(test_device());
    if (made) made->wait(target);
    const at::Tensor source = numbers(500, at::kBFloat16);
    device.accumulate(target, source, 3.0f);
    expected = fp32(target);
  }
  EXPECT_TRUE(expected.equal(4 * fp32(numbers(500, at::kFloat))));
}

}  // namespace
}  // namespace ds::zero
