#include "zero/any_codes.h"

#include <ATen/Functions.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "zero/any_entry.h"
#include "zero/any_kernels.h"
#include "zero/meta_kernels.h"

namespace ds::zero {
namespace any {
namespace {

using kernels::BlockCode;
using kernels::BlockRun;
using kernels::BlockSum;
using kernels::CodeKernels;
using kernels::ErrorSum;
using kernels::FakeQuant;
using kernels::FloatCode;
using kernels::SignRun;
using kernels::SignSum;

const CodeKernels& cpu_codes() {
  const CodeKernels* codes = ds_code_kernels(kernels::kCodesAbi, "cpu");
  if (codes == nullptr) fail(ErrorKind::kRuntime, ds_cpu_kernels_error(kernels::kKernelAbi));
  return *codes;
}

// Copies on the host of arrays of a device, or the arrays themselves where that is the host.
class OnHost {
 public:
  explicit OnHost(const c10::Device& device) : device_(device) {}

  template <typename T>
  T* read(T* data, size_t bytes) {
    if (data == nullptr || bytes == 0 || device_.is_cpu()) return data;
    const at::Tensor there = array_at(data, at::kByte, static_cast<int64_t>(bytes), device_);
    copies_.push_back(there.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
    return static_cast<T*>(copies_.back().data_ptr());
  }
  // The array is also written: give_back() copies the result to the device.
  template <typename T>
  T* change(T* data, size_t bytes) {
    T* const here = read(data, bytes);
    if (here != data)
      changed_.emplace_back(array_at(data, at::kByte, static_cast<int64_t>(bytes), device_), copies_.back());
    return here;
  }
  void give_back() const {
    for (const auto& [there, here] : changed_) there.copy_(here);
  }

 private:
  const c10::Device device_;
  std::vector<at::Tensor> copies_;
  std::vector<std::pair<at::Tensor, at::Tensor>> changed_;
};

void sum_squares_with_error(const c10::Device& device, const Launch& launch, const ErrorSum* runs, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    OnHost host(device);
    ErrorSum run = runs[i];
    run.values = host.read(run.values, run.numel * sizeof(float));
    run.error = host.read(run.error, run.numel * sizeof(float));
    run.sum = host.change(run.sum, sizeof(double));
    cpu_codes().sum_squares_with_error({launch.pool}, &run, 1);
    host.give_back();
  }
}

void encode_signs(const c10::Device& device, const Launch& launch, const SignRun* runs, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    OnHost host(device);
    SignRun run = runs[i];
    run.values = host.read(run.values, run.numel * sizeof(float));
    run.error = host.change(run.error, run.numel * sizeof(float));
    run.bits = host.change(run.bits, (run.numel + 7) / 8);
    run.scale = host.read(run.scale, sizeof(float));
    cpu_codes().encode_signs({launch.pool}, &run, 1);
    host.give_back();
  }
}

// The bytes from the first of `parts` arrays to the end of the last one.
size_t all_parts(size_t bytes, size_t parts, size_t stride) { return parts == 0 ? 0 : (parts - 1) * stride + bytes; }

void decode_signs(const c10::Device& device, const Launch& launch, const SignSum* runs, size_t count, float factor) {
  for (size_t i = 0; i < count; ++i) {
    OnHost host(device);
    SignSum run = runs[i];
    run.bits = host.read(run.bits, all_parts((run.numel + 7) / 8, run.parts, run.stride));
    run.scale = host.read(run.scale, all_parts(sizeof(float), run.parts, run.stride));
    run.out = host.change(run.out, run.numel * sizeof(float));
    cpu_codes().decode_signs({launch.pool}, &run, 1, factor);
    host.give_back();
  }
}

void encode_blocks(const c10::Device& device, const Launch& launch, const BlockCode& code, DType values,
                   const BlockRun* runs, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    OnHost host(device);
    BlockRun run = runs[i];
    run.values = host.read(run.values, run.numel * dtype_bytes(values));
    run.codes = host.change(run.codes, code_bytes(code, run.numel));
    run.scales = host.change(run.scales, scale_bytes(code, run.numel));
    run.offsets = code.offset ? host.change(run.offsets, scale_bytes(code, run.numel)) : nullptr;
    run.error = host.change(run.error, run.numel * sizeof(float));
    cpu_codes().encode_blocks({launch.pool}, code, values, &run, 1);
    host.give_back();
  }
}

void decode_blocks(const c10::Device& device, const Launch& launch, const BlockCode& code, DType out,
                   const BlockSum* runs, size_t count, float factor, bool add) {
  for (size_t i = 0; i < count; ++i) {
    OnHost host(device);
    BlockSum run = runs[i];
    run.codes = host.read(run.codes, all_parts(code_bytes(code, run.numel), run.parts, run.stride));
    run.scales = host.read(run.scales, all_parts(scale_bytes(code, run.numel), run.parts, run.stride));
    if (code.offset)
      run.offsets = host.read(run.offsets, all_parts(scale_bytes(code, run.numel), run.parts, run.stride));
    run.out = host.change(run.out, run.numel * dtype_bytes(out));
    cpu_codes().decode_blocks({launch.pool}, code, out, &run, 1, factor, add);
    host.give_back();
  }
}

void fake_quant(const c10::Device& device, const Launch& launch, const FakeQuant& how, DType dtype, void* values,
                size_t numel) {
  OnHost host(device);
  void* here = host.change(values, numel * dtype_bytes(dtype));
  cpu_codes().fake_quant({launch.pool}, how, dtype, here, numel);
  host.give_back();
}

void encode_floats(const c10::Device& device, const Launch& launch, const FloatCode& code, DType dtype,
                   const void* values, size_t groups, uint8_t* rows) {
  OnHost host(device);
  const void* from = host.read(values, groups * code.group * dtype_bytes(dtype));
  uint8_t* to = host.change(rows, groups * float_row(code));
  cpu_codes().encode_floats({launch.pool}, code, dtype, from, groups, to);
  host.give_back();
}

void decode_floats(const c10::Device& device, const Launch& launch, const FloatCode& code, const uint8_t* rows,
                   size_t groups, DType dtype, void* out) {
  OnHost host(device);
  const uint8_t* from = host.read(rows, groups * float_row(code));
  void* to = host.change(out, groups * code.group * dtype_bytes(dtype));
  cpu_codes().decode_floats({launch.pool}, code, from, groups, dtype, to);
  host.give_back();
}

template <size_t... kType>
auto make_code_tables(std::index_sequence<kType...>) {
  const auto table = [](auto type) -> CodeKernels {
    constexpr auto kOne = static_cast<c10::DeviceType>(decltype(type)::value);
    return {kernels::kCodesAbi,
            sizeof(CodeKernels),
            &Entry<kOne, &sum_squares_with_error>::call,
            &Entry<kOne, &encode_signs>::call,
            &Entry<kOne, &decode_signs>::call,
            &Entry<kOne, &encode_blocks>::call,
            &Entry<kOne, &decode_blocks>::call,
            &Entry<kOne, &fake_quant>::call,
            &Entry<kOne, &encode_floats>::call,
            &Entry<kOne, &decode_floats>::call};
  };
  return std::array<CodeKernels, sizeof...(kType)>{{table(std::integral_constant<size_t, kType>())...}};
}

}  // namespace
}  // namespace any

const kernels::CodeKernels& any_codes(c10::DeviceType type) {
  static const auto all = any::make_code_tables(std::make_index_sequence<c10::COMPILE_TIME_MAX_DEVICE_TYPES>());
  return all.at(static_cast<size_t>(type));
}

const kernels::CodeKernels& codes_of(const c10::Device& device, const kernels::KernelTable& table) {
  if (&table == &meta_kernels()) return meta_codes();
  if (&table == &any_kernels(device.type())) return any_codes(device.type());
  const std::string name = c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  const kernels::CodeKernels* codes = ds_code_kernels(kernels::kCodesAbi, name.c_str());
  return codes != nullptr ? *codes : any_codes(device.type());
}

}  // namespace ds::zero
