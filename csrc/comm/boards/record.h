// The fingerprint of a collective that a rank enters. It is compared between the ranks and kept in the flight
// recorder.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/calls/op.h"

namespace ds::comm {

struct Record {
  char what[24] = "";  // name of the operation
  char tag[72] = "";   // what it is for: a parameter's name, as a rule; "": the caller did not say
  int32_t type = -1;   // c10::ScalarType
  int32_t op = -1;     // ReduceOp
  int32_t root = -1;
  int32_t own = 0;      // 1: numel may differ between the ranks
  int64_t numel = 0;    // elements of the tensor that this rank gives
  uint64_t counts = 0;  // of the counts that are the same on all ranks; 0: there are none
  // For kAllToAll: checksums of the counts that this rank gives to each rank, and takes from each. Over all ranks they
  // add up to the same, unless some rank gives another what that one does not take.
  uint64_t given = 0, taken = 0;
  int64_t longest = 0;  // not compared: whatever the operation wants all ranks to know
  int64_t at_us = 0;    // not compared: when the rank came, by now_us()
};

Record record(const char* what, int64_t numel = 0, int32_t type = -1, const std::string& tag = {});
// The root of a message is the other rank. `rank`, `size`: of the group.
Record record_of(const Op& op, int rank, int size);
// Fills `given` and `taken`. Counts by rank.
void add_parts(Record& record, int rank, const std::vector<int64_t>& give, const std::vector<int64_t>& take);
std::string describe(const Record& record);  // all_reduce(10 x float32, sum) of "layer.weight"
std::string type_name(int32_t type);         // of a c10::ScalarType, as torch's dtypes are called: bfloat16
// Whether two ranks may meet with these. Tags count where both have one.
bool fits(const Record& one, const Record& other);
// Whether what all ranks give each other is what they take; `records`: of all ranks of the group.
bool gives_what_is_taken(const std::vector<Record>& records);

// Microseconds of the clock that all processes of a host share.
inline int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch()).count();
}

}  // namespace ds::comm
