// A stack of its own for one CUDA thread, and the switch to it and back.
#pragma once
#include <sys/mman.h>

#include <boost/context/detail/fcontext.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "sanitizers.h"

namespace cuda_on_cpu {

class Fiber {
 public:
  static constexpr size_t kGuard = 4 << 10, kStack = 33 * kGuard;

  // `stack`: kStack bytes, of which the first kGuard are made inaccessible.
  explicit Fiber(char* stack) : stack_(stack) {
    if (mprotect(stack_, kGuard, PROT_NONE) != 0) std::perror("mprotect of a fiber's stack"), std::abort();
    begin();
  }
  ~Fiber() { CUDA_ON_CPU_THREAD_CALL(__tsan_destroy_fiber(tsan_)); }
  Fiber(const Fiber&) = delete;

  // The function that the next resume() begins.
  void set_entry(void (*entry)(void*), void* argument) { entry_ = entry, argument_ = argument; }
  // On the host's thread: goes on until the entry suspends or returns.
  void resume() {
    [[maybe_unused]] void* fake = nullptr;
    CUDA_ON_CPU_ADDRESS_CALL(__sanitizer_start_switch_fiber(&fake, stack_ + kGuard, kStack - kGuard));
    CUDA_ON_CPU_THREAD_CALL(host_tsan_ = __tsan_get_current_fiber());
    CUDA_ON_CPU_THREAD_CALL(__tsan_switch_to_fiber(tsan_, __tsan_switch_to_fiber_no_sync));
    own_ = boost::context::detail::jump_fcontext(own_, this).fctx;
    CUDA_ON_CPU_ADDRESS_CALL(__sanitizer_finish_switch_fiber(fake, nullptr, nullptr));
  }
  // On the fiber: back to where resume() was called.
  void suspend() {
    CUDA_ON_CPU_ADDRESS_CALL(__sanitizer_start_switch_fiber(&fake_, bottom_, size_));
    CUDA_ON_CPU_THREAD_CALL(__tsan_switch_to_fiber(host_tsan_, __tsan_switch_to_fiber_no_sync));
    arrived(boost::context::detail::jump_fcontext(host_, nullptr));
  }
  // Forgets an entry that has not returned. Nothing on its stack is destroyed.
  void abandon() {
    CUDA_ON_CPU_THREAD_CALL(__tsan_destroy_fiber(tsan_));
    unpoison(stack_ + kGuard, kStack - kGuard);
    begin();
  }

 private:
  using Transfer = boost::context::detail::transfer_t;

  void begin() {
    // The tops of stacks would else share few sets of the caches, and a switch would wait for memory.
    const size_t colour = reinterpret_cast<uintptr_t>(stack_) / kStack * 192 % kGuard;
    own_ = boost::context::detail::make_fcontext(stack_ + kStack - colour, kStack - kGuard - colour, [](Transfer from) {
      auto* self = static_cast<Fiber*>(from.data);
      for (self->arrived(from);; self->suspend()) self->entry_(self->argument_);
    });
    fake_ = nullptr;
    CUDA_ON_CPU_THREAD_CALL(tsan_ = __tsan_create_fiber(0));
  }
  void arrived(Transfer from) {
    host_ = from.fctx;
    CUDA_ON_CPU_ADDRESS_CALL(__sanitizer_finish_switch_fiber(fake_, &bottom_, &size_));
  }

  char* stack_;
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  boost::context::detail::fcontext_t own_ = nullptr, host_ = nullptr;
  void *fake_ = nullptr, *tsan_ = nullptr, *host_tsan_ = nullptr;  // of the sanitizers, as is the host's stack:
  const void* bottom_ = nullptr;
  size_t size_ = 0;
};

}  // namespace cuda_on_cpu
