// Rows that travel as blocks of integers: against sums in fp64, over worlds, layouts of hosts, dtypes and sizes; bytes,
// errors, and blocks that are not finite. Ranks are threads.
#include "comm/compressed/block_reduce.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "../on_threads.h"
#include "comm/transports/thread_communicator.h"
#include "kernels/codes.h"

namespace ds::comm {
namespace {

using Layout = std::vector<std::vector<int>>;  // the ranks of each host

// The communicators of one rank, its kernels and its memory.
struct Member {
  CommunicatorPtr ranks;
  HostRanks by_host;
  BlockReduce::Place place = {
      [](const BlockReduce::Call& call) { call(*ds_code_kernels(kernels::kCodesAbi, "cpu"), kernels::Launch()); },
      [](int64_t bytes) { return at::full({bytes}, 77, at::kByte); }};
};

// body(rank, member) on all ranks of a layout.
void on_hosts(const Layout& layout, const std::function<void(int, Member&)>& body) {
  int size = 0;
  for (const std::vector<int>& host : layout) size += static_cast<int>(host.size());
  const std::vector<CommunicatorPtr> all = thread_communicators(size);
  std::vector<Member> members(static_cast<size_t>(size));
  const size_t width = layout[0].size();
  bool even = layout.size() > 1 && width > 1;
  for (const std::vector<int>& host : layout) even = even && host.size() == width;
  for (size_t h = 0; h < layout.size(); ++h) {
    const std::vector<CommunicatorPtr> inner = thread_communicators(static_cast<int>(layout[h].size()));
    for (size_t l = 0; l < layout[h].size(); ++l) {
      Member& one = members[static_cast<size_t>(layout[h][l])];
      one.ranks = all[static_cast<size_t>(layout[h][l])];
      one.by_host.hosts = {layout, static_cast<int>(h), static_cast<int>(l)};
      if (even) one.by_host.inner = inner[l];
    }
  }
  for (size_t l = 0; even && l < width; ++l) {
    const std::vector<CommunicatorPtr> outer = thread_communicators(static_cast<int>(layout.size()));
    for (size_t h = 0; h < layout.size(); ++h) members[static_cast<size_t>(layout[h][l])].by_host.outer = outer[h];
  }
  on_threads(size, [&](int rank) { body(rank, members[static_cast<size_t>(rank)]); });
}

std::vector<Layout> layouts() {
  return {{{0}},
          {{0, 1}},
          {{0, 1, 2}},
          {{0}, {1}},
          {{0}, {1}, {2}},
          {{0, 1}, {2, 3}},
          {{0, 2}, {1, 3}},
          {{0, 1, 2}, {3}},
          {{0, 1, 2, 3, 4}},
          {{0, 1, 2}, {3, 4, 5}},
          {{0, 5}, {1, 3}, {2, 4}},
          {{0, 1, 2, 3}, {4, 5, 6}},
          {{0, 1, 2, 3}, {4, 5, 6, 7}},
          {{0, 1}, {2, 3}, {4, 5}, {6, 7}}};
}

bool in_two_steps(const Layout& layout) {
  if (layout.size() == 1 || layout[0].size() == 1) return false;
  for (const std::vector<int>& host : layout)
    if (host.size() != layout[0].size()) return false;
  return true;
}

int ranks_of(const Layout& layout) {
  int size = 0;
  for (const std::vector<int>& host : layout) size += static_cast<int>(host.size());
  return size;
}

// Values of a rank, of another size in each block.
at::Tensor values_of(int rank, int64_t numel, at::ScalarType type) {
  const at::Tensor index = at::arange(numel, at::kDouble);
  return (at::sin(index * (rank + 1.37)) * at::exp(at::sin(at::floor(index / 256) + rank))).to(type);
}

at::Tensor reduced(Member& member, const at::Tensor& values, const BlockReduce::Errors& errors = {}) {
  BlockReduce reduce(member.ranks, member.by_host, values.numel() / member.ranks->size());
  const at::Tensor row = at::full({values.numel() / member.ranks->size()}, NAN, values.options());
  reduce.start(member.place, values, errors, "rows")->wait();
  reduce.receive(member.place, row, errors);
  if (reduce.in_two_steps()) {
    reduce.send_again(member.place, "rows");
    reduce.finish(member.place, row);
  }
  return row;
}

// The largest absolute value of each block of a row, for each of its elements.
at::Tensor maxima(const at::Tensor& row) {
  const int64_t numel = row.numel(), blocks = (numel + 255) / 256;
  const at::Tensor padded = at::zeros({blocks * 256}, at::kDouble);
  padded.narrow(0, 0, numel).copy_(row.abs());
  return padded.view({blocks, 256}).amax(1, true).expand({blocks, 256}).reshape({-1}).narrow(0, 0, numel);
}

// The largest error of codes of `bits`: half a scale, which is rounded up to bf16.
at::Tensor half_scale(const at::Tensor& row, int bits) {
  return maxima(row) / ((1 << (bits - 1)) - 1) * (0.5 * (1 + 1.0 / 128));
}

TEST(BlockReduce, IsTheSumButForHalfAScale) {
  for (const Layout& layout : layouts()) {
    const int size = ranks_of(layout);
    for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
      for (const int64_t row : {1, 3, 255, 256, 257, 1000}) {
        on_hosts(layout, [&](int rank, Member& member) {
          const auto own_row = [&](int of) {
            return values_of(of, row * size, type).to(at::kDouble).narrow(0, rank * row, row);
          };
          at::Tensor sum = at::zeros({row}, at::kDouble), bound = at::zeros({row}, at::kDouble);
          const bool two = in_two_steps(layout), apart = layout.size() > 1 && !two && layout[0].size() == 1;
          for (const std::vector<int>& host : layout) {
            at::Tensor of_host = at::zeros({row}, at::kDouble), lost = at::zeros({row}, at::kDouble);
            for (const int other : host) {
              of_host = of_host + own_row(other);
              lost = lost + half_scale(own_row(other), apart ? 4 : 8);
            }
            sum = sum + of_host;
            bound = bound + lost;
            if (two) bound = bound + half_scale(of_host.abs() + lost, 4);
          }
          const double rounds = type == at::kFloat ? 1e-6 : type == at::kHalf ? 1e-3 : 8e-3;
          bound = bound + (maxima(sum) + 1) * rounds;
          const at::Tensor got = reduced(member, values_of(rank, row * size, type)).to(at::kDouble);
          const at::Tensor off = (got - sum).abs() - bound;
          EXPECT_LE(off.max().item<double>(), 0) << "rank " << rank << " of " << size << " on " << layout.size()
                                                 << " hosts, rows of " << row << " " << c10::toString(type);
        });
      }
    }
  }
}

TEST(BlockReduce, BytesAreThoseOfTheCodes) {
  for (const Layout& layout : layouts()) {
    const int size = ranks_of(layout);
    constexpr int64_t kRow = 1 << 12;
    const auto unit = [](int bits) { return kRow * bits / 8 + kRow / 256 * 2; };  // codes and scales of a row
    on_hosts(layout, [&](int rank, Member& member) {
      reduced(member, values_of(rank, kRow * size, at::kHalf));
      const bool two = in_two_steps(layout);
      const auto hosts = static_cast<int64_t>(layout.size()), width = size / hosts;
      if (two) {
        EXPECT_EQ(member.by_host.inner->traffic().bytes, (width - 1) * hosts * unit(8));
        EXPECT_EQ(member.by_host.outer->traffic().bytes, (hosts - 1) * unit(4));
        // Between hosts a reduce-scatter in 16 bits sends the rows of all ranks of the other hosts.
        EXPECT_GT(2.0 * kRow * (size - width), 3.9 * static_cast<double>(width * (hosts - 1) * unit(4)));
      } else {
        const bool apart = layout.size() > 1 && layout[0].size() == 1;
        EXPECT_EQ(member.ranks->traffic().bytes, (size - 1) * unit(apart ? 4 : 8));
      }
      EXPECT_EQ(member.ranks->traffic().calls, two ? 0 : 1);
    });
  }
}

// With errors and beta 0, what all reductions have given and what is still owed is what was to be added up.
TEST(BlockReduce, ErrorsAreSentLater) {
  for (const Layout& layout : layouts()) {
    const int size = ranks_of(layout), steps = 5;
    constexpr int64_t kRow = 700;
    const at::Tensor owed = at::zeros({size, kRow}, at::kDouble);  // of all rows, by all ranks
    std::vector<at::Tensor> given(static_cast<size_t>(size));
    std::mutex mutex;
    on_hosts(layout, [&](int rank, Member& member) {
      const at::Tensor values = values_of(rank, kRow * size, at::kFloat);
      const BlockReduce shape(member.ranks, member.by_host, kRow);
      const BlockReduce::Errors errors = {at::zeros({shape.first_numel()}), at::zeros({shape.second_numel()}), 0.0f};
      at::Tensor sum = at::zeros({kRow}, at::kDouble);
      for (int step = 0; step < steps; ++step) sum = sum + reduced(member, values, errors).to(at::kDouble);
      const std::lock_guard lock(mutex);
      given[static_cast<size_t>(rank)] = sum;
      owed.add_(errors.first.view({size, kRow}));
      for (size_t host = 0; shape.in_two_steps() && host < layout.size(); ++host)
        owed[layout[host][static_cast<size_t>(member.by_host.hosts.local)]].add_(
            errors.second.view({-1, kRow})[static_cast<int64_t>(host)]);
    });
    for (int rank = 0; rank < size; ++rank) {
      at::Tensor want = at::zeros({kRow}, at::kDouble);
      for (int other = 0; other < size; ++other)
        want = want + values_of(other, kRow * size, at::kFloat).to(at::kDouble).narrow(0, rank * kRow, kRow) * steps;
      EXPECT_LE((given[static_cast<size_t>(rank)] + owed[rank] - want).abs().max().item<double>(), 1e-4);
    }
  }
}

TEST(BlockReduce, ABlockThatIsNotFiniteIsNanInTheSum) {
  for (const Layout& layout : layouts()) {
    const int size = ranks_of(layout);
    for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
      on_hosts(layout, [&](int rank, Member& member) {
        const at::Tensor values = values_of(rank, 600 * size, at::kBFloat16);
        if (rank == size - 1) values.view({size, 600}).select(0, 0).narrow(0, 300, 1).fill_(bad);
        const at::Tensor row = reduced(member, values);
        EXPECT_EQ(row.isnan().sum().item<int64_t>(), rank == 0 ? 256 : 0);
        if (rank == 0) {
          EXPECT_TRUE(row.narrow(0, 256, 256).isnan().all().item<bool>());
        }
      });
    }
  }
}

}  // namespace
}  // namespace ds::comm
