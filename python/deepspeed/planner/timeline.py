"""``ds_plan --timeline``: a planned step as a file for chrome://tracing or https://ui.perfetto.dev."""

import json

from deepspeed._native import _C
from deepspeed.profiling.trace import purpose_of

_FIRST = _C.StepPlan.HOST, _C.StepPlan.COMPUTE


def write(path, ranks):
    """``ranks``: plans of ranks, with their timelines."""
    events = [event for one in ranks for event in _events(one.rank, one.timeline)]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file)


def _events(rank, rows):
    lanes = list(dict.fromkeys([*_FIRST, *(row[0] for row in rows)]))
    events = [{"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}]
    for number, lane in enumerate(lanes):
        purpose = purpose_of(lane)
        name = lane if lane in _FIRST else f"calls: {f'{purpose} ({lane})' if purpose else lane}"
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}})
        events.append(
            {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}
        )
    for lane, name, phase, begin, end, exposed in rows:
        values = {"phase": phase, **({} if lane in _FIRST else {"exposed_us": exposed / 1e3})}
        place = {"pid": rank, "tid": lanes.index(lane), "ts": begin / 1e3, "dur": (end - begin) / 1e3}
        events.append({"ph": "X", "name": name, **place, "args": values})
    return events
