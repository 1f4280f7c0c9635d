// A message between stages of a pipeline: a tuple of tensors of any types and shapes; entries may be empty.
//
// [Note: notes]
// A message is a note of fixed size and then its tensors, one transfer each. The note says how many there are, of which
// types and shapes, so these may differ with every message and nobody has to agree on them before. What does not fit
// into the note follows it in a transfer of its own.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/pipe/receive_buffers.h"

namespace ds::comm {

struct PipePiece {
  at::Tensor tensor;        // undefined: no tensor at this index
  bool wants_grad = false;  // of an activation: its gradient comes back
};
struct PipeMessage {
  std::vector<PipePiece> pieces;
  bool packed = false;  // a tuple, be it of one
};

struct PipeNote {
  static constexpr int64_t kBytes = 256;
  static constexpr int64_t kRoom = kBytes - 40;
  static constexpr uint32_t kMagic = 0x50495045;

  uint32_t magic = kMagic;
  uint32_t pieces = 0;
  int64_t sequence = 0;   // of the stream, from 0
  int64_t described = 0;  // bytes that describe the pieces, and the addresses of tensors that are read there
  uint32_t packed = 0;
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
