// Codes of signs and of blocks of integers over tensors, for the ops `packbits` and `quantizer` (kernels/codes.h).
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "base/error.h"
#include "bindings/registry.h"
#include "bindings/torch_types.h"
#include "kernels/codes.h"
#include "zero/device_context.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using kernels::BlockCode;
using kernels::CodeKernels;

// Kernels of each device that a tensor has been on.
class CodeOps {
 public:
  explicit CodeOps(int threads) : threads_(threads) {}

  // A byte for eight elements, the first in its highest bit: 1 where an element is at least 0.
  at::Tensor pack_signs(const at::Tensor& values) {
    const at::Tensor flat = values.detach().to(at::kFloat).contiguous();
    const at::Tensor bits = at::empty({(flat.numel() + 7) / 8}, flat.options().dtype(at::kByte));
    const kernels::SignRun run = {flat.data_ptr<float>(), nullptr, static_cast<size_t>(flat.numel()),
                                  bits.data_ptr<uint8_t>(), nullptr};
    on(flat, [&](const CodeKernels& codes, const kernels::Launch& launch) { codes.encode_signs(launch, &run, 1); });
    return bits;
  }

  // 1 or -1 for each of the first `numel` bits.
  at::Tensor unpack_signs(const at::Tensor& bits, int64_t numel) {
    const at::Tensor from = bits.contiguous();
    if (from.scalar_type() != at::kByte || numel < 0 || from.numel() < (numel + 7) / 8)
      fail(ErrorKind::kValue, "unpackbits takes a torch.uint8 tensor with a bit for each of ", numel, " elements, got ",
           from.toString(), " ", from.sizes());
    const at::Tensor out = at::empty({numel}, from.options().dtype(at::kFloat)), one = at::ones({1}, out.options());
    const kernels::SignSum run = {
        out.data_ptr<float>(), static_cast<size_t>(numel), from.data_ptr<uint8_t>(), one.data_ptr<float>(), 1, 0};
    on(out,
       [&](const CodeKernels& codes, const kernels::Launch& launch) { codes.decode_signs(launch, &run, 1, 1.0f); });
    return out;
  }

  // The codes of `values` in `groups` groups of equally many elements, as bytes, and a row of each group with its scale
  // and, where `offset`, its offset.
  std::tuple<at::Tensor, at::Tensor> encode(const at::Tensor& values, int64_t groups, int bits, bool offset) {
    const at::Tensor flat = values.detach().contiguous().view({-1});
    const BlockCode code = code_of(flat.numel(), groups, bits, offset);
    const DType type = zero::kernel_dtype(flat.scalar_type(), "the tensor to quantize");
    const auto options = flat.options().dtype(at::kFloat);
    const at::Tensor bytes = at::empty({flat.numel() * bits / 8}, options.dtype(at::kByte));
    const at::Tensor scales = at::empty({groups}, options), offsets = at::empty({offset ? groups : 0}, options);
    const kernels::BlockRun run = {flat.data_ptr(),
                                   static_cast<size_t>(flat.numel()),
                                   bytes.data_ptr<uint8_t>(),
                                   scales.data_ptr(),
                                   offset ? offsets.data_ptr() : nullptr,
                                   nullptr,
                                   0};
    on(flat, [&](const CodeKernels& codes, const kernels::Launch& launch) {
      codes.encode_blocks(launch, code, type, &run, 1);
    });
    return {bytes, offset ? at::stack({scales, offsets}, 1) : scales.view({groups, 1})};
  }

  // The mean of the values of `parts` equal parts of codes and params, in the order of the parts and in fp32.
  at::Tensor decode(const at::Tensor& bytes, const at::Tensor& params, int64_t groups, int bits, bool offset,
                    int64_t parts, const py::object& dtype) {
    const at::ScalarType type = optional_dtype(dtype).value_or(at::kHalf);
    const DType out_type = zero::kernel_dtype(type, "the result of dequantize");
    const int64_t there = bytes.numel(), columns = offset ? 2 : 1,
                  numel = bits == 0 ? 0 : there * 8 / bits / std::max<int64_t>(1, parts);
    if (parts < 1 || bytes.element_size() != 1 || params.numel() != groups * columns * parts)
      fail(ErrorKind::kValue, "dequantize takes codes of one byte and ", columns, " number(s) for each of ", groups,
           " groups of ", parts, " part(s), got ", bytes.toString(), " ", bytes.sizes(), " and params ",
           params.sizes());
    const BlockCode code = code_of(numel, groups, bits, offset);
    const at::Tensor from = bytes.contiguous();
    const at::Tensor rows = params.to(from.device(), at::kFloat).reshape({parts, groups, columns});
    const at::Tensor scales = rows.select(2, 0).contiguous(), offsets = rows.select(2, columns - 1).contiguous();
    const at::Tensor out = at::empty({numel}, from.options().dtype(parts == 1 ? type : at::kFloat));
    on(out, [&](const CodeKernels& codes, const kernels::Launch& launch) {
      for (int64_t part = 0; part < parts; ++part) {
        const kernels::BlockSum run = {out.data_ptr(),
                                       static_cast<size_t>(numel),
                                       static_cast<const uint8_t*>(from.data_ptr()) + part * numel * bits / 8,
                                       scales.data_ptr<float>() + part * groups,
                                       offset ? offsets.data_ptr<float>() + part * groups : nullptr,
                                       1,
                                       0};
        codes.decode_blocks(launch, code, parts == 1 ? out_type : DType::kF32, &run, 1,
                            1.0f / static_cast<float>(parts), part > 0);
      }
    });
    return out.to(type);
  }

  // Rounds `values`, which has no gaps, in place to 2^bits numbers for each of `groups` groups.
  void fake_quant(const at::Tensor& values, int64_t groups, int bits, bool offset, bool stochastic, uint64_t seed) {
    if (bits < 1 || bits > 8) fail(ErrorKind::kValue, "quantization to ", bits, " bits is not there; use 1 to 8");
    const at::Tensor flat = values.detach();
    check_groups(flat.numel(), groups);
    if (!flat.is_contiguous())
      fail(ErrorKind::kValue, "a tensor that is quantized in place has no gaps; got the strides ", flat.strides(),
           ": pass tensor.contiguous()");
    const DType type = zero::kernel_dtype(flat.scalar_type(), "the tensor to quantize");
    const auto group = static_cast<size_t>(std::max<int64_t>(flat.numel() / groups, 1));
    const kernels::FakeQuant how = {bits, group, offset, stochastic, seed};
    on(flat, [&](const CodeKernels& codes, const kernels::Launch& launch) {
      codes.fake_quant(launch, how, type, flat.data_ptr(), static_cast<size_t>(flat.numel()));
    });
  }

  // Rows of codes and a scale, uint8 [groups, group * bits / 8 + 4], of groups of `group` elements.
  at::Tensor encode_floats(const at::Tensor& values, int64_t group, int bits, bool stochastic, uint64_t seed) {
    const at::Tensor flat = values.detach().contiguous();
    const kernels::FloatCode code = float_code(group, bits, stochastic, seed);
    if (flat.numel() % group != 0)
      fail(ErrorKind::kValue, flat.numel(), " elements cannot be cut into groups of ", group,
           " (group_size); use a divisor of ", flat.numel());
    const DType type = zero::kernel_dtype(flat.scalar_type(), "the tensor to quantize");
    const auto groups = flat.numel() / group;
    const at::Tensor rows = at::empty({groups, static_cast<int64_t>(float_row(code))}, flat.options().dtype(at::kByte));
    on(flat, [&](const CodeKernels& codes, const kernels::Launch& launch) {
      codes.encode_floats(launch, code, type, flat.data_ptr(), static_cast<size_t>(groups), rows.data_ptr<uint8_t>());
    });
    return rows;
  }

  // [groups, group] of the rows that encode_floats() returned.
  at::Tensor decode_floats(const at::Tensor& given, int64_t group, int bits, const py::object& dtype) {
    const at::Tensor rows = given.detach().contiguous();
    const kernels::FloatCode code = float_code(group, bits, false, 0);
    const at::ScalarType type = optional_dtype(dtype).value_or(at::kFloat);
    const DType out_type = zero::kernel_dtype(type, "the result of dequantize");
    if (rows.scalar_type() != at::kByte || rows.dim() != 2 || rows.size(1) != static_cast<int64_t>(float_row(code)))
      fail(ErrorKind::kValue, "codes of ", bits, " bits in groups of ", group, " are torch.uint8 [groups, ",
           float_row(code), "], got ", rows.toString(), " ", rows.sizes());
    const at::Tensor out = at::empty({rows.size(0), group}, rows.options().dtype(type));
    on(rows, [&](const CodeKernels& codes, const kernels::Launch& launch) {
      codes.decode_floats(launch, code, rows.data_ptr<uint8_t>(), static_cast<size_t>(rows.size(0)), out_type,
                          out.data_ptr());
    });
    return out;
  }

 private:
  static kernels::FloatCode float_code(int64_t group, int bits, bool stochastic, uint64_t seed) {
    if (bits != 4 && bits != 6 && bits != 8 && bits != 12)
      fail(ErrorKind::kValue, "floats of ", bits, " bits are not there; use 4, 6, 8 or 12 (q_bits)");
    const int64_t whole = bits == 8 ? 1 : bits == 6 ? 4 : 2;
    if (group < 1 || group % whole != 0)
      fail(ErrorKind::kValue, "groups of ", group, " floats of ", bits, " bits are not whole bytes; group_size is a ",
           "multiple of ", whole);
    const int exponent = bits == 4 ? 2 : bits == 6 ? 3 : 4;
    return {exponent, bits - 1 - exponent, static_cast<size_t>(group), stochastic, seed};
  }
  static void check_groups(int64_t numel, int64_t groups) {
    if (groups < 1 || numel % groups != 0)
      fail(ErrorKind::kValue, numel, " elements cannot be cut into ", groups, " equal groups; use a divisor of ",
           numel);
  }
  static BlockCode code_of(int64_t numel, int64_t groups, int bits, bool offset) {
    if (bits != 4 && bits != 8) fail(ErrorKind::kValue, "quantization to ", bits, " bits is not there; use 4 or 8");
    check_groups(numel, groups);
    const int64_t group = std::max<int64_t>(numel / groups, bits == 4 ? 2 : 1);
    if (bits == 4 && group % 2 != 0)
      fail(ErrorKind::kValue, "groups of ", group,
           " elements cannot be quantized to 4 bits, because two codes share a byte; use groups of an even size");
    return {bits, static_cast<size_t>(group), DType::kF32, offset};
  }

  template <typename Call>
  void on(const at::Tensor& tensor, const Call& call) {
    if (tensor.is_meta()) return;
    std::unique_ptr<zero::DeviceContext>& device = devices_[tensor.device().str()];
    if (!device) device = std::make_unique<zero::DeviceContext>(tensor.device(), threads_);
    const c10::DeviceGuard current(tensor.device());
    const py::gil_scoped_release unlocked;
    device->run([&](const kernels::Launch& launch) { call(device->codes(), launch); });
    device->check();
  }

  const int threads_;
  std::map<std::string, std::unique_ptr<zero::DeviceContext>> devices_;
};

}  // namespace

DS_BINDINGS(m) {
  py::class_<CodeOps>(m, "CodeOps", "Codes of signs and of blocks of integers (kernels/codes.h) over tensors.")
      .def(py::init<int>(), "threads"_a)
      .def("pack_signs", &CodeOps::pack_signs, "values"_a)
      .def("unpack_signs", &CodeOps::unpack_signs, "bits"_a, "numel"_a)
      .def("encode", &CodeOps::encode, "values"_a, "groups"_a, "bits"_a, "offset"_a)
      .def("decode", &CodeOps::decode, "codes"_a, "params"_a, "groups"_a, "bits"_a, "offset"_a, "parts"_a, "dtype"_a)
      .def("fake_quant", &CodeOps::fake_quant, "values"_a, "groups"_a, "bits"_a, "offset"_a, "stochastic"_a, "seed"_a)
      .def("encode_floats", &CodeOps::encode_floats, "values"_a, "group"_a, "bits"_a, "stochastic"_a, "seed"_a)
      .def("decode_floats", &CodeOps::decode_floats, "rows"_a, "group"_a, "bits"_a, "dtype"_a);
}

}  // namespace ds::bindings
