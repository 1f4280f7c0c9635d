#include "comm/pipe/pipe_message.h"

#include <ATen/Functions.h>

#include <cstring>

#include "base/error.h"

namespace ds::comm {

std::string PipeBatch::text() const {
  return std::string(trains ? "train_batch" : "eval_batch") + ", number " + std::to_string(number) + " of its engine";
}


namespace {

struct PieceHead {
  int16_t type;  // c10::ScalarType; -1: nothing
  uint16_t wants_grad;
  int32_t dims;
};

template <typename T>
void append_bytes(std::vector<char>& bytes, const T& value) {
  const auto* from = reinterpret_cast<const char*>(&value);
  bytes.insert(bytes.end(), from, from + sizeof(T));
}

template <typename T>
T take(const char*& bytes, const char* end) {
  if (end - bytes < static_cast<int64_t>(sizeof(T)))
    fail(ErrorKind::kRuntime, "a message of the pipeline ends in the middle of its description");
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  bytes += sizeof(T);
  return value;
}

}  // namespace

at::Tensor bytes_at(void* data, int64_t size) {
  return at::from_blob(data, {size}, at::TensorOptions().dtype(at::kByte));
}

std::vector<char> describe_pieces(const PipeMessage& message) {
  std::vector<char> bytes;
  bytes.reserve(message.pieces.size() * 40);
  for (size_t index = 0; index < message.pieces.size(); ++index) {
    const at::Tensor& tensor = message.pieces[index].tensor;
    if (!tensor.defined()) {
      append_bytes(bytes, PieceHead{-1, 0, 0});
      continue;
    }
    if (tensor.layout() != at::kStrided || tensor.is_quantized())
      fail(ErrorKind::kValue, "tensor ", index, " of what goes to another stage is ",
           tensor.is_quantized() ? "quantized" : "sparse", ": only dense tensors travel; convert it, for example with ",
           tensor.is_quantized() ? "dequantize()" : "to_dense()");
    append_bytes(
        bytes, PieceHead{static_cast<int16_t>(tensor.scalar_type()),
                         static_cast<uint16_t>(message.pieces[index].wants_grad), static_cast<int32_t>(tensor.dim())});
    for (const int64_t size : tensor.sizes()) append_bytes(bytes, size);
  }
  return bytes;
}

std::vector<PipePiece> empty_pieces(const char* bytes, int64_t size, uint32_t pieces, c10::Device device,
                                    ReceiveBuffers& buffers) {
  const char* const end = bytes + size;
  std::vector<PipePiece> made(pieces);
  for (PipePiece& piece : made) {
    const auto head = take<PieceHead>(bytes, end);
    if (head.type < 0) continue;
    std::vector<int64_t> sizes(head.dims);
    for (int64_t& each : sizes) each = take<int64_t>(bytes, end);
    piece.wants_grad = head.wants_grad != 0;
    const auto type = static_cast<at::ScalarType>(head.type);
    piece.tensor =
        device.is_cpu() ? buffers.take(sizes, type) : at::empty(sizes, at::TensorOptions().device(device).dtype(type));
  }
  return made;
}

}  // namespace ds::comm
