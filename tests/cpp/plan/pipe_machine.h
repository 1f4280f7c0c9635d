// Runs a plan of a pipeline with numbers instead of tensors, as an engine would: buffers, bounded streams of messages,
// ranks one after the other or as threads. Knows nothing of how plans are checked.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plan/pipe_plan.h"

namespace ds::plan {

class PipeMachine {
 public:
  PipeMachine(const PipePlan& plan, int send_bound) : plan_(plan), bound_(static_cast<size_t>(send_bound)) {
    for (int buffers : plan.buffers) ranks_.push_back(Rank{0, std::vector<Buffer>(buffers), {}, {}});
  }

  // "" or what went wrong.
  std::string run() {
    for (bool moved = true; moved && error_.empty();) {
      moved = false;
      for (size_t rank = 0; rank < ranks_.size(); ++rank)
        while (step(static_cast<int>(rank))) moved = true;
    }
    return result();
  }

  std::string run_as_threads(unsigned seed) {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      threads.emplace_back([this, rank, seed] {
        std::mt19937 random(seed + static_cast<unsigned>(rank));
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        std::unique_lock lock(mutex_);
        while (!ended(rank)) {
          if (!step(static_cast<int>(rank)) && changed_.wait_until(lock, until) == std::cv_status::timeout)
            wrong("rank " + std::to_string(rank) + " has waited for 20 s");
          if (!error_.empty()) break;
          changed_.notify_all();
          lock.unlock();
          if (random() % 8 == 0) std::this_thread::yield();
          lock.lock();
        }
        changed_.notify_all();
      });
    for (std::thread& thread : threads) thread.join();
    return result();
  }

 private:
  using Value = std::pair<int, int>;  // micro-batch, the part that made it
  struct Buffer {
    Value input{-1, -1}, output{-1, -1}, output_grad{-1, -1}, input_grad{-1, -1};
  };
  struct Rank {
    size_t next;
    std::vector<Buffer> buffers;
    std::map<std::pair<int, int>, int> where;  // micro-batch, chunk: its buffer
    std::map<std::pair<int, int>, std::vector<PipeOp>> did;
  };
  using Stream = std::pair<std::pair<int, int>, bool>;  // from, to, gradients

  bool ended(size_t rank) const { return ranks_[rank].next == plan_.ranks[rank].size(); }
  void wrong(const std::string& what) {
    if (error_.empty()) error_ = what;
  }

  std::string result() {
    const PipeShape& shape = plan_.shape;
    for (size_t rank = 0; rank < ranks_.size() && error_.empty(); ++rank) {
      if (!ended(rank)) wrong("rank " + std::to_string(rank) + " waits at step " + std::to_string(ranks_[rank].next));
      for (int micro = 0; micro < shape.micro_batches; ++micro)
        for (int chunk = 0; chunk < shape.chunks; ++chunk) {
          const auto& did = ranks_[rank].did[{micro, chunk}];
          const std::vector<PipeOp> forward{PipeOp::kForward}, whole{PipeOp::kForward, PipeOp::kBackward},
              split{PipeOp::kForward, PipeOp::kBackwardInput, PipeOp::kBackwardWeight};
          if (plan_.trains ? did != whole && did != split : did != forward) wrong("passes are not what they should be");
        }
    }
    for (const auto& stream : streams_)
      if (!stream.second.empty()) wrong("a message was not received");
    return error_;
  }

  // Runs the next instruction of a rank; false: it has to wait, or there is none.
  bool step(int rank) {
    if (!error_.empty() || ended(rank)) return false;
    const PipeShape& shape = plan_.shape;
    const PipeAct& act = plan_.ranks[rank][ranks_[rank].next];
    Rank& me = ranks_[rank];
    if (act.micro < 0 || act.micro >= shape.micro_batches || act.chunk < 0 || act.chunk >= shape.chunks ||
        act.buffer < 0 || act.buffer >= static_cast<int>(me.buffers.size()) ||
        (!computes(act.op) && (act.peer < 0 || act.peer >= shape.stages)))
      return wrong("a number is out of range"), false;
    Buffer& buffer = me.buffers[act.buffer];
    const int stage = shape.virtual_stage(rank, act.chunk);
    const Value own{act.micro, stage}, before{act.micro, stage - 1}, after{act.micro, stage + 1};
    const bool first = stage == 0, last = stage + 1 == shape.virtual_stages();
    if (!computes(act.op)) {
      const bool grad = act.op == PipeOp::kSendGrad || act.op == PipeOp::kRecvGrad;
      const auto ends = sends(act.op) ? std::make_pair(rank, act.peer) : std::make_pair(act.peer, rank);
      auto& stream = streams_[{ends, grad}];
      if (sends(act.op)) {
        if (stream.size() >= bound_) return false;
        const Value value = grad ? buffer.input_grad : buffer.output;
        if (value != own) wrong("sends what it has not made");
        stream.push_back(value);
      } else {
        if (stream.empty()) return false;
        if (stream.front() != (grad ? after : before)) wrong("receives what another instruction wants");
        if (grad)
          buffer.output_grad = stream.front();
        else
          (buffer = Buffer{}).input = stream.front();
        stream.pop_front();
      }
    } else {
      me.did[{act.micro, act.chunk}].push_back(act.op);
      const auto local = [&](int other) -> Buffer* {
        const auto found = me.where.find({act.micro, shape.chunk_of(other)});
        return found == me.where.end() ? nullptr : &me.buffers[found->second];
      };
      if (act.op == PipeOp::kForward) {
        if (first || shape.rank_of(stage - 1) == rank) {
          const Buffer* from = first ? nullptr : local(stage - 1);
          if (!first && (!from || from->output != before)) wrong("reads another part's output that is not there");
          if (from == &buffer) wrong("writes into what it reads");
          (buffer = Buffer{}).input = before;
        }
        if (buffer.input != before) wrong("has no input");
        buffer.output = own;
        me.where[{act.micro, act.chunk}] = act.buffer;
      } else if (act.op == PipeOp::kBackwardWeight) {
        if (buffer.output != own || buffer.input_grad != own) wrong("has nothing to make gradients of weights of");
      } else {
        if (!last && shape.rank_of(stage + 1) == rank) {
          const Buffer* from = local(stage + 1);
          if (!from || from->input_grad != after) wrong("reads a gradient that is not there");
        } else if (!last && buffer.output_grad != after) {
          wrong("has no gradient of its output");
        }
        if (buffer.output != own || !plan_.trains) wrong("has no activations");
        buffer.input_grad = own;
      }
    }
    ++me.next;
    return true;
  }

  const PipePlan plan_;
  const size_t bound_;
  std::vector<Rank> ranks_;
  std::map<Stream, std::deque<Value>> streams_;
  std::string error_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace ds::plan
