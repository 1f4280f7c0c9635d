// The CPU's tables of kernels/routes.h, one per instruction set: the choice among them is that of cpu/table.cpp.
#include <cstring>

#include "kernels/cpu/entries.h"
#include "kernels/cpu/routes.h"
#include "kernels/ref/routes.h"

namespace ds::kernels::cpu {
namespace {

struct RouteTables {
  RouteKernels ref = {kRouteAbi,          sizeof(RouteKernels), &ref::topk_gate,   &ref::permute_rows,
                      &ref::combine_rows, &ref::dot_rows,       &ref::grouped_gemm};
  RouteKernels by_isa[kIsaCount];

  RouteTables() {
    for (int i = 0; i < kIsaCount; ++i)
      by_isa[i] = {kRouteAbi,       sizeof(RouteKernels), &topk_gate,     kPermuteRows[i],
                   kCombineRows[i], kDotRows[i],          kGroupedGemm[i]};
  }
};

const RouteTables& route_tables() {
  static const RouteTables all;
  return all;
}

}  // namespace
}  // namespace ds::kernels::cpu

using namespace ds::kernels;

const RouteKernels* ds_cpu_route_kernels_isa(uint32_t abi, const char* isa) {
  if (abi != kRouteAbi) return nullptr;
  if (std::strcmp(isa, "ref") == 0) return &cpu::route_tables().ref;
  for (int i = 0; i < ds::kIsaCount; ++i) {
    const auto one = static_cast<ds::Isa>(i);
    if (std::strcmp(isa, ds::isa_name(one)) == 0 && cpu::built(one) && ds::cpu_has(one))
      return &cpu::route_tables().by_isa[i];
  }
  return nullptr;
}
