#include "comm/boards/record.h"

#include <c10/core/ScalarType.h>

#include <cctype>
#include <cstring>

#include "comm/calls/reduce_op.h"

namespace ds::comm {

Record record(const char* what, int64_t numel, int32_t type, const std::string& tag) {
  Record made;
  std::strncpy(made.what, what, sizeof(made.what) - 1);
  // The end of a long name says more than its beginning.
  const size_t most = sizeof(made.tag) - 1, skipped = tag.size() > most ? tag.size() - most : 0;
  std::memcpy(made.tag, tag.data() + skipped, tag.size() - skipped);
  made.numel = numel;
  made.type = type;
  return made;
}

namespace {

// A number for each pair of ranks (splitmix64): no two sets of counts that differ have the same checksum by chance.
uint64_t weight(int from, int to) {
  uint64_t x = (static_cast<uint64_t>(from) << 32 | static_cast<uint32_t>(to)) + 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return (x ^ (x >> 31)) | 1;
}

uint64_t checksum_of(const std::vector<int64_t>& counts) {
  uint64_t sum = 1;
  for (size_t r = 0; r < counts.size(); ++r) sum += weight(static_cast<int>(r), 0) * static_cast<uint64_t>(counts[r]);
  return counts.empty() ? 0 : sum;
}

std::vector<int64_t> or_even(const std::vector<int64_t>& counts, const at::Tensor& whole, int size) {
  return counts.empty() ? std::vector<int64_t>(size, whole.numel() / size) : counts;
}

}  // namespace

void add_parts(Record& record, int rank, const std::vector<int64_t>& give, const std::vector<int64_t>& take) {
  for (size_t r = 0; r < give.size(); ++r) {
    const int other = static_cast<int>(r);
    record.given += weight(rank, other) * static_cast<uint64_t>(give[r]);
    record.taken += weight(other, rank) * static_cast<uint64_t>(take[r]);
  }
}

bool gives_what_is_taken(const std::vector<Record>& records) {
  uint64_t surplus = 0;
  for (const Record& each : records) surplus += each.given - each.taken;
  return surplus == 0;
}

Record record_of(const Op& op, int rank, int size) {
  if (op.verb == Verb::kBarrier) return record("barrier");
  const at::Tensor& own = op.own();
  int64_t numel = 0;
  op.visit_each([&](const Op& one) { numel += one.own().numel(); });
  Record made = record(verb_name(op.verb), numel, static_cast<int32_t>(own.scalar_type()), op.tag);
  if (reduces(op.verb)) made.op = static_cast<int32_t>(op.reduce);
  if (has_peer(op.verb)) made.root = op.peer;
  const bool exchanges = op.verb == Verb::kAllToAll;
  made.own = exchanges || !op.in_counts.empty() || !op.out_counts.empty();
  if (exchanges) {
    add_parts(made, rank, or_even(op.in_counts, op.in, size), or_even(op.out_counts, op.out, size));
  } else {
    made.counts = checksum_of(op.in_counts.empty() ? op.out_counts : op.in_counts);
  }
  return made;
}

std::string type_name(int32_t type) {
  switch (static_cast<c10::ScalarType>(type)) {
    case c10::ScalarType::Float: return "float32";
    case c10::ScalarType::Double: return "float64";
    case c10::ScalarType::Half: return "float16";
    case c10::ScalarType::BFloat16: return "bfloat16";
    case c10::ScalarType::Byte: return "uint8";
    case c10::ScalarType::Char: return "int8";
    case c10::ScalarType::Short: return "int16";
    case c10::ScalarType::Int: return "int32";
    case c10::ScalarType::Long: return "int64";
    case c10::ScalarType::Bool: return "bool";
    case c10::ScalarType::ComplexHalf: return "complex32";
    case c10::ScalarType::ComplexFloat: return "complex64";
    case c10::ScalarType::ComplexDouble: return "complex128";
    default: break;
  }
  std::string name = c10::toString(static_cast<c10::ScalarType>(type));  // Float8_e5m2, UInt16, ...
  for (char& c : name) c = static_cast<char>(std::tolower(c));
  return name;
}

namespace {

const char* peer_word(const Record& record) {
  const std::string what = record.what;
  return what == verb_name(Verb::kSend) ? "to " : what == verb_name(Verb::kRecv) ? "from " : "root ";
}

}  // namespace

std::string describe(const Record& record) {
  std::string text = std::string(record.what) + "(";
  const char* separator = "";
  if (record.type >= 0) {
    text += std::to_string(record.numel) + " x " + type_name(record.type);
    separator = ", ";
  }
  if (record.op >= 0) {
    text += separator + std::string(reduce_op_name(static_cast<ReduceOp>(record.op)));
    separator = ", ";
  }
  if (record.root >= 0) text += separator + std::string(peer_word(record)) + std::to_string(record.root);
  text += ")";
  if (record.tag[0]) text += std::string(" of \"") + record.tag + "\"";
  return text;
}

bool fits(const Record& one, const Record& other) {
  return std::strncmp(one.what, other.what, sizeof(one.what)) == 0 && one.type == other.type && one.op == other.op &&
         one.root == other.root && one.own == other.own && (one.own || one.numel == other.numel) &&
         one.counts == other.counts &&
         (!one.tag[0] || !other.tag[0] || std::strncmp(one.tag, other.tag, sizeof(one.tag)) == 0);
}

}  // namespace ds::comm
