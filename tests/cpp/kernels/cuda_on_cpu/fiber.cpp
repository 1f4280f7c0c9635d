#include "fiber.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "sanitizers.h"

namespace cuda_on_cpu {

using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;

Fiber::Fiber(char* stack) : stack_(stack) {
  if (mprotect(stack_, kGuard, PROT_NONE) != 0) std::perror("mprotect of a fiber's stack"), std::abort();
  begin();
}

Fiber::~Fiber() { destroy_tsan_fiber(own_tsan_); }

void Fiber::begin() {
  own_ = make_fcontext(stack_ + kStack, kStack - kGuard, &Fiber::main);
  own_tsan_ = make_tsan_fiber();
}

void Fiber::abandon() {
  destroy_tsan_fiber(own_tsan_);
  unpoison(stack_ + kGuard, kStack - kGuard);
  own_fake_ = nullptr;
  begin();
}

void Fiber::main(Transfer from) {
  auto* self = static_cast<Fiber*>(from.data);
  self->arrived(from);
  for (;;) {
    self->entry_(self->argument_);
    self->suspend();
  }
}

void Fiber::arrived(Transfer from) {
  host_ = from.fctx;
  finish_switch(own_fake_, &host_bottom_, &host_size_);
}

void Fiber::resume() {
  void* host_fake = nullptr;
  start_switch(&host_fake, stack_ + kGuard, kStack - kGuard);
  host_tsan_ = switch_tsan_fiber(own_tsan_);
  own_ = jump_fcontext(own_, this).fctx;
  finish_switch(host_fake, nullptr, nullptr);
}

void Fiber::suspend() {
  start_switch(&own_fake_, host_bottom_, host_size_);
  switch_tsan_fiber(host_tsan_);
  arrived(jump_fcontext(host_, nullptr));
}

}  // namespace cuda_on_cpu
