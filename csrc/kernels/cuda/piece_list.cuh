// Kernels over many arrays at a time: some of them are passed by value within the 4 KB of kernel arguments, and each
// block of threads works on one chunk of one array.
#pragma once
#include "kernels/cuda/entries.cuh"

namespace ds::kernels::cuda {

// `Piece` has `numel`. `ends`: number of chunks up to and including each piece.
template <typename Piece>
struct PieceList {
  static constexpr int kMax = 3600 / (sizeof(Piece) + sizeof(unsigned));
  Piece pieces[kMax];
  unsigned ends[kMax];
  int count = 0;

  // The piece that a chunk belongs to.
  __device__ int find(unsigned chunk) const {
    int low = 0;
    for (int high = count - 1; low < high;) {
      const int middle = (low + high) / 2;
      if (chunk < ends[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
  // The first element of a chunk within its piece.
  __device__ size_t begin(int piece, unsigned chunk, size_t chunk_numel) const {
    return (chunk - (piece == 0 ? 0 : ends[piece - 1])) * chunk_numel;
  }
};

// Calls run(list, chunks) for all pieces, in as few lists as hold them.
template <typename Piece, typename Run>
void for_piece_lists(const Piece* pieces, size_t count, size_t chunk_numel, const Run& run) {
  constexpr size_t kMaxChunks = 0x7fffffff;
  PieceList<Piece> list;
  size_t chunks = 0;
  const auto flush = [&] {
    if (list.count > 0) run(list, static_cast<unsigned>(chunks));
    list.count = 0;
    chunks = 0;
  };
  for (size_t i = 0; i < count; ++i) {
    const size_t wanted = (pieces[i].numel + chunk_numel - 1) / chunk_numel;
    if (wanted == 0) continue;
    if (list.count == PieceList<Piece>::kMax || chunks + wanted > kMaxChunks) flush();
    list.pieces[list.count] = pieces[i];
    list.ends[list.count++] = static_cast<unsigned>(chunks += wanted);
  }
  flush();
}

}  // namespace ds::kernels::cuda
