#include "kernels.h"

#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "memory.h"

namespace standin {

namespace {

struct Kernel {
  const Operation& operation;
  c10::DeviceIndex device;
  std::vector<Access> touched;
  std::unordered_map<char*, bool> pages;  // opened, and whether to writes
  std::string wrong_device;

  std::string about(const char* what) const {
    return "kernel " + operation.name + " on standin:" + std::to_string(device) + what + ":\n" + operation.stack.text();
  }
};

thread_local Kernel* running = nullptr;
struct sigaction before;          // who had the signal
std::atomic<bool> ended = false;  // by a fault of the host

void touch(const Mapping& mapping, char* address, bool write) {
  char* page = address - (address - mapping.begin()) % static_cast<ptrdiff_t>(kPage);
  const bool was_written = running->pages[page];
  running->pages[page] = write || was_written;
  running->touched.push_back({address, address + 1, write});
  Mapping::protect(page, page + kPage, write || was_written ? PROT_READ | PROT_WRITE : PROT_READ);
  if (&mapping != &device_memory(running->device).mapping && &mapping != &pinned_memory().mapping)
    running->wrong_device = running->about(" touches memory of another device");
}

void on_fault(int signal, siginfo_t* info, void* context) {
  auto* address = static_cast<char*>(info->si_addr);
  const bool write = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
  const Mapping* mapping = mapping_of(address);
  if (mapping && running) return touch(*mapping, address, write);
  if (mapping == &pinned_memory().mapping) return pinned_memory().host_access(address, write);
  char text[128];
  const int length = std::snprintf(text, sizeof(text), "stand-in device: the host %s memory of %s at %p:\n",
                                   write ? "writes" : "reads", mapping ? "a device" : "nobody", info->si_addr);
  void* frames[32];
  if (::write(STDERR_FILENO, text, static_cast<size_t>(length)) == length)
    backtrace_symbols_fd(frames, backtrace(frames, 32), STDERR_FILENO);
  ended = true;
  sigaction(SIGSEGV, &before, nullptr);  // the access happens again, and ends the process
}

}  // namespace

void install_fault_handler() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if (ended || ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &on_fault)) return;
  before = now;
  struct sigaction ours {};
  ours.sa_sigaction = &on_fault;
  ours.sa_flags =
      SA_SIGINFO | SA_NODEFER;  // not on the stack for signals: Python's has few KiB, and stacks are told here
  sigaction(SIGSEGV, &ours, nullptr);
}

void kernel_used(std::vector<Access> accesses, const void* of_host) {
  running->touched = std::move(accesses);
  if (of_host) running->wrong_device = running->about(" writes memory of the host that is not pinned");
}

void run_kernel(const OperationPtr& operation, c10::DeviceIndex device, const std::function<void()>& kernel) {
  static auto* one_at_a_time = new std::mutex;  // a page that one kernel has opened would hide the access of another
  const std::lock_guard alone(*one_at_a_time);
  install_fault_handler();
  Kernel now{*operation, device, {}, {}, {}};
  const auto end = [&] {
    running = nullptr;
    for (const auto& [page, written] : now.pages)
      Mapping::protect(page, page + kPage, pinned_memory().mapping.holds(page) ? PROT_READ | PROT_WRITE : PROT_NONE);
    {
      const std::lock_guard lock(order().mutex);
      order().kernel_ended(operation, now.touched);
    }
    order().tell();
    if (!now.wrong_device.empty()) order().report(now.wrong_device);
  };
  running = &now;
  try {
    kernel();
  } catch (...) {
    end();
    throw;
  }
  end();
}

}  // namespace standin
