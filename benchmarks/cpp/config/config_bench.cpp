// Reading and resolving a file that gives every key of the training configuration. Budget: 1 ms.
#include <benchmark/benchmark.h>

#include "base/error.h"
#include "config/render.h"

namespace ds::config {
namespace {

// Also the sections that are null when absent.
Value filled(const Field& section) {
  Value out = Value::object();
  for (const Field& field : section.fields) {
    if (!field.is_wildcard()) out[field.name] = field.is_section() ? filled(field) : default_of(field);
  }
  return out;
}

std::string full_file() {
  Value all = filled(schema(Root::kTraining).root);
  all["train_batch_size"] = 8;
  return all.dump(1);
}

void BM_ReadAndResolveEveryKey(benchmark::State& state) {
  const std::string text = full_file();
  size_t keys = 0;
  for (auto _ : state) {
    const Config config = resolve(read_text(text, "bench"), schema(Root::kTraining));
    if (config.values()["train_batch_size"] != 8) fail(ErrorKind::kRuntime, "wrong value");
    keys = config.document().lines.size();
    benchmark::DoNotOptimize(&config);
  }
  state.counters["keys"] = static_cast<double>(keys);
}
BENCHMARK(BM_ReadAndResolveEveryKey)->Unit(benchmark::kMicrosecond);

void BM_ReadEveryKey(benchmark::State& state) {
  const std::string text = full_file();
  for (auto _ : state) {
    const Document document = read_text(text, "bench");
    benchmark::DoNotOptimize(&document);
  }
}
BENCHMARK(BM_ReadEveryKey)->Unit(benchmark::kMicrosecond);

void BM_ReadAndResolveSmall(benchmark::State& state) {
  const std::string text =
      R"({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": true}})";
  for (auto _ : state) {
    const Config config = resolve(read_text(text, "bench"), schema(Root::kTraining));
    benchmark::DoNotOptimize(&config);
  }
}
BENCHMARK(BM_ReadAndResolveSmall)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace ds::config
