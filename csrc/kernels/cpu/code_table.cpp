// The CPU's tables of kernels/codes.h, one per instruction set: the choice among them is that of cpu/table.cpp.
#include "kernels/cpu/codes.h"
#include "kernels/cpu/entries.h"
#include "kernels/ref/codes.h"

namespace ds::kernels::cpu {
namespace {

IsaTables<CodeKernels> code_tables() {
  IsaTables<CodeKernels> all = {
      {kCodesAbi, sizeof(CodeKernels), &ref::sum_squares_with_error, &ref::encode_signs, &ref::decode_signs,
       &ref::encode_blocks, &ref::decode_blocks, &ref::fake_quant, &ref::encode_floats, &ref::decode_floats},
      {}};
  for (int i = 0; i < kIsaCount; ++i)
    all.by_isa[i] = {kCodesAbi,        sizeof(CodeKernels), kSumSquaresWithError[i], kEncodeSigns[i], kDecodeSigns[i],
                     kEncodeBlocks[i], kDecodeBlocks[i],    kFakeQuant[i],           &encode_floats,  &decode_floats};
  return all;
}

}  // namespace
}  // namespace ds::kernels::cpu

const ds::kernels::CodeKernels* ds_cpu_code_kernels_isa(uint32_t abi, const char* isa) {
  static const auto all = ds::kernels::cpu::code_tables();
  return abi == ds::kernels::kCodesAbi ? all.find(isa) : nullptr;
}
