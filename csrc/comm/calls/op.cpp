#include "comm/calls/op.h"

#include <array>

namespace ds::comm {

namespace {

enum class Who : uint8_t { kNobody, kAll, kRoot };
enum class Side : uint8_t { kIn, kOut };

// The elements that a rank sends, as a share of the tensor Op::whole().
enum class Sent : uint8_t { kNothing, kTwiceToOthers, kToOthers, kInputToOthers, kOnce, kOwn, kRest };

struct VerbRow {
  const char* name;
  bool reduces, has_peer;
  Who gives, gets;
  Side own, whole;  // the tensor that every rank has; the one that has all parts, where this rank has it
  Sent sent;
};

// In the order of Verb.
constexpr std::array<VerbRow, kVerbs> kRows = {{
    {"all_reduce", true, false, Who::kNobody, Who::kAll, Side::kOut, Side::kOut, Sent::kTwiceToOthers},
    {"reduce", true, true, Who::kNobody, Who::kAll, Side::kOut, Side::kOut, Sent::kOnce},
    {"broadcast", false, true, Who::kNobody, Who::kAll, Side::kOut, Side::kOut, Sent::kOnce},
    {"reduce_scatter", true, false, Who::kAll, Who::kAll, Side::kOut, Side::kIn, Sent::kToOthers},
    {"all_gather", false, false, Who::kAll, Who::kAll, Side::kIn, Side::kOut, Sent::kToOthers},
    {"all_to_all", false, false, Who::kAll, Who::kAll, Side::kIn, Side::kOut, Sent::kInputToOthers},
    {"gather", false, true, Who::kAll, Who::kRoot, Side::kIn, Side::kOut, Sent::kOwn},
    {"scatter", false, true, Who::kRoot, Who::kAll, Side::kOut, Side::kIn, Sent::kRest},
    {"send", false, true, Who::kAll, Who::kNobody, Side::kIn, Side::kIn, Sent::kOwn},
    {"recv", false, true, Who::kNobody, Who::kAll, Side::kOut, Side::kOut, Sent::kNothing},
    {"barrier", false, false, Who::kNobody, Who::kNobody, Side::kOut, Side::kOut, Sent::kNothing},
}};

const VerbRow& row(Verb verb) { return kRows[static_cast<size_t>(verb)]; }
bool is(Who who, bool root) { return who == Who::kAll || (who == Who::kRoot && root); }

}  // namespace

const char* verb_name(Verb verb) { return row(verb).name; }
bool reduces(Verb verb) { return row(verb).reduces; }
bool has_peer(Verb verb) { return row(verb).has_peer; }
bool is_message(Verb verb) { return verb == Verb::kSend || verb == Verb::kRecv; }
bool gives(Verb verb, bool root) { return is(row(verb).gives, root); }
bool gets(Verb verb, bool root) { return is(row(verb).gets, root); }

std::string verb_names() {
  std::string names;
  for (const VerbRow& each : kRows) names += std::string(names.empty() ? "" : ", ") + each.name;
  return names;
}

const at::Tensor& Op::whole() const {
  const at::Tensor &first = row(verb).whole == Side::kIn ? in : out, &second = row(verb).whole == Side::kIn ? out : in;
  return first.defined() ? first : second;
}

const at::Tensor& Op::own() const { return row(verb).own == Side::kIn ? in : out; }

int64_t Op::sent(int rank, int size) const {
  const auto to_others = [size](int64_t numel) { return numel * (size - 1) / size; };
  switch (row(verb).sent) {
    case Sent::kNothing: return 0;
    case Sent::kTwiceToOthers: return to_others(2 * whole().numel());
    case Sent::kToOthers: return to_others(whole().numel());
    case Sent::kInputToOthers: return to_others(in.numel());
    case Sent::kOnce: return size > 1 ? out.numel() : 0;
    case Sent::kOwn: return peer == rank ? 0 : in.numel();
    case Sent::kRest: return peer == rank ? in.numel() - out.numel() : 0;
  }
  return 0;
}

std::vector<Op> Op::each() const {
  Op first = *this;
  first.more = nullptr;
  std::vector<Op> found{first};
  for (size_t i = 0; more && i < more->size(); ++i) {
    first.in = (*more)[i].in;
    first.out = (*more)[i].out;
    found.push_back(first);
  }
  return found;
}

}  // namespace ds::comm
