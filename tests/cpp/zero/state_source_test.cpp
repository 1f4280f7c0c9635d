// A checkpoint reads states in files row by row: the bytes of the whole, and never more than a row.
#include "zero/states/state_source.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "../error_of.h"
#include "../storage/planes.h"
#include "comm/transports/thread_communicator.h"
#include "plain_adamw.h"
#include "small_engine.h"
#include "trained_ranks.h"
#include "zero/engine.h"
#include "zero/states/group_cut.h"

namespace ds::zero {
namespace {

TEST(StateSource, BringsRowsAsTheyAreWritten) {
  const io::Folder folder;
  constexpr int kWeights = 12;
  constexpr int64_t kNumel = 3001;  // padded to a multiple of 64
  std::vector<at::Tensor> weights;
  for (int i = 0; i < kWeights; ++i)
    weights.push_back((at::arange(kNumel, at::kFloat) + i * kNumel).to(at::kBFloat16).set_requires_grad(true));
  EngineOptions options;
  options.policy = stage_policy(2);
  const storage::Placement file = at_rest(storage::Medium::kFile, folder.path());
  options.placements = {file, file, file};
  options.reducer.bucket_numel = 4 * kNumel;  // several pieces in a row
  options.swapping.buffer_count = 4;
  options.swapping.reads_ahead = options.swapping.writes_behind = false;
  const auto engine = engine_of(specs_of(weights), options);
  use_adam(*engine);
  GroupCut cut(engine->params(), engine->states(), 0);
  for (const StateKind kind : {StateKind::kMaster, StateKind::kSlot}) {
    if (kind == StateKind::kSlot)
      for (int i = 0; i < kWeights; ++i)
        engine->states().set_full(kind, 0, i, at::arange(kNumel, at::kFloat) / (i + 1));
    const at::Tensor whole = cut.partition(engine->states().pieces(kind, 0, /*copies=*/true));
    const int64_t numel = kind == StateKind::kMaster ? cut.owned() : cut.size();
    const auto source = cut.source(engine, kind, 0, numel);
    ASSERT_TRUE(source);
    ASSERT_EQ(source->bytes(), static_cast<uint64_t>(numel) * 4);
    EXPECT_FALSE(source->in_place());
    std::string bytes;
    io::Staging staging;
    source->each(staging, [&](const void* data, uint64_t count) {
      EXPECT_LE(count, static_cast<uint64_t>(engine->params().largest_row()) * 4);
      bytes.append(static_cast<const char*>(data), count);
    });
    ASSERT_EQ(bytes.size(), source->bytes());
    EXPECT_EQ(std::memcmp(bytes.data(), whole.data_ptr(), bytes.size()), 0);
    for (const auto& [begin, end] : {std::make_pair(0, 1), std::make_pair(4093, 25003), std::make_pair(30001, 30002)}) {
      std::string part(static_cast<size_t>(end - begin), 'x');
      source->copy_range(part.data(), begin, end);
      EXPECT_EQ(part, bytes.substr(begin, part.size())) << begin;
    }
  }
  // Buffers of one bucket, and what a caller holds of the whole is his own.
  engine->params().storage()->settle();
  const storage::Usage usage = engine->params().storage()->usage();
  EXPECT_LE(usage[1].peak, engine->params().largest_row() * 4 * 5 + 10 * 4096);
  EXPECT_EQ(usage.leases, 0);
  EXPECT_GT(folder.entries(), 0u);
  engine->release();
  EXPECT_EQ(folder.entries(), 0u) << "files go with the engine, whoever holds it";
}

// ---- several ranks ------------------------------------------------------------------------------------------------

struct Given {
  at::ScalarType type = at::kBFloat16;
  bool transposed = false;
  int64_t numel = 9000;    // of a weight
  std::string order = {};  // of faults on rank 1
};

std::string bytes_of(const io::ByteSource& source) {
  std::string bytes;
  io::Staging staging;
  source.each(staging, [&](const void* data, uint64_t count) { bytes.append(static_cast<const char*>(data), count); });
  return bytes;
}

// The failures of each rank: "" where its partitions are those that GroupCut::partition puts together in memory.
std::vector<std::string> saved(int world, const Given& given) {
  constexpr int kWeights = 7;
  const io::Folder folder;
  const auto comms = comm::thread_communicators(world);
  return on_ranks<std::string>(world, [&](int rank) -> std::string {
    std::vector<at::Tensor> weights;
    std::vector<ParamSpec> specs;
    for (int i = 0; i < kWeights; ++i) {
      const int64_t numel = i == 3 ? 10 : given.numel + i;
      at::Tensor weight = values(i, {2, numel / 2}).to(given.type);
      if (given.transposed && i == 2) weight = weight.t();
      weights.push_back(weight.detach().set_requires_grad(true));
      specs.push_back({weights[i], "w" + std::to_string(i), i / 5, i});
    }
    EngineOptions options;
    options.policy = stage_policy(1 + world % 2);
    const storage::Placement file = at_rest(storage::Medium::kFile, folder / ("rank" + std::to_string(rank)));
    std::filesystem::create_directory(file.folder);
    options.placements = {file, {}, file};
    options.files.files = std::make_shared<io::Files>();
    options.reducer.bucket_numel = 3 * given.numel;
    options.swapping.buffer_count = 4;
    const auto engine = engine_of(specs, options, {comms[rank]});
    use_adam(*engine, 2);
    for (int i = 0; i < kWeights; ++i)
      for (int slot = 0; slot < 2; ++slot)
        engine->states().set_full(StateKind::kSlot, slot, i, values(10 * slot + i, weights[i].sizes()).contiguous());
    engine->params().storage()->settle();
    comms[rank]->barrier();
    if (rank == 1) options.files.files->inject(given.order);
    if (!given.order.empty()) {
      GroupCut cut(engine->params(), engine->states(), 0);
      const std::string text = failure_of<io::FileError>([&] { cut.source(engine, StateKind::kSlot, 1, cut.size()); });
      comms[rank]->barrier();
      return text;
    }
    const auto count = [&] { return std::distance(std::filesystem::directory_iterator(file.folder), {}); };
    const auto entries = count();
    for (int group = 0; group < 2; ++group) {
      GroupCut cut(engine->params(), engine->states(), group);
      for (const StateKind kind : {StateKind::kMaster, StateKind::kSlot}) {
        const auto source = cut.source(engine, kind, 0, kind == StateKind::kMaster ? cut.owned() : cut.size());
        if (!source) return "no source";
        if (count() != entries) return "a file is left while it is read";
        const std::string bytes = bytes_of(*source);
        const at::Tensor whole = cut.partition(engine->states().pieces(kind, 0, /*copies=*/true));
        if (bytes != std::string(static_cast<const char*>(whole.data_ptr()), bytes.size())) return "other bytes";
        if (bytes.size() != source->bytes()) return "not all bytes";
        std::string part(bytes.size() / 2, 'x');
        const size_t from = part.size() / 3;
        source->copy_range(part.data(), from, from + part.size());
        if (part != bytes.substr(from, part.size())) return "other bytes of a part";
      }
    }
    return "";
  });
}

TEST(StateSource, PartitionsOfSeveralRanksAreThoseInMemory) {
  for (int world = 1; world <= 4; ++world) {
    for (const Given& given : {Given{}, Given{at::kFloat}, Given{at::kDouble}, Given{at::kBFloat16, true}})
      for (const std::string& text : saved(world, given)) EXPECT_EQ(text, "") << world << " " << given.type;
  }
}

// The planes are larger than what is in memory on the way to a checkpoint.
TEST(StateSource, SavesOfSeveralRanksHoldAFewRows) {
  constexpr int kWorld = 2, kWeights = 24;
  constexpr int64_t kNumel = 1 << 16;
  const io::Folder folder;
  const auto comms = comm::thread_communicators(kWorld);
  on_ranks<int>(kWorld, [&](int rank) {
    std::vector<at::Tensor> weights;
    for (int i = 0; i < kWeights; ++i) weights.push_back(values(i, {kNumel}).to(at::kBFloat16).set_requires_grad(true));
    EngineOptions options;
    options.policy = stage_policy(2);
    const storage::Placement file = at_rest(storage::Medium::kFile, folder / ("rank" + std::to_string(rank)));
    std::filesystem::create_directory(file.folder);
    options.placements = {file, file, file};
    options.reducer.bucket_numel = 2 * kNumel;
    options.swapping.buffer_count = 1;
    options.swapping.reads_ahead = options.swapping.writes_behind = false;
    const auto engine = engine_of(specs_of(weights), options, {comms[rank]});
    const int64_t plane = kWeights * kNumel / kWorld * 4;
    GroupCut cut(engine->params(), engine->states(), 0);
    const auto source = cut.source(engine, StateKind::kMaster, 0, cut.owned());
    EXPECT_EQ(source->bytes(), static_cast<uint64_t>(plane));
    bytes_of(*source);
    const int64_t row = engine->params().largest_row() * 4;
    EXPECT_LE(row * 8, plane);
    const storage::Usage usage = engine->params().storage()->usage();
    EXPECT_LE(usage[1].peak, 2 * row + 8 * 4096) << "rows of planes, here and when they were made";
    EXPECT_LE(usage[0].peak_scratch, 2 * row) << "what is given of one, and what is taken";
    EXPECT_EQ(usage.leases, 0);
    return 0;
  });
}

// A full disk ends the save of that rank alone: the others are not left in an exchange, and training can go on.
TEST(StateSource, WhatOneRankCannotKeepEndsItsOwnSaveAlone) {
  for (const char* order : {"read:1+:eio", "write:1+:enospc"}) {
    Given given;
    given.order = order;
    const std::vector<std::string> said = saved(3, given);
    EXPECT_TRUE(says(said[1], "/rank1/")) << order << ": " << said[1];
    EXPECT_EQ(said[0] + said[2], "") << order;
  }
}

}  // namespace
}  // namespace ds::zero
