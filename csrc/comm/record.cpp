#include "comm/record.h"

#include <c10/core/ScalarType.h>

#include <cstring>

#include "comm/rank_order_reduction.h"

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

std::string describe(const Record& record) {
  std::string text = std::string(record.what) + "(";
  const char* separator = "";
  if (record.type >= 0) {
    text += std::to_string(record.numel) + " x " + c10::toString(static_cast<c10::ScalarType>(record.type));
    separator = ", ";
  }
  if (record.op >= 0) {
    text += separator + std::string(reduce_op_name(static_cast<ReduceOp>(record.op)));
    separator = ", ";
  }
  if (record.root >= 0) text += separator + std::string("root ") + std::to_string(record.root);
  text += ")";
  if (record.tag[0]) text += std::string(" of \"") + record.tag + "\"";
  return text;
}

bool fits(const Record& one, const Record& other) {
  return std::strncmp(one.what, other.what, sizeof(one.what)) == 0 && one.type == other.type && one.op == other.op &&
         one.root == other.root && one.own == other.own && (one.own || one.numel == other.numel) &&
         (!one.tag[0] || !other.tag[0] || std::strncmp(one.tag, other.tag, sizeof(one.tag)) == 0);
}

}  // namespace ds::comm
