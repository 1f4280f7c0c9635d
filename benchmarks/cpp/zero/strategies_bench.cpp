// The time for which a step makes the training wait when masters and states rest in slow memory, as they would behind a
// slow bus: plain offload, buckets stepped ahead (SuperOffload), and ZenFlow. A model of 24 layers on a device that is
// busy for a while with each (a pause: it takes no core); memory in which masters and states rest moves a given number
// of bytes a second. Bounds asked for: ahead hides 0.8 of the host's step, with clipping on; ZenFlow waits at most 0.2
// of plain offload.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <benchmark/benchmark.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "comm/transports/thread_communicator.h"
#include "storage/tier.h"
#include "zero/engine.h"

namespace ds::zero {
namespace {

constexpr int kLayers = 24, kSteps = 8, kWarmUp = 3;
constexpr int64_t kSide = 128;
constexpr auto kPause = std::chrono::milliseconds(12);  // of the device, for the backward of a layer
constexpr double kBytesPerMs = 60000;

// One bus: what moves takes its turn.
class SlowPart : public storage::Part {
 public:
  explicit SlowPart(const storage::PartSpec& spec) {
    for (int64_t bytes : spec.block_bytes) blocks_.emplace_back(bytes, 0);
  }
  void read(size_t block, char* data) override {
    pause(blocks_[block].size());
    std::copy(blocks_[block].begin(), blocks_[block].end(), data);
  }
  void write(size_t block, char* data) override {
    pause(blocks_[block].size());
    std::copy(data, data + blocks_[block].size(), blocks_[block].begin());
  }

 private:
  void pause(size_t bytes) {
    const std::lock_guard turn(bus_);
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(static_cast<double>(bytes) / kBytesPerMs));
  }
  std::mutex bus_;
  std::vector<std::vector<char>> blocks_;
};
class SlowTier : public storage::Tier {
 public:
  std::unique_ptr<storage::Part> open(const storage::PartSpec& spec) override {
    return std::make_unique<SlowPart>(spec);
  }
};
const storage::TierRegistration slow("slow", [](const storage::TierContext&) -> std::unique_ptr<storage::Tier> {
  return std::make_unique<SlowTier>();
});

struct Times {
  double step_ms = 0, whole_ms = 0;  // of step() alone; of forward, backward and step
  std::map<std::string, double> figures;
};

Times train(const std::string& strategy) {
  std::vector<at::Tensor> weights;
  std::vector<ParamSpec> specs;
  for (int i = 0; i < kLayers; ++i) {
    weights.push_back(at::full({kSide, kSide}, 0.01 * (i + 1)).to(at::kBFloat16).set_requires_grad(true));
    specs.push_back({weights[i], "w" + std::to_string(i), 0, i});
    weights[i].register_hook([](const at::Tensor& grad) -> at::Tensor {
      std::this_thread::sleep_for(kPause);
      return grad;
    });
  }
  EngineOptions options;
  options.policy = stage_policy(2);
  options.placements.master.rest = options.placements.slot.rest = storage::medium_named("slow");
  if (strategy != "zenflow") options.placements.grad.rest = storage::Medium::kHost;
  options.strategy = strategy;
  options.step.zenflow.topk_ratio = 0.05;
  options.step.zenflow.update_interval = 4;
  options.step.zenflow.overlap = true;
  options.reducer.bucket_numel = 1;  // a bucket for each layer
  const auto spaces = std::make_shared<MeshSpaces>(comm::ProcessMesh::alone(), options.policy, specs);
  auto engine = std::make_shared<Engine>(specs, std::vector<ShardedParamPtr>{}, options, spaces);
  const optim::Rule& rule = optim::find_rule("adam");
  engine->set_rules({&rule});
  StepInputs inputs;
  inputs.max_norm = 1.0f;
  inputs.check = true;
  inputs.hyper.resize(1);
  for (const auto& one : rule.hyper) inputs.hyper[0].push_back(one.fallback);
  Times times;
  for (int step = 0; step < kWarmUp + kSteps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& weight : weights) loss = loss + weight.to(at::kFloat).mean() * 1e-3;
    engine->strategy().expect(inputs);
    engine->backward().begin(true);
    loss.backward();
    engine->backward().end();
    const auto middle = std::chrono::steady_clock::now();
    engine->step(inputs);
    const auto end = std::chrono::steady_clock::now();
    if (step < kWarmUp) continue;
    times.step_ms += std::chrono::duration<double, std::milli>(end - middle).count() / kSteps;
    times.whole_ms += std::chrono::duration<double, std::milli>(end - begin).count() / kSteps;
  }
  times.figures = engine->strategy().figures();
  return times;
}

void strategies(benchmark::State& state) {
  Times plain, ahead, flow;
  for (auto _ : state) {
    plain = train("plain");
    ahead = train("speculative");
    flow = train("zenflow");
  }
  state.counters["plain_step_ms"] = plain.step_ms;
  state.counters["ahead_step_ms"] = ahead.step_ms;
  state.counters["zenflow_step_ms"] = flow.step_ms;
  state.counters["ahead_hides"] = 1.0 - ahead.step_ms / plain.step_ms;
  state.counters["zenflow_waits"] = flow.step_ms / plain.step_ms;
  state.counters["plain_whole_ms"] = plain.whole_ms;
  state.counters["ahead_whole_ms"] = ahead.whole_ms;
  state.counters["zenflow_whole_ms"] = flow.whole_ms;
  state.counters["undone"] = ahead.figures.at("buckets undone");
}
BENCHMARK(strategies)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ds::zero
