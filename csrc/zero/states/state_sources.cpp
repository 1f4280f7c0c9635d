#include "zero/states/state_sources.h"

#include <algorithm>
#include <utility>

#include "base/ranges.h"

namespace ds::zero {

std::shared_ptr<StateSource> StateSources::padded(std::shared_ptr<const void> owner, StateKind kind, int slot,
                                                  const std::vector<size_t>& params) const {
  std::vector<StateSource::Run> runs;
  int64_t begin = 0;
  const std::vector<Piece>& pieces = store_.pieces();
  const auto before = [](const Piece& piece, int64_t wanted) { return piece.param < wanted; };
  for (size_t param : params) {
    const ShardedParam& sharded = *store_.spec(param).sharded;
    auto piece = std::lower_bound(pieces.begin(), pieces.end(), static_cast<int64_t>(param), before);
    for (; piece != pieces.end() && piece->param == static_cast<int64_t>(param); ++piece) {
      const Buffer* from = states_.buffer_of(kind, slot, piece->space);
      if (from != nullptr && piece->numel > 0)
        runs.push_back({begin + piece->param_offset - sharded.own_begin(), *piece, *from});
    }
    begin += sharded.slice_numel();
  }
  return std::make_shared<StateSource>(std::move(owner), store_, std::move(runs), begin);
}

std::shared_ptr<StateSource> StateSources::piece(std::shared_ptr<const void> owner, StateKind kind, int slot,
                                                 size_t number) const {
  const Piece& piece = store_.pieces().at(number);
  const Buffer* from = states_.buffer_of(kind, slot, piece.space);
  if (from == nullptr) return nullptr;
  std::vector<StateSource::Run> runs;
  if (piece.numel > 0) runs.push_back({0, piece, *from});
  return std::make_shared<StateSource>(std::move(owner), store_, std::move(runs), piece.numel);
}

at::Tensor StateSources::piece_in_file(StateKind kind, int slot, size_t number) const {
  const Piece& piece = store_.pieces().at(number);
  const Buffer* from = states_.buffer_of(kind, slot, piece.space);
  const at::Tensor view = from == nullptr ? at::Tensor() : store_.piece_view(piece, *from);
  return view.defined() && view.is_meta() ? view : at::Tensor();
}

bool StateSources::rest_in_files() const {
  const auto in_files = [&](const Buffer& buffer) {
    return buffer.exists() && store_.storage()->placement(buffer.plane).in_files();
  };
  const auto any = [&](const ParamSpace& space) { return in_files(space.master) || any_of(space.slots, in_files); };
  return any_of(store_.spaces(), any);
}

}  // namespace ds::zero
