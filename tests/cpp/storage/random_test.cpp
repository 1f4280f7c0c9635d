// Random leases, prefetches and moves of several threads against plain arrays. An array is read and written only under
// a lease of the same elements, so that a sanitizer for threads sees it when leases do not exclude what they should.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>

#include "../on_threads.h"
#include "planes.h"
#include "storage/side_stream.h"

namespace ds::storage {
namespace {

struct Modelled {
  PlaneId id;
  std::vector<float> values;
  Cuts cuts;
};

Placement any_placement(std::mt19937& random, const std::string& folder) {
  Placement placement = at_rest(kMedia[random() % 3], folder);
  if (random() % 2) placement.host_share = static_cast<double>(random() % 5) / 4;
  if (placement.rest != Medium::kFile && random() % 3 == 0) {
    placement.folder = folder;
    placement.file_share = static_cast<double>(random() % 5) / 4;
  }
  if (random() % 2) placement.work = Medium::kHost;
  return placement;
}

plan::Range any_range(std::mt19937& random, const Modelled& plane) {
  const auto numel = static_cast<int64_t>(plane.values.size());
  if (random() % 3) {  // a block, mostly
    const size_t b = random() % plane.cuts.size();
    return {b == 0 ? 0 : plane.cuts[b - 1], plane.cuts[b]};
  }
  const auto a = static_cast<int64_t>(random() % (numel + 1)), b = static_cast<int64_t>(random() % (numel + 1));
  return {std::min(a, b), std::max(a, b)};
}

void work(ShardStorage& storage, std::vector<Modelled>& planes, const std::string& folder, unsigned seed, int steps) {
  std::mt19937 random(seed);
  for (int step = 0; step < steps; ++step) {
    Modelled& plane = planes[random() % planes.size()];
    const plan::Range range = any_range(random, plane);
    const Medium at = random() % 2 ? Medium::kDevice : Medium::kHost;
    switch (random() % 12) {
      case 0: storage.prefetch(plane.id, range, at); continue;
      case 1: storage.move(plane.id, any_placement(random, folder)); continue;
      case 2: {
        const Lease scratch = storage.scratch(range.numel(), at::kFloat, at);
        fill(scratch.data(), 5);
        continue;
      }
      case 3: random() % 2 ? storage.trim() : storage.settle(); continue;
      default: break;
    }
    const Access access = static_cast<Access>(random() % 3);
    const Lease lease = storage.acquire(plane.id, range, access, at);
    float* model = plane.values.data() + range.begin;
    if (access != Access::kWrite) {
      const at::Tensor here = lease.data().cpu();
      const float* data = here.data_ptr<float>();
      ASSERT_TRUE(std::equal(data, data + range.numel(), model)) << step;
    }
    if (access == Access::kRead) continue;
    const auto first = static_cast<float>(random() % 1000);
    fill(lease.data(), first);
    std::iota(model, model + range.numel(), first);
  }
}

// Runs that differ, and what threads do there. On the stand-in device the runs are repeated (standin_runs.cpp).
int on_cpu_or_standin(int on_cpu, int on_device) { return test_device().is_cpu() ? on_cpu : on_device; }

void run(int seed, int threads, int steps, Budget budget) {
  const io::Folder folder;
  ShardStorage storage(test_device(), std::move(budget));
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<Modelled> planes;
  for (const int64_t numel : {1, 1024, 5000, 12345}) {
    Modelled plane{{}, std::vector<float>(static_cast<size_t>(numel)), {}};
    for (int64_t cut = 0; cut < numel;) {
      cut = std::min<int64_t>(numel, cut + (random() % 3 ? 1024 : 1 + random() % 3000));
      plane.cuts.push_back(cut);
    }
    plane.id =
        storage.add("p" + std::to_string(numel), numel, at::kFloat, any_placement(random, folder.path()), plane.cuts);
    storage.acquire(plane.id, {0, numel}, Access::kWrite, Medium::kHost).data().zero_();
    planes.push_back(std::move(plane));
  }
  on_threads(threads, [&](int i) {
    const SideStream own(test_device());
    work(storage, planes, folder.path(), static_cast<unsigned>(seed * 100 + i), steps);
  });
  storage.settle();
  for (const Modelled& plane : planes) {
    const auto numel = static_cast<int64_t>(plane.values.size());
    const Lease lease = storage.acquire(plane.id, {0, numel}, Access::kRead, Medium::kHost);
    EXPECT_TRUE(std::equal(plane.values.begin(), plane.values.end(), lease.data().data_ptr<float>())) << numel;
  }
  storage.trim();
  const Usage usage = storage.usage();
  EXPECT_EQ(usage.leases, 0);
  int64_t resting = 0;
  for (const MediumUsage& medium : usage.media) {
    EXPECT_EQ(medium.scratch, 0) << medium.name;
    EXPECT_EQ(medium.idle, 0) << medium.name;
    resting += medium.resting;
  }
  EXPECT_EQ(resting, 4 * (1 + 1024 + 5000 + 12345));
  EXPECT_GT(usage.prefetch_hits, 0);
}

TEST(RandomLeases, OneThread) {
  for (int seed = 1; seed <= on_cpu_or_standin(4, 1); ++seed) run(seed, 1, on_cpu_or_standin(1500, 300), {});
}

TEST(RandomLeases, ManyThreads) {
  for (int seed = 11; seed <= on_cpu_or_standin(14, 11); ++seed) run(seed, 4, on_cpu_or_standin(500, 200), {});
}

TEST(RandomLeases, InATightBudget) {
  Budget budget;
  budget.bytes = {{Medium::kDevice, 40000}, {Medium::kHost, 30000}};
  budget.idle_scratch = 100000;
  // Few prefetches find room. With 200 steps on a busy machine none was hit.
  for (int seed = 21; seed <= on_cpu_or_standin(24, 21); ++seed) run(seed, 3, on_cpu_or_standin(500, 1000), budget);
}

}  // namespace
}  // namespace ds::storage
