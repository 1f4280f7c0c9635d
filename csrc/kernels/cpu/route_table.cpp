// The CPU's tables of kernels/routes.h, one per instruction set: the choice among them is that of cpu/table.cpp.
#include "kernels/cpu/entries.h"
#include "kernels/cpu/routes.h"
#include "kernels/ref/routes.h"

namespace ds::kernels::cpu {
namespace {

IsaTables<RouteKernels> route_tables() {
  IsaTables<RouteKernels> all = {{kRouteAbi, sizeof(RouteKernels), &ref::topk_gate, &ref::permute_rows,
                                  &ref::combine_rows, &ref::dot_rows, &ref::grouped_gemm},
                                 {}};
  for (int i = 0; i < kIsaCount; ++i)
    all.by_isa[i] = {kRouteAbi,       sizeof(RouteKernels), &topk_gate,     kPermuteRows[i],
                     kCombineRows[i], kDotRows[i],          kGroupedGemm[i]};
  return all;
}

}  // namespace
}  // namespace ds::kernels::cpu

const ds::kernels::RouteKernels* ds_cpu_route_kernels_isa(uint32_t abi, const char* isa) {
  static const auto all = ds::kernels::cpu::route_tables();
  return abi == ds::kernels::kRouteAbi ? all.find(isa) : nullptr;
}
