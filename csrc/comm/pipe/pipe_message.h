// A message between stages of a pipeline: a tuple of tensors of any types and shapes; entries may be empty.
//
// [Note: notes]
// A message is a note of fixed size and then its tensors, one transfer each. The note says how many there are, of which
// types and shapes, so these may differ with every message and nobody has to agree on them before. What does not fit
// into the note follows it in a transfer of its own.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/pipe/receive_buffers.h"

namespace ds::comm {

// The batch that a stage works on. All stages work on the same ones in one order: a script that calls eval_batch or
// train_batch on one of them alone is found by the first message.
struct PipeBatch {
  uint32_t number = 0;  // of this channel, from 1; 0: not known
  bool trains = false;

  std::string text() const;  // "train_batch, number 3 of this engine"
  uint32_t word() const { return number << 1 | static_cast<uint32_t>(trains); }
  static PipeBatch of(uint32_t word) { return {word >> 1, (word & 1u) != 0}; }
  bool meets(const PipeBatch& other) const { return number == 0 || other.number == 0 || word() == other.word(); }
};

struct PipePiece {
  at::Tensor tensor;        // undefined: no tensor at this index
  bool wants_grad = false;  // of an activation: its gradient comes back
};
struct PipeMessage {
  std::vector<PipePiece> pieces;
  bool packed = false;  // a tuple, be it of one
  PipeBatch batch{};    // that the sender is in
};

struct PipeNote {
  static constexpr int64_t kBytes = 256;
  static constexpr int64_t kRoom = kBytes - 40;
  static constexpr uint32_t kMagic = 0x50495045;

  uint32_t magic = kMagic;
  uint32_t pieces = 0;
  int64_t sequence = 0;   // of the stream, from 0
  int64_t described = 0;  // bytes that describe the pieces, and the addresses of tensors that are read there
  uint32_t packed = 0;  // 1 for a packed message, and the word of the sender's batch above that bit
  uint32_t tensors = 0;   // number of addresses
  uint64_t offer = 0;     // address of those bytes in the sender's memory, if they do not fit; 0: they follow, or fit
  char text[kRoom] = {};  // these bytes, where they fit
};
static_assert(sizeof(PipeNote) == PipeNote::kBytes);

// Host memory as a tensor of bytes, which does not own it.
at::Tensor bytes_at(void* data, int64_t size);

// Types, flags and sizes of all pieces. ErrorKind::kValue for tensors that cannot travel (sparse, quantized).
std::vector<char> describe_pieces(const PipeMessage& message);
// Tensors of these descriptions on `device`, on the host out of `buffers`, not filled yet. ErrorKind::kRuntime where
// `bytes` are no descriptions.
std::vector<PipePiece> empty_pieces(const char* bytes, int64_t size, uint32_t pieces, c10::Device device,
                                    ReceiveBuffers& buffers);

}  // namespace ds::comm
