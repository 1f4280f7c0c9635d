#include "comm/shared_memory/shm_group.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "comm/calls/rank_order_reduction.h"

namespace ds::comm {

namespace {

// Fits into the second cache together with what it is reduced with; larger ones gain nothing.
constexpr size_t kSlotBytes = 512 * 1024;
// Bytes of a block of an all-reduce: a slot holds one, and a share of another.
constexpr size_t kBlockBytes = kSlotBytes / 2;
// Below this everybody reduces everything, which saves a barrier.
constexpr size_t kSmallBytes = 8 * 1024;
// Results of an exchange that caches would lose before they are read; smaller ones are slower past them.
constexpr size_t kPastCaches = 12 * 1024 * 1024;

size_t element_size(c10::ScalarType type) { return c10::elementSize(type); }

size_t slot_bytes(int size) { return std::max<size_t>(kSlotBytes, static_cast<size_t>(size) * 16 * 16); }

// Elements of a lane when a slot is cut into `lanes`, at least one.
size_t lane_numel(size_t lanes, size_t width) { return std::max<size_t>(1, kSlotBytes / lanes / width / 16 * 16); }

}  // namespace

Rows rows_of(void* data, int count, size_t row_bytes) {
  Rows rows(count);
  for (int r = 0; r < count; ++r) rows[r] = static_cast<char*>(data) + static_cast<size_t>(r) * row_bytes;
  return rows;
}

Rows rows_at(void* data, const std::vector<int64_t>& counts, size_t element_bytes) {
  Rows rows;
  auto* next = static_cast<char*>(data);
  for (const int64_t count : counts) {
    rows.push_back(next);
    next += static_cast<size_t>(count) * element_bytes;
  }
  return rows;
}

int64_t ShmGroup::exchange_memory(int size, int64_t message) {
  if (size < 2) return 0;
  const auto others = static_cast<int64_t>(size - 1), lane = static_cast<int64_t>(lane_numel(others, 1));
  return 4 * others * std::min(lane, message);  // two turns, of what it gives and of what it takes
}

std::unique_ptr<ShmGroup> ShmGroup::create(int rank, int size, const Rendezvous& rendezvous, milliseconds timeout,
                                           const GroupFacts& facts) {
  // Lanes of one element each must fit.
  const auto counts = 2 * static_cast<size_t>(size) * sizeof(int64_t);
  const int64_t bytes = ShmChannel::kBytes + 2 * static_cast<int64_t>(slot_bytes(size) + counts);
  auto segments = SharedSegments::create(rank, size, bytes, rendezvous);
  if (!segments) return nullptr;
  std::unique_ptr<ShmGroup> made(new ShmGroup(rank, size, std::move(segments), timeout, facts));
  rendezvous.all(true);  // nobody looks at a line before its owner has made it
  return made;
}

ShmGroup::ShmGroup(int rank, int size, std::shared_ptr<SharedSegments> segments, milliseconds timeout,
                   const GroupFacts& facts)
    : rank_(rank), size_(size), segments_(std::move(segments)), channel_(rank, segments_, timeout, facts) {}

char* ShmGroup::slot(int rank, int turn) const {
  return static_cast<char*>(segments_->data(rank)) + ShmChannel::kBytes + static_cast<size_t>(turn) * slot_bytes(size_);
}

// Behind the slots, two in turn as they are.
int64_t* ShmGroup::counts_of(int rank) const {
  return reinterpret_cast<int64_t*>(slot(rank, 2)) + static_cast<size_t>(2 * turn_) * static_cast<size_t>(size_);
}

std::string ShmGroup::uneven_pair() const {
  for (int from = 0; from < size_; ++from)
    for (int to = 0; to < size_; ++to) {
      const int64_t given = counts_of(from)[to], taken = counts_of(to)[size_ + from];
      if (given != taken)
        return " Rank " + std::to_string(from) + " gives rank " + std::to_string(to) + " " + std::to_string(given) +
               " elements, and that one takes " + std::to_string(taken) + ".";
    }
  return "";
}

// The slots of this step have been written: all may read them.
void ShmGroup::next_step(bool first, const Record& record) {
  if (first) {
    channel_.enter(record, [this] { return uneven_pair(); });
  } else {
    channel_.barrier();
  }
}

void ShmGroup::all_reduce(void* data, size_t numel, c10::ScalarType type, ReduceOp op, const std::string& tag) {
  Record call = call_of("all_reduce", numel, type, tag);
  call.op = static_cast<int32_t>(op);
  if (numel * element_size(type) > kSmallBytes) return all_reduce_in_shares(data, numel, type, op, call);
  std::vector<const void*> rows(size_);
  turn_ ^= 1;
  if (numel) std::memcpy(slot(rank_), data, numel * element_size(type));
  next_step(true, call);
  for (int r = 0; r < size_; ++r) rows[r] = slot(r);
  reduce_in_rank_order(data, rows.data(), size_, numel, type, op);
  channel_.leave();
}

// Each rank reduces its share of every block, in place, from what the others have put into their slots. One barrier per
// block: behind it lie the shares of block i and the results of block i - 1.
void ShmGroup::all_reduce_in_shares(void* data, size_t numel, c10::ScalarType type, ReduceOp op, const Record& call) {
  const size_t width = element_size(type), most = kBlockBytes / width, blocks = (numel + most - 1) / most;
  std::vector<const void*> rows(size_);
  struct Block {
    char* here;
    size_t numel, share;
    size_t begin(int r) const { return std::min(numel, share * static_cast<size_t>(r)); }
    size_t count(int r) const { return begin(r + 1) - begin(r); }
  };
  const auto block = [&](size_t i) {
    const size_t m = std::min(most, numel - i * most);
    return Block{static_cast<char*>(data) + i * most * width, m, (m + size_ - 1) / size_};
  };
  for (size_t i = 0; i <= blocks; ++i) {
    const int before = turn_;
    turn_ ^= 1;
    const auto others = [&](const auto& visit) {
      for (int step = 1; step < size_; ++step) visit((rank_ + step) % size_);
    };
    if (i < blocks) {
      const Block next = block(i);
      others([&](int r) {
        std::memcpy(slot(rank_) + next.begin(r) * width, next.here + next.begin(r) * width, next.count(r) * width);
      });
    }
    if (i > 0) {
      const Block last = block(i - 1);
      const size_t first = last.begin(rank_) * width, count = last.count(rank_);
      for (int r = 0; r < size_; ++r) rows[r] = r == rank_ ? last.here + first : slot(r, before) + first;
      reduce_in_rank_order(last.here + first, rows.data(), size_, count, type, op);
      std::memcpy(slot(rank_) + kBlockBytes, last.here + first, count * width);
    }
    next_step(i == 0, call);
    if (i > 0) {
      const Block last = block(i - 1);
      others(
          [&](int r) { std::memcpy(last.here + last.begin(r) * width, slot(r) + kBlockBytes, last.count(r) * width); });
    }
  }
  channel_.leave();
}

void ShmGroup::reduce(void* data, size_t numel, c10::ScalarType type, ReduceOp op, int root, const std::string& tag) {
  Record call = call_of("reduce", numel, type, tag);
  call.op = static_cast<int32_t>(op);
  call.root = root;
  const size_t width = element_size(type), most = kSlotBytes / width;
  std::vector<const void*> rows(size_);
  size_t done = 0;
  do {
    const size_t m = std::min(most, numel - done);
    char* here = static_cast<char*>(data) + done * width;
    turn_ ^= 1;
    if (m && rank_ != root) std::memcpy(slot(rank_), here, m * width);
    next_step(done == 0, call);
    if (rank_ == root) {
      for (int r = 0; r < size_; ++r) rows[r] = r == root ? here : slot(r);
      reduce_in_rank_order(here, rows.data(), size_, m, type, op);
    }
    done += m;
  } while (done < numel);
  channel_.leave();
}

void ShmGroup::broadcast(void* data, size_t numel, c10::ScalarType type, int root, const std::string& tag) {
  Record call = call_of("broadcast", numel, type, tag);
  call.root = root;
  const size_t width = element_size(type), most = kSlotBytes / width;
  size_t done = 0;
  do {
    const size_t m = std::min(most, numel - done);
    char* here = static_cast<char*>(data) + done * width;
    turn_ ^= 1;
    if (m && rank_ == root) std::memcpy(slot(root), here, m * width);
    next_step(done == 0, call);
    if (m && rank_ != root) std::memcpy(here, slot(root), m * width);
    done += m;
  } while (done < numel);
  channel_.leave();
}

void ShmGroup::all_gather(const Rows& out, const void* mine, size_t numel, c10::ScalarType type,
                          const std::string& tag) {
  const Record call = call_of("all_gather", numel, type, tag);
  const size_t width = element_size(type), most = kSlotBytes / width;
  size_t done = 0;
  do {
    const size_t m = std::min(most, numel - done);
    const auto row = [&](int r) { return out[r] + done * width; };
    const char* from = static_cast<const char*>(mine) + done * width;
    turn_ ^= 1;
    if (m) std::memcpy(slot(rank_), from, m * width);
    next_step(done == 0, call);
    if (m && row(rank_) != from) std::memcpy(row(rank_), from, m * width);
    for (int step = 1; step < size_ && m; ++step) {
      const int r = (rank_ + step) % size_;
      std::memcpy(row(r), slot(r), m * width);
    }
    done += m;
  } while (done < numel);
  channel_.leave();
}

void ShmGroup::reduce_scatter(void* out, const Rows& in, size_t numel, c10::ScalarType type, ReduceOp op, bool wide,
                              const std::string& tag) {
  Record call = call_of("reduce_scatter", numel, type, tag);
  call.op = static_cast<int32_t>(op);
  const size_t width = element_size(type), out_width = wide ? sizeof(float) : width, most = lane_numel(size_, width);
  std::vector<const void*> rows(size_);
  size_t done = 0;
  do {
    const size_t m = std::min(most, numel - done);
    const auto row = [&](int r) { return in[r] + done * width; };
    turn_ ^= 1;
    for (int r = 0; r < size_ && m; ++r)
      if (r != rank_) std::memcpy(slot(rank_) + static_cast<size_t>(r) * most * width, row(r), m * width);
    next_step(done == 0, call);
    for (int r = 0; r < size_; ++r)
      rows[r] = r == rank_ ? row(rank_) : slot(r) + static_cast<size_t>(rank_) * most * width;
    reduce_in_rank_order(static_cast<char*>(out) + done * out_width, rows.data(), size_, m, type, op, wide);
    done += m;
  } while (done < numel);
  channel_.leave();
}

void ShmGroup::exchange(const RowsOfRanks& rows, const std::vector<int64_t>& take, const std::vector<int64_t>& give,
                        c10::ScalarType type, const std::string& tag) {
  Record call = call_of("all_to_all", 0, type, tag);
  call.own = 1;
  for (int64_t count : give) call.numel += count;
  add_parts(call, rank_, give, take);
  for (int r = 0; r < size_; ++r)
    if (r != rank_) call.longest = std::max(call.longest, give[r]);
  // No lane for oneself: lane r of rank r's slots is that of the last rank.
  const size_t width = element_size(type), most = lane_numel(std::max(1, size_ - 1), width);
  const auto lane = [&](int from, int to) {
    return slot(from) + static_cast<size_t>(to == size_ - 1 ? from : to) * most * width;
  };
  const auto part = [&](const std::vector<int64_t>& counts, int r, size_t done) {
    const auto count = static_cast<size_t>(counts[r]);
    return done >= count ? 0 : std::min(most, count - done) * width;
  };
  const bool past_caches = rows.bytes_taken() >= kPastCaches;
  const std::vector<RowsInSlot> none;
  std::vector<RowsInSlot> slots;
  size_t done = 0, longest = 0;
  do {
    turn_ ^= 1;
    if (done == 0) {
      std::copy(give.begin(), give.end(), counts_of(rank_));
      std::copy(take.begin(), take.end(), counts_of(rank_) + size_);
    }
    slots.clear();
    for (int step = 1; step < size_; ++step) {
      const int r = (rank_ + step) % size_;
      if (const size_t m = part(give, r, done)) slots.push_back({r, done * width, m, lane(rank_, r)});
    }
    give_rows(rows, slots, rank_, done * width, std::min(part(give, rank_, done), part(take, rank_, done)),
              past_caches);
    next_step(done == 0, call);
    if (done == 0)
      for (int r = 0; r < size_; ++r) longest = std::max(longest, static_cast<size_t>(channel_.record_of(r).longest));
    for (int step = 1; step < size_; ++step) {
      const int r = (rank_ + step) % size_;
      if (const size_t m = part(take, r, done)) take_rows(rows, {r, done * width, m, lane(r, rank_)}, past_caches);
    }
    done += most;
  } while (done < longest);
  const auto own = static_cast<size_t>(std::min(give[rank_], take[rank_]));
  if (own > done) give_rows(rows, none, rank_, done * width, (own - done) * width, past_caches);
  if (past_caches) finish_stores();
  channel_.leave();
}

void ShmGroup::all_to_all(const Rows& out, const std::vector<int64_t>& take, const Rows& in,
                          const std::vector<int64_t>& give, c10::ScalarType type, const std::string& tag) {
  RowsOfRanks rows{std::vector<c10::SmallVector<StridedRows, 3>>(size_),
                   std::vector<c10::SmallVector<StridedRows, 3>>(size_)};
  for (int r = 0; r < size_; ++r) {
    rows.give[r].emplace_back(in[r], static_cast<size_t>(give[r]) * element_size(type));
    rows.take[r].emplace_back(out[r], static_cast<size_t>(take[r]) * element_size(type));
  }
  exchange(rows, take, give, type, tag);
}

void ShmGroup::all_to_all(const StridedParts& parts, c10::ScalarType type, const std::string& tag) {
  exchange(parts.rows(), parts.take_counts(), parts.give_counts(), type, tag);
}

void ShmGroup::gather(const Rows& out, const void* mine, size_t numel, c10::ScalarType type, int root,
                      const std::string& tag) {
  Record call = call_of("gather", numel, type, tag);
  call.root = root;
  const size_t width = element_size(type), most = kSlotBytes / width;
  size_t done = 0;
  do {
    const size_t m = std::min(most, numel - done);
    turn_ ^= 1;
    const char* from = static_cast<const char*>(mine) + done * width;
    if (m && rank_ != root) std::memcpy(slot(rank_), from, m * width);
    next_step(done == 0, call);
    for (int r = 0; rank_ == root && m && r < size_; ++r)
      std::memmove(out[r] + done * width, r == root ? from : slot(r), m * width);
    done += m;
  } while (done < numel);
  channel_.leave();
}

void ShmGroup::scatter(void* mine, const Rows& in, size_t numel, c10::ScalarType type, int root,
                       const std::string& tag) {
  Record call = call_of("scatter", numel, type, tag);
  call.root = root;
  const size_t width = element_size(type), most = lane_numel(size_, width);
  size_t done = 0;
  do {
    const size_t m = std::min(most, numel - done);
    const auto row = [&](int r) { return in[r] + done * width; };
    turn_ ^= 1;
    for (int r = 0; rank_ == root && m && r < size_; ++r)
      if (r != root) std::memcpy(slot(root) + static_cast<size_t>(r) * most * width, row(r), m * width);
    next_step(done == 0, call);
    if (m)
      std::memmove(static_cast<char*>(mine) + done * width,
                   rank_ == root ? row(root) : slot(root) + static_cast<size_t>(rank_) * most * width, m * width);
    done += m;
  } while (done < numel);
  channel_.leave();
}

void ShmGroup::barrier() { agree(record("barrier")); }

void ShmGroup::agree(const Record& call) {
  turn_ ^= 1;
  channel_.enter(call);
  channel_.leave();
}

}  // namespace ds::comm
