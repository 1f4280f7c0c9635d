// Memory of every rank that every rank can read, without the owner taking part: what a rank fetches, and when, need not
// match what the others do. Only between ranks of one host, or threads of one process.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace ds::comm {

class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  // Rank's region as bytes. One's own may be written: when nobody reads, which is the caller's business to know.
  virtual at::Tensor region(int rank) = 0;
  // Versions order reads after writes. Every rank publishes equally often; await() returns when all ranks have
  // published `version` times, and fails, naming the rank, when one of them has ended before.
  virtual void publish() = 0;
  virtual void await(int64_t version) = 0;
  // Meetings are rounds that any rank may open by coming to the next one; the others see it when they look. await_round()
  // returns when all ranks have come to that round or a later one, and fails as await() does.
  struct Meeting {
    int64_t round = 0;
    int64_t forward = 0;  // a number that the rank gives
  };
  virtual void come_to(const Meeting& meeting) = 0;
  virtual Meeting meeting(int rank) = 0;
  virtual void await_round(int64_t round) = 0;
  // Whether this rank reads regions now, and up to which round it has read what was to be read in that. await_readers()
  // returns when no other rank reads and all have come so far, and fails as await() does.
  virtual void set_reading(bool reading, int64_t finished) = 0;
  virtual void await_readers(int64_t finished) = 0;
};
using PeerMemoryPtr = std::shared_ptr<PeerMemory>;

}  // namespace ds::comm
