// The sum over the ranks of rows of which each rank gets its own, where values travel as blocks of integers (ZeRO++
// 2023, arXiv 2306.10209, section 3.3).
//
// [Note: one reduction of blocks]
// Values are a row for each rank. A rank codes them in blocks of 256 elements with a bf16 scale, and decodes and adds
// what arrives in fp32 and in the order of the ranks, its own part included. Where hosts have equally many ranks, and
// several of them, there are two exchanges: with the ranks of its own host, 8 bits for each element, after which a rank
// has the sum over its host of the rows of all ranks with its place on their hosts; then with these ranks, 4 bits. Else
// there is one exchange among all ranks: 8 bits, or 4 where each rank has a host of its own. The codes and the scales
// for one rank are one row of bytes.
//
// A block with a NaN or an infinity is NaN in the sum. With errors (LoCo 2024, arXiv 2407.04480) a rank adds to what it
// sends what the codes of earlier reductions have lost.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/hosts/host_ranks.h"
#include "kernels/codes.h"

namespace ds::comm {

class BlockReduce {
 public:
  // Calls a function with the kernels of the device that has the values.
  using Call = std::function<void(const kernels::CodeKernels&, const kernels::Launch&)>;
  struct Place {
    std::function<void(const Call&)> run;
    std::function<at::Tensor(int64_t bytes)> memory;
  };
  // One for each exchange, fp32; undefined where errors are not kept. See kernels::BlockRun for `beta`.
  struct Errors {
    at::Tensor first, second;
    float beta = 0;
  };

  BlockReduce(CommunicatorPtr ranks, const HostRanks& by_host, int64_t row_numel);

  bool in_two_steps() const { return outer_ != nullptr; }
  // Elements of the errors of each exchange.
  int64_t first_numel() const { return row_numel_ * ranks_->size(); }
  int64_t second_numel() const { return in_two_steps() ? row_numel_ * static_cast<int64_t>(second_.size()) : 0; }

  // The steps of one reduction. `values` are free when the work has ended; then receive() is called, and, if there are
  // two exchanges, send_again(), by all ranks in one order, and finish(), which waits. `out` is the row of this rank,
  // of any dtype that is coded.
  WorkPtr start(const Place& place, const at::Tensor& values, const Errors& errors, Communicator::Tag tag);
  void receive(const Place& place, const at::Tensor& out, const Errors& errors);
  void send_again(const Place& place, Communicator::Tag tag);
  void finish(const Place& place, const at::Tensor& out);

 private:
  // The rows that one rank gets in an exchange, by their place in the values.
  using Exchange = std::vector<std::vector<int64_t>>;

  // Bytes of the codes of a row, and of them with the scales: multiples of 16, so that all of them are aligned.
  int64_t codes_bytes(int bits) const;
  int64_t unit_bytes(int bits) const;
  at::Tensor encode(const Place& place, int bits, const Exchange& to, const at::Tensor& values, const at::Tensor& error,
                    float beta) const;
  // `rows` rows of `out` from each of `parts` ranks.
  void decode(const Place& place, int bits, const at::Tensor& got, int64_t parts, int64_t rows,
              const at::Tensor& out) const;

  const CommunicatorPtr ranks_, inner_, outer_;
  const int64_t row_numel_;
  int first_bits_;
  Exchange first_, second_;
  at::Tensor sent_, got_;  // of the exchange under way; after receive() what the second one sends
  WorkPtr again_;          // the second one
};

}  // namespace ds::comm
