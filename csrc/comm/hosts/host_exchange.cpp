#include "comm/hosts/host_exchange.h"

#include <ATen/Functions.h>

#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "comm/calls/compose.h"

namespace ds::comm {

namespace {

using Views = StridedParts::Views;

Views views_of(const at::Tensor& whole, const std::vector<int64_t>& counts, int n) {
  Views views;
  for (const at::Tensor& part : parts_of(whole, counts, n)) views.push_back({part});
  return views;
}

int64_t elements_in(const std::vector<StridedView>& views) {
  int64_t numel = 0;
  for (const StridedView& view : views) numel += view.numel();
  return numel;
}

// The next `numel` elements of `flat`.
at::Tensor next_of(const at::Tensor& flat, int64_t& at, int64_t numel) {
  at += numel;
  return flat.narrow(0, at - numel, numel);
}

int ranks_of(const Hosts& hosts) {
  size_t sum = 0;
  for (const auto& ranks : hosts.ranks) sum += ranks.size();
  return static_cast<int>(sum);
}

}  // namespace

at::Tensor KeptMemory::of(int64_t numel, at::ScalarType type) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(type));
  if (!bytes_.defined() || bytes_.numel() < bytes) bytes_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  return bytes_.narrow(0, 0, bytes).view(type);
}

HostExchange::HostExchange(const Op& op, const Hosts& hosts, LeaderMemory& memory)
    : hosts_(hosts),
      memory_(memory),
      type_(op.in.scalar_type()),
      tag_(op.tag),
      give_(op.parts ? op.parts->give() : views_of(op.in, op.in_counts, ranks_of(hosts))),
      take_(op.parts ? op.parts->take() : views_of(op.out, op.out_counts, ranks_of(hosts))),
      n_(give_.size()) {}

template <typename Visit>
void HostExchange::over_others(const Visit& visit) const {
  for (size_t host = 0; host < hosts_.ranks.size(); ++host)
    if (static_cast<int>(host) != hosts_.mine) visit(host, hosts_.ranks[host]);
}

int64_t HostExchange::all_of(size_t first) const {
  const auto begin = totals_.begin() + static_cast<std::ptrdiff_t>(first);
  return std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(hosts_.ranks.size()), int64_t{0});
}

void HostExchange::gather_counts(ShmGroup& group) {
  std::vector<int64_t> mine;
  for (const Views* views : {&give_, &take_})
    for (const auto& of_rank : *views) mine.push_back(elements_in(of_rank));
  const auto each = static_cast<int64_t>(mine.size());
  std::vector<int64_t> to(group.size()), from(group.size());
  to[0] = each;
  if (hosts_.leads()) {
    from.assign(group.size(), each);
    counts_.resize(mine.size() * static_cast<size_t>(group.size()));
  }
  group.all_to_all(rows_at(counts_.data(), from, sizeof(int64_t)), from, rows_at(mine.data(), to, sizeof(int64_t)), to,
                   at::kLong, "how much each rank gives and takes");
}

void HostExchange::collect(ShmGroup& group) {
  gather_counts(group);
  Views give(group.size()), take(group.size());
  over_others([&](size_t, const std::vector<int>& ranks) {
    for (const int rank : ranks) append(give[0], give_[rank]);
  });
  if (hosts_.leads()) {
    const size_t members = hosts_.ranks[hosts_.mine].size(), hosts = hosts_.ranks.size();
    totals_.assign(2 * hosts, 0);
    over_others([&](size_t host, const std::vector<int>& ranks) {
      for (size_t local = 0; local < members; ++local)
        for (const int rank : ranks) {
          totals_[host] += given(local, rank);
          totals_[hosts + host] += taken(local, rank);
        }
    });
    outgoing_ = memory_.outgoing.of(all_of(0), type_);
    incoming_ = memory_.incoming.of(all_of(hosts), type_);
    int64_t at = 0;
    over_others([&](size_t, const std::vector<int>& ranks) {
      for (size_t local = 0; local < members; ++local) {
        int64_t count = 0;
        for (const int rank : ranks) count += given(local, rank);
        take[local].push_back(next_of(outgoing_, at, count));
      }
    });
  }
  move(group, std::move(give), std::move(take));
}

std::vector<int64_t> HostExchange::told() const {
  if (!hosts_.leads()) return {};
  std::vector<int64_t> made = totals_;
  Record sums;
  const auto begin = counts_.begin();
  const auto row = static_cast<std::ptrdiff_t>(n_);
  for (size_t local = 0; local < hosts_.ranks[hosts_.mine].size(); ++local) {
    const auto first = begin + static_cast<std::ptrdiff_t>(local) * 2 * row;
    add_parts(sums, hosts_.ranks[hosts_.mine][local], {first, first + row}, {first + row, first + 2 * row});
  }
  made.push_back(static_cast<int64_t>(sums.given));
  made.push_back(static_cast<int64_t>(sums.taken));
  return made;
}

void HostExchange::check(const std::vector<std::vector<int64_t>>& all) const {
  const size_t hosts = hosts_.ranks.size();
  for (size_t giver = 0; giver < hosts; ++giver)
    for (size_t taker = 0; taker < hosts; ++taker)
      if (all[giver][taker] != all[taker][hosts + giver])
        fail(ErrorKind::kRuntime, "all_to_all: the ranks on the host of rank ", hosts_.ranks[giver][0], " give ",
             all[giver][taker], " elements to those on the host of rank ", hosts_.ranks[taker][0], ", which take ",
             all[taker][hosts + giver], ": what a rank gives to another must be what that one takes from it");
  uint64_t surplus = 0;
  for (const auto& host : all)
    surplus += static_cast<uint64_t>(host[2 * hosts]) - static_cast<uint64_t>(host[2 * hosts + 1]);
  if (surplus != 0)
    fail(ErrorKind::kRuntime,
         "all_to_all: a rank gives another one more or less than that one takes from it; the sums of their hosts are "
         "equal, so the split sizes of single ranks are in the wrong order");
}

WorkPtr HostExchange::cross(Communicator& leaders) const {
  const auto half = totals_.begin() + static_cast<std::ptrdiff_t>(hosts_.ranks.size());
  return leaders.all_to_all(outgoing_, {totals_.begin(), half}, incoming_, {half, totals_.end()}, tag_);
}

void HostExchange::inside(ShmGroup& group) const {
  Views give, take;
  for (const int rank : hosts_.ranks[hosts_.mine]) {
    give.push_back(give_[rank]);
    take.push_back(take_[rank]);
  }
  move(group, std::move(give), std::move(take));
}

void HostExchange::deliver(ShmGroup& group) const {
  Views give(group.size()), take(group.size());
  int64_t at = 0;
  over_others([&](size_t, const std::vector<int>& ranks) {
    for (const int rank : ranks) {
      append(take[0], take_[rank]);
      for (size_t local = 0; hosts_.leads() && local < give.size(); ++local)
        give[local].push_back(next_of(incoming_, at, taken(local, rank)));
    }
  });
  move(group, std::move(give), std::move(take));
}

// Ranks that give and take nothing come, too.
void HostExchange::move(ShmGroup& group, Views give, Views take) const {
  give[0].push_back(at::empty({0}, at::TensorOptions().dtype(type_)));
  group.all_to_all(StridedParts(std::move(give), std::move(take)), type_, tag_);
}

}  // namespace ds::comm
