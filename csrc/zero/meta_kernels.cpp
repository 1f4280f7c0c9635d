#include "zero/meta_kernels.h"

#include "storage/meta_memory.h"
#include "zero/any_kernels.h"

namespace ds::zero {
namespace {

using kernels::Launch;

void ran(const char* name, size_t bytes = 0) {
  if (auto* memory = storage::MetaMemory::installed()) memory->kernel_ran(name, bytes);
}

kernels::KernelTable make_table() {
  kernels::KernelTable made = cpu_library();
  made.device = "meta";
  made.isa = "none";
  made.copy = [](const Launch&, void*, DType to, const void*, DType from, size_t n, float) {
    ran("copy", n * (dtype_bytes(to) + dtype_bytes(from)));
  };
  made.accumulate = [](const Launch&, void*, DType to, const void*, DType from, size_t n, float) {
    ran("accumulate", n * (2 * dtype_bytes(to) + dtype_bytes(from)));
  };
  made.move_all = [](const Launch&, const kernels::Move* moves, size_t count, DType to, DType from, float, bool add) {
    size_t numel = 0;
    for (size_t i = 0; i < count; ++i) numel += moves[i].numel;
    ran("move_all", numel * ((add ? 2 : 1) * dtype_bytes(to) + dtype_bytes(from)));
  };
  made.find_nonfinite = [](const Launch&, const kernels::Checked* arrays, size_t count, DType dtype) {
    size_t numel = 0;
    for (size_t i = 0; i < count; ++i) numel += arrays[i].numel;
    ran("find_nonfinite", numel * dtype_bytes(dtype));
  };
  made.sum_squares = [](const Launch&, const kernels::Segment* segments, size_t count, DType dtype, double*) {
    size_t numel = 0;
    for (size_t i = 0; i < count; ++i) numel += segments[i].numel;
    ran("sum_squares", numel * dtype_bytes(dtype));
  };
  // The planner knows the time of an update by its states.
  made.finish_norm = [](auto...) { ran("finish_norm"); };
  made.update = [](auto...) { ran("update"); };
  made.scale = [](auto...) { ran("scale"); };
  made.column_sums = [](auto...) { ran("column_sums"); };
  return made;
}

template <typename Run>
size_t numel_of(const Run* runs, size_t count) {
  size_t numel = 0;
  for (size_t i = 0; i < count; ++i) numel += runs[i].numel;
  return numel;
}

// Bytes of all parts of runs with one code, without gaps.
template <typename Sum, typename Bytes>
size_t parts_bytes(const Sum* runs, size_t count, const Bytes& bytes) {
  size_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += runs[i].parts * bytes(runs[i].numel);
  return sum;
}

template <typename Run>
size_t error_bytes(const Run* runs, size_t count) {
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += runs[i].error != nullptr ? runs[i].numel * sizeof(float) : 0;
  return bytes;
}

size_t block_bytes(const kernels::BlockCode& code, size_t numel) {
  return code_bytes(code, numel) + (code.offset ? 2 : 1) * scale_bytes(code, numel);
}

kernels::CodeKernels make_codes() {
  kernels::CodeKernels made = {};
  made.abi = kernels::kCodesAbi;
  made.size = sizeof made;
  made.sum_squares_with_error = [](const Launch&, const kernels::ErrorSum* runs, size_t count) {
    ran("sum_squares_with_error", numel_of(runs, count) * sizeof(float) + error_bytes(runs, count));
  };
  made.encode_signs = [](const Launch&, const kernels::SignRun* runs, size_t count) {
    const size_t numel = numel_of(runs, count);
    ran("encode_signs", numel * sizeof(float) + 2 * error_bytes(runs, count) + numel / 8);
  };
  made.decode_signs = [](const Launch&, const kernels::SignSum* runs, size_t count, float) {
    const size_t bits = parts_bytes(runs, count, [](size_t numel) { return (numel + 7) / 8; });
    ran("decode_signs", numel_of(runs, count) * sizeof(float) + bits);
  };
  made.encode_blocks = [](const Launch&, const kernels::BlockCode& code, DType values, const kernels::BlockRun* runs,
                          size_t count) {
    const size_t numel = numel_of(runs, count);
    ran("encode_blocks", numel * dtype_bytes(values) + block_bytes(code, numel) + 2 * error_bytes(runs, count));
  };
  made.decode_blocks = [](const Launch&, const kernels::BlockCode& code, DType out, const kernels::BlockSum* runs,
                          size_t count, float, bool add) {
    const size_t codes = parts_bytes(runs, count, [&](size_t numel) { return block_bytes(code, numel); });
    ran("decode_blocks", numel_of(runs, count) * dtype_bytes(out) * (add ? 2 : 1) + codes);
  };
  made.fake_quant = [](const Launch&, const kernels::FakeQuant&, DType dtype, void*, size_t numel) {
    const size_t bytes = numel * dtype_bytes(dtype);
    ran("fake_quant", bytes + bytes);
  };
  made.encode_floats = [](const Launch&, const kernels::FloatCode& code, DType dtype, const void*, size_t groups,
                          uint8_t*) {
    ran("encode_floats", groups * (code.group * dtype_bytes(dtype) + float_row(code)));
  };
  made.decode_floats = [](const Launch&, const kernels::FloatCode& code, const uint8_t*, size_t groups, DType dtype,
                          void*) {
    ran("decode_floats", groups * (code.group * dtype_bytes(dtype) + float_row(code)));
  };
  return made;
}

}  // namespace

const kernels::CodeKernels& meta_codes() {
  static const kernels::CodeKernels codes = make_codes();
  return codes;
}

const kernels::KernelTable& meta_kernels() {
  static const kernels::KernelTable table = make_table();
  return table;
}

}  // namespace ds::zero
