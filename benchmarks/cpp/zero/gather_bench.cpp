// The cost of gathers over collectives when each collective takes a while to arrive, as between hosts: a model of 200
// layers (a weight and a bias each) goes forward and backward on 2 and 4 ranks, which are threads; every collective
// ends 50 us after it was started. Beside each other: the learned order (zero/gathers/routes/scheduled_source.cpp), and
// what it has replaced, an agreement before each gather and a collective for each parameter. Limit: one collective
// after the other, 400 x 50 us = 20 ms, unless gathers overlap, which the prefetch of the next unit allows.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <unordered_map>

#include "base/error.h"
#include "comm/transports/thread_communicator.h"
#include "zero/gathers/shard_source.h"

namespace ds::zero {
namespace {

constexpr int kLayers = 200, kSteps = 5;
constexpr auto kLatency = std::chrono::microseconds(50);

// A collective of `inner` that ends not before kLatency has passed since it was started.
class SlowWork : public comm::Work {
 public:
  explicit SlowWork(comm::WorkPtr inner) : inner_(std::move(inner)) {}
  void wait() override {
    inner_->wait();
    while (std::chrono::steady_clock::now() < end_) std::this_thread::yield();
  }

 private:
  comm::WorkPtr inner_;
  std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + kLatency;
};

class Slow : public comm::Communicator {
 public:
  explicit Slow(comm::CommunicatorPtr inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return inner_->name(); }
  bool carries(const comm::Op&) const override { return true; }
  comm::PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }

 protected:
  comm::WorkPtr start(const comm::Op& op) override { return std::make_shared<SlowWork>(inner_->run(op)); }

 private:
  comm::CommunicatorPtr inner_;
};

std::vector<ShardedParam*> missing(const std::vector<ShardedParam*>& params) {
  std::vector<ShardedParam*> result;
  for (ShardedParam* param : params)
    if (!param->available() && std::find(result.begin(), result.end(), param) == result.end()) result.push_back(param);
  return result;
}

class AgreementForEachGather : public ShardSource {
 public:
  AgreementForEachGather(comm::CommunicatorPtr communicator, std::vector<ShardedParamPtr> params)
      : ShardSource(nullptr), communicator_(std::move(communicator)), params_(std::move(params)) {
    for (size_t i = 0; i < params_.size(); ++i) index_[params_[i].get()] = static_cast<int64_t>(i);
  }

  void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>& ahead, Values) override {
    at::NoGradGuard no_grad;
    std::vector<ShardedParam*> absent;
    for (ShardedParam* param : missing(params))
      if (!started_.count(param)) absent.push_back(param);
    for (size_t begin = 0; begin < absent.size(); begin += kWants) {
      std::vector<int64_t> wants;
      for (size_t i = begin; i < std::min(absent.size(), begin + kWants); ++i) wants.push_back(index_of(*absent[i]));
      for (ShardedParam* param : ahead)
        if (wants.size() < kWants && !param->available() && !started_.count(param)) wants.push_back(index_of(*param));
      round(wants);
    }
    for (ShardedParam* param : missing(params)) {
      const auto found = started_.find(param);
      found->second.work->wait();
      param->take_full(found->second.buffer);
      started_.erase(found);
    }
  }

  bool looks_ahead() const override { return true; }

  void forget_ahead() override {
    for (auto& [param, transfer] : started_) {
      transfer.work->wait();
    }
    started_.clear();
  }

  void drain() override {
    at::NoGradGuard no_grad;
    while (round({})) {
    }
  }

  void refresh(const std::vector<ShardedParam*>&, Values) override {}
  void before_write() override {
    drain();
    forget_ahead();
  }
  void after_write() override {}
  const char* name() const override { return "agreement for each gather"; }

 private:
  static constexpr size_t kWants = 32;  // of one rank in one round
  struct Transfer {
    at::Tensor buffer;
    comm::WorkPtr work;
  };

  int64_t index_of(const ShardedParam& param) const {
    const auto found = index_.find(&param);
    if (found == index_.end())
      fail(ErrorKind::kRuntime, "parameter '", param.name(), "' does not belong to this engine");
    return found->second;
  }

  // One round: everybody says what it wants, everybody helps. True when somebody wanted something.
  bool round(const std::vector<int64_t>& wants) {
    const auto row = static_cast<int64_t>(kWants);
    at::Tensor host = at::full({communicator_->size(), row}, -1, at::kLong);
    std::copy(wants.begin(), wants.end(), host.data_ptr<int64_t>() + communicator_->rank() * row);
    const at::Device device = params_.empty() ? at::Device(at::kCPU) : params_[0]->shard().device();
    const at::Tensor shared = host.to(device);
    communicator_->all_gather(shared.select(0, communicator_->rank()), shared, "what ranks want to gather")->wait();
    ++exchanges_;
    host = shared.to(at::kCPU);
    std::vector<int64_t> all(host.data_ptr<int64_t>(), host.data_ptr<int64_t>() + host.numel());
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    if (!all.empty() && all.front() < 0) all.erase(all.begin());
    std::vector<Transfer> for_others;
    for (int64_t index : all) {
      ShardedParam& param = *params_[index];
      Transfer transfer{buffers_.take(param.padded_numel(), param.dtype(), param.shard().device()), nullptr};
      ++collectives_;
      transfer.work = communicator_->all_gather(param.shard(), transfer.buffer, param.name());
      if (std::find(wants.begin(), wants.end(), index) != wants.end()) {
        gathered_ += param.padded_numel() - param.slice_numel();
        started_[&param] = transfer;
      } else {
        for_others.push_back(transfer);
      }
    }
    for (const Transfer& transfer : for_others) {
      transfer.work->wait();
    }
    return !all.empty();
  }

  comm::CommunicatorPtr communicator_;
  std::vector<ShardedParamPtr> params_;
  std::unordered_map<const ShardedParam*, int64_t> index_;
  std::unordered_map<const ShardedParam*, Transfer> started_;
};

struct Figures {
  double ms = 0;  // of a step that repeats the one before
  int64_t collectives = 0, exchanges = 0;
};

Figures train(int world, bool scheduled) {
  auto comms = comm::thread_communicators(world);
  Figures found;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back([&, rank] {
      std::vector<at::Tensor> tensors;
      std::vector<ShardedParamPtr> params;
      for (int i = 0; i < 2 * kLayers; ++i) {
        tensors.push_back(at::ones({i % 2 ? 64 : 4096}));
        params.push_back(std::make_shared<ShardedParam>(tensors.back(), "p" + std::to_string(i), world, rank));
        params.back()->release();
      }
      const auto slow = std::make_shared<Slow>(comms[rank]);
      const auto memory = std::make_shared<storage::ShardStorage>(c10::Device(at::kCPU));
      const ShardSourcePtr source = scheduled ? scheduled_source(params, {{slow, params, nullptr}}, memory)
                                              : std::make_shared<AgreementForEachGather>(slow, params);
      const auto unit = [&](int layer) {
        return std::vector<ShardedParam*>{params[2 * layer].get(), params[2 * layer + 1].get()};
      };
      std::vector<double> times;
      for (int step = 0; step < kSteps + 2; ++step) {
        source->reset_counters();
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < 2 * kLayers; ++i) {
          const int layer = i < kLayers ? i : 2 * kLayers - 1 - i;
          const int next = i + 1 < kLayers ? i + 1 : std::max(2 * kLayers - 2 - i, 0);
          source->gather(unit(layer), step > 0 ? unit(next) : std::vector<ShardedParam*>{});
          for (ShardedParam* param : unit(layer)) param->release();
        }
        source->forget_ahead();
        source->drain();
        times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
      }
      if (rank > 0) return;
      std::sort(times.begin() + 2, times.end());
      found = {times[2 + kSteps / 2], source->collectives(), source->exchanges()};
    });
  }
  for (auto& rank : ranks) rank.join();
  return found;
}

void gathers(benchmark::State& state) {
  std::vector<double> ratios;
  Figures before, after;
  for (auto _ : state) {
    before = train(static_cast<int>(state.range(0)), false);
    after = train(static_cast<int>(state.range(0)), true);
    ratios.push_back(before.ms / after.ms);
  }
  std::sort(ratios.begin(), ratios.end());
  state.counters["before_ms"] = before.ms;
  state.counters["after_ms"] = after.ms;
  state.counters["times_faster"] = ratios[ratios.size() / 2];
  state.counters["collectives_before"] = static_cast<double>(before.collectives);
  state.counters["collectives_after"] = static_cast<double>(after.collectives);
  state.counters["exchanges_before"] = static_cast<double>(before.exchanges);
  state.counters["exchanges_after"] = static_cast<double>(after.exchanges);
}
BENCHMARK(gathers)->ArgName("ranks")->Arg(2)->Arg(4)->Iterations(5)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ds::zero
