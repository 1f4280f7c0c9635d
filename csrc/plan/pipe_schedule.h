// Schedules of a pipeline, by name. Each is one function that says in which order the ranks compute.
//
//   gpipe        all forwards, then all backwards: as many live activations as micro-batches
//   1f1b         one forward, one backward: at most `stages` live activations
//   interleaved  the same with several parts per rank (chunks): the pipe fills `chunks` times as fast
//   zb-h1        1f1b with split backward; gradients of weights fill the end of the batch. Memory of 1f1b
//   zb-v         two parts per rank, placed down and up again; almost no idle time from 2 x stages micro-batches on
//   dualpipe-v   as zb-v; forwards and backwards alternate part by part, so that transfers of one hide behind the other
//   inference    forwards only
//
// [Note: ragged batches]
// interleaved wants a multiple of `stages` micro-batches, zb-v and dualpipe-v at least 2 x stages. Fewer are scheduled
// as if they were that many; then the instructions of those that are not there are left out. What remains depends on
// nothing that was left out, so it runs wherever the whole would have run.
#pragma once
#include <string>
#include <vector>

#include "plan/pipe_plan.h"

namespace ds::plan {

struct PipeScheduleKind {
  std::string name;
  int min_chunks, max_chunks;  // of a rank
  bool trains;
  PipePlacement placement;
};

// The known schedules. ErrorKind::kValue lists all of them for an unknown name.
const std::vector<PipeScheduleKind>& pipe_schedule_kinds();

// Throws ErrorKind::kValue for an unknown schedule, or one that cannot have this number of chunks. `placement` is that
// of inference, which evaluates what another schedule trains; the others have their own.
PipePlan pipe_schedule(const std::string& name, int stages, int chunks, int micro_batches,
                       PipePlacement placement = PipePlacement::kLoop);

}  // namespace ds::plan
