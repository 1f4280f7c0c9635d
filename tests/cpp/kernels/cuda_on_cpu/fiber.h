// A stack of its own for one CUDA thread, and the switch to it and back.
#pragma once
#include <boost/context/detail/fcontext.hpp>
#include <cstddef>

namespace cuda_on_cpu {

class Fiber {
 public:
  static constexpr size_t kStack = 128 << 10, kGuard = 4 << 10;

  // `stack`: kStack bytes, of which the first kGuard are made inaccessible.
  explicit Fiber(char* stack);
  ~Fiber();
  Fiber(const Fiber&) = delete;

  // What the next resume() begins.
  void set_entry(void (*entry)(void*), void* argument) { entry_ = entry, argument_ = argument; }
  // On the host's thread: goes on until the entry suspends or returns.
  void resume();
  // On the fiber: back to where resume() was called.
  void suspend();
  // Forgets an entry that has not returned. Nothing on its stack is destroyed.
  void abandon();

 private:
  using Transfer = boost::context::detail::transfer_t;
  static void main(Transfer from);
  void begin();
  void arrived(Transfer from);

  char* stack_;
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  boost::context::detail::fcontext_t own_ = nullptr, host_ = nullptr;
  // Of the sanitizers.
  void *own_fake_ = nullptr, *host_tsan_ = nullptr, *own_tsan_ = nullptr;
  const void* host_bottom_ = nullptr;
  size_t host_size_ = 0;
};

}  // namespace cuda_on_cpu
