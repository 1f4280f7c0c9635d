#include "block.h"

#include <algorithm>
#include <numeric>

namespace cuda_on_cpu {
namespace {

thread_local std::unique_ptr<Machine> own_machine;
__attribute__((tls_model("initial-exec"))) thread_local Machine* here = nullptr;

std::string text(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }
bool same(Site a, Site b) { return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0); }
std::string hexadecimal(unsigned x) {
  char digits[16];
  std::snprintf(digits, sizeof digits, "0x%08x", x);
  return digits;
}

}  // namespace

Machine::Machine() {
  void* stacks = mmap(nullptr, kMostThreads * Fiber::kStack, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) std::perror("mmap of stacks"), std::abort();
  stacks_ = static_cast<char*>(stacks);
  threads_.reserve(kMostThreads);
  idle_.reserve(kMostThreads);
  watch_ = {&shared_, &log_, reinterpret_cast<uintptr_t>(stacks_), kMostThreads * Fiber::kStack,
            [](const char* text, const void* from) { here->fail(source_of(from) + ": a thread " + text); }};
}

Machine::~Machine() {
  fibers_.clear();
  munmap(stacks_, kMostThreads * Fiber::kStack);
}

Machine& Machine::own() {
  if (own_machine == nullptr) own_machine = std::make_unique<Machine>();
  here = own_machine.get();
  return *here;
}

std::string Machine::run(const Grid& grid, const std::function<void()>& body, Order order, uint64_t seed) {
  grid_ = grid, body_ = &body, order_ = order, error_.clear();
  std::vector<unsigned> blocks(grid.blocks);
  std::iota(blocks.begin(), blocks.end(), 0u);
  // Forward and reverse run any two blocks in different orders.
  random_.seed(static_cast<uint32_t>(seed));
  std::shuffle(blocks.begin(), blocks.end(), random_);
  if (order == Order::kReverse) std::reverse(blocks.begin(), blocks.end());
  random_.seed(static_cast<uint32_t>(seed * kOrders + static_cast<uint64_t>(order)));
  if (order >= Order::kRandom) std::shuffle(blocks.begin(), blocks.end(), random_);
  if (kThreadSanitizer) barriers_ = std::vector<Barriers>(grid.blocks);
  while (fibers_.size() < grid.threads) {
    fibers_.push_back(std::make_unique<Fiber>(stacks_ + fibers_.size() * Fiber::kStack));
    idle_.push_back(fibers_.back().get());
  }
  set_watch(&watch_);
  for (unsigned block : blocks) {
    run_block(block);
    if (!error_.empty()) break;
  }
  set_watch(nullptr);
  order_after(ended_);
  return error_;
}

void Machine::run_block(unsigned block) {
  threads_.clear();
  for (unsigned t = 0; t < grid_.threads; ++t) {
    Thread thread = {};
    thread.position = {{t}, {block}, {grid_.threads}, {grid_.blocks}};
    threads_.push_back(thread);
  }
  turns_.resize(grid_.threads);
  std::iota(turns_.begin(), turns_.end(), 0u);
  if (order_ == Order::kReverse) std::reverse(turns_.begin(), turns_.end());
  shared_.begin_block(grid_.shared);
  order_before(began_);  // what the host has done, which knows of no other block
  rotation_ = static_cast<unsigned>(random_());
  if (kThreadSanitizer) barrier_ = &barriers_[block];
  do {
    if (order_ >= Order::kRandom) std::shuffle(turns_.begin(), turns_.end(), random_);
    for (unsigned t : turns_)
      if (error_.empty() && threads_[t].state <= State::kReady) give_turn(threads_[t]);
  } while (error_.empty() && wake());
  if (error_.empty()) error_ = why_stuck();
  if (error_.empty()) return;
  for (Thread& thread : threads_)
    if (thread.fiber != nullptr) thread.fiber->abandon(), idle_.push_back(thread.fiber);
}

// The thread sanitizer takes what one fiber does for ordered, so there each thread has a fiber, another in each block.
// Else the one that was used last is the one whose stack is in the cache.
Fiber* Machine::fiber_for(const Thread& thread) {
  if (kThreadSanitizer) return fibers_[(thread.position.thread.x + rotation_ % grid_.threads) % grid_.threads].get();
  Fiber* fiber = idle_.back();
  idle_.pop_back();
  return fiber;
}

void Machine::give_turn(Thread& thread) {
  current_ = &thread;
  if (thread.state == State::kNew) {
    thread.fiber = fiber_for(thread);
    thread.fiber->set_entry(
        [](void* machine) {
          auto* self = static_cast<Machine*>(machine);
          order_after(self->began_);
          (*self->body_)();
          order_before(self->ended_);
        },
        this);
  }
  thread.state = State::kRunning;
  thread.fiber->resume();
  if (thread.state != State::kRunning) return;
  thread.state = State::kDone;
  if (!kThreadSanitizer) idle_.push_back(thread.fiber);
  thread.fiber = nullptr;
}

void Machine::suspend(State state, Site site) {
  current_->state = state;
  current_->site = site;
  order_before(ended_);  // if nobody resumes it
  current_->fiber->suspend();
}

void Machine::fail(std::string text) {
  error_ = text + " (" + name(*current_) + ")";
  for (;;) suspend(State::kReady, {"", 0});  // nobody resumes it
}

void Machine::wait_block(Site site) {
  const unsigned turn = block_turn_ % 2;
  if (kThreadSanitizer) order_before(barrier_->block[turn]);
  suspend(State::kAtBlock, site);
  if (kThreadSanitizer) order_after(barrier_->block[turn]);
}

uint64_t Machine::wait_warp(bool shuffles, unsigned mask, uint64_t bits, unsigned lane, Site site) {
  Thread& own = *current_;
  const unsigned number = own.position.thread.x, warp = number / kWarp, turn = warp_turn_[warp] % 2;
  if ((mask >> number % kWarp & 1) == 0)
    fail(text(site) + ": a lane waits for the lanes " + hexadecimal(mask) + ", to which it does not belong");
  if (shuffles && (mask >> lane & 1) == 0)
    fail(text(site) + ": a shuffle of the lanes " + hexadecimal(mask) + " asks lane " + std::to_string(lane) +
         ", which is none of them");
  own.mask = mask, own.bits = bits, own.lane = lane;
  if (kThreadSanitizer && !shuffles) order_before(barrier_->warp[warp][turn]);
  suspend(shuffles ? State::kAtShuffle : State::kAtSyncWarp, site);
  if (kThreadSanitizer && !shuffles) order_after(barrier_->warp[warp][turn]);
  return own.result;
}

void* Machine::shared_array(const void* declaration, size_t bytes, size_t alignment, Site site) {
  if (void* found = shared_.array(declaration, bytes, alignment)) return found;
  fail(text(site) + ": a block has " + std::to_string(kMostShared) + " bytes of shared memory, too few for all arrays");
}

bool Machine::wake_warp(size_t first) {
  bool woke = false;
  const size_t end = std::min<size_t>(first + kWarp, threads_.size());
  for (size_t t = first; t < end; ++t) {
    Thread& one = threads_[t];
    if (!at_warp(one)) continue;
    bool all = true;
    for (unsigned l = 0; l < kWarp && all; ++l) {
      if ((one.mask >> l & 1) == 0) continue;
      all = first + l < end && threads_[first + l].state == one.state && threads_[first + l].mask == one.mask &&
            same(threads_[first + l].site, one.site);
    }
    if (!all) continue;
    if (one.state == State::kAtSyncWarp) ++warp_turn_[first / kWarp];
    for (unsigned l = 0; l < kWarp; ++l) {
      if ((one.mask >> l & 1) == 0) continue;
      Thread& lane = threads_[first + l];
      lane.result = threads_[first + lane.lane].bits;
      lane.state = State::kReady;
    }
    woke = true;
  }
  return woke;
}

bool Machine::wake() {
  bool woke = false;
  for (size_t first = 0; first < threads_.size(); first += kWarp) woke = wake_warp(first) || woke;
  if (woke) return true;
  for (const Thread& thread : threads_)
    if (thread.state != State::kAtBlock || !same(thread.site, threads_[0].site)) return false;
  for (Thread& thread : threads_) thread.state = State::kReady;
  ++block_turn_;
  return true;
}

// Empty where all threads have returned. A warp that is stuck comes first: its block waits for it, too.
std::string Machine::why_stuck() const {
  for (const bool warp : {true, false}) {
    for (const Thread& one : threads_) {
      if (one.state == State::kDone || at_warp(one) != warp) continue;
      const unsigned first = warp ? one.position.thread.x / kWarp * kWarp : 0, count = warp ? kWarp : grid_.threads;
      const std::string whom = warp ? "the lanes " + hexadecimal(one.mask) : "its block";
      for (unsigned i = 0; i < count; ++i) {
        if (warp && (one.mask >> i & 1) == 0) continue;
        const std::string found = text(one.site) + ": " + name(one) + " waits for " + whom + ", of which " +
                                  (warp ? "lane " + std::to_string(i) : name(threads_[i])) + " ";
        if (first + i >= threads_.size()) return found + "does not exist";
        const Thread& other = threads_[first + i];
        if (other.state == State::kDone) return found + "has returned";
        if (other.state != one.state || !same(other.site, one.site))
          return found + "waits for its " + (at_warp(other) ? "warp" : "block") + " at " + text(other.site);
        if (warp && other.mask != one.mask) return found + "waits for the lanes " + hexadecimal(other.mask);
      }
    }
  }
  return "";
}

// ---- runtime.h ----
const Position& position() { return here->position(); }
void sync_block(Site site) { here->wait_block(site); }
void sync_warp(unsigned mask, Site site) { here->wait_warp(false, mask, 0, 0, site); }
uint64_t of_lane_bits(unsigned mask, uint64_t bits, unsigned lane, Site site) {
  return here->wait_warp(true, mask, bits, lane, site);
}
void* shared_array(const void* declaration, size_t bytes, size_t alignment, Site site) {
  return here->shared_array(declaration, bytes, alignment, site);
}
void* dynamic_shared() { return here->dynamic_shared(); }

}  // namespace cuda_on_cpu
