// A library for LD_PRELOAD: libcpuinfo says that this processor has no AVX-512.
//
// `make test-cpu CPU=avx2` uses it. torch 1.13 gives 16-bit matrix products to oneDNN where libcpuinfo reports AVX-512,
// and DNNL_MAX_CPU_ISA=AVX2 makes oneDNN refuse them. A processor without AVX-512 reports none, so torch computes them
// itself.
#include <cpuinfo.h>
#include <dlfcn.h>

#include <initializer_list>

namespace {

bool hide() {
  // libtorch loads libcpuinfo, possibly out of sight of other libraries, so RTLD_NEXT does not find it.
  void* library = dlopen("libcpuinfo.so.0", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return false;
  auto* initialize = reinterpret_cast<bool (*)()>(dlsym(library, "cpuinfo_initialize"));
  auto* isa = static_cast<cpuinfo_x86_isa*>(dlsym(library, "cpuinfo_isa"));
  if (initialize == nullptr || isa == nullptr || !initialize()) return false;
  for (bool* flag :
       {&isa->avx512f, &isa->avx512pf, &isa->avx512er, &isa->avx512cd, &isa->avx512dq, &isa->avx512bw, &isa->avx512vl,
        &isa->avx512ifma, &isa->avx512vbmi, &isa->avx512vbmi2, &isa->avx512bitalg, &isa->avx512vpopcntdq,
        &isa->avx512vnni, &isa->avx512bf16, &isa->avx512vp2intersect, &isa->avx512_4vnniw, &isa->avx512_4fmaps})
    *flag = false;
  return true;
}

}  // namespace

// The function of libcpuinfo that every caller calls before it asks for an instruction set. Returns whether it
// succeeded.
extern "C" __attribute__((visibility("default"))) bool cpuinfo_initialize() {
  static const bool done = hide();
  return done;
}
