"""The work of the ranks of a job in some steps, as one file for https://ui.perfetto.dev.

A row is ``[track, name, begin, end, values]`` of something that a rank has done, with times of its ``perf_counter``.
"""

import json
import threading
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed import _native
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import timed
from deepspeed.utils.nvtx import DEEPSPEED_NVTX_DOMAIN

TRACKS = ("phases", "modules", "communication", "offload", "torch")
_LANES = 100  # numbers of threads between two tracks: rows that overlap are side by side
_COMPUTING = ("forward", "backward", "optimizer")


class Recorder:
    """The rows of this rank from ``begin`` to ``end``: phases, calls of modules, collectives, copies between memories,
    and torch's operations while a profiler of torch runs. Phases and modules are ranges of that profiler, too."""

    def __init__(self, module, phases, storage):
        self.rows, self._module, self._phases, self._storage = [], module, phases, storage
        self._calls = _native._C.CallRecorder(waits=False)
        self._hooks, self._threads, self._modes = [], threading.local(), []
        accelerator = get_accelerator()
        self._domain = {"domain": DEEPSPEED_NVTX_DOMAIN} if accelerator.supports_nvtx_domain else {}

    def begin(self):
        timed.listen(self._calls)
        self._phases.listeners.append(self)
        if self._storage is not None:
            self._storage.record_copies(True)
        for name, one in self._module.named_modules():
            self._hooks.append(one.register_forward_pre_hook(self._entered(name or type(one).__name__)))
            self._hooks.append(one.register_forward_hook(self._left(name or type(one).__name__)))

    def end(self):
        """Nothing listens or is hooked any more."""
        while self._hooks:
            self._hooks.pop().remove()
        if self in self._phases.listeners:
            self._phases.listeners.remove(self)
        timed.stop_listening(self._calls)
        self._close(0)
        while self._modes:
            self._modes.pop().__exit__(None, None, None)
        for call in self._calls.take():
            values = {key: getattr(call, key) for key in ("bytes", "tag", "group", "number")}
            values.update(purpose=purpose_of(call.group), blocked_ms=call.blocked * 1e3)
            self.rows.append(["communication", call.op, call.begin, call.end, values])
        for plane, medium, read, size, begin, end in self._storage.take_copies() if self._storage is not None else ():
            name = f"{'read' if read else 'write'} {medium}"
            self.rows.append(["offload", name, begin, end, {"plane": plane, "bytes": size}])
        if self._storage is not None:
            self._storage.record_copies(False)

    # ---- ranges ------------------------------------------------------------------------------------------------------
    @property
    def _open(self):
        """``(track, name, begin, range)`` of this thread, innermost last."""
        return self._threads.__dict__.setdefault("open", [])

    def _enter(self, track, name):
        one = torch.profiler.record_function(name)
        one.__enter__()
        get_accelerator().range_push(name, **self._domain)
        self._open.append((track, name, time.perf_counter(), one))

    def _close(self, depth):
        """Ends the ranges above ``depth``: those inside of one that ends have been left by an exception."""
        while len(self._open) > depth:
            track, name, begin, one = self._open.pop()
            self.rows.append([track, name, begin, time.perf_counter(), {}])
            get_accelerator().range_pop(**self._domain)
            one.__exit__(None, None, None)

    def _leave(self, track, name):
        found = [depth for depth, one in enumerate(self._open) if one[:2] == (track, name)]
        if found:  # else it began before the recording
            self._close(found[-1])

    def begin_phase(self, name):
        self._enter("phases", name)
        if name in _COMPUTING and torch.autograd._profiler_enabled():
            self._modes.append(_Operations(self.rows))
            self._modes[-1].__enter__()

    def end_phase(self, name):
        if name in _COMPUTING and self._modes:
            self._modes.pop().__exit__(None, None, None)
        self._leave("phases", name)

    def _entered(self, name):
        return lambda module, given: self._enter("modules", name)

    def _left(self, name):
        return lambda module, given, made: self._leave("modules", name)


class _Operations(TorchDispatchMode):
    def __init__(self, rows):
        super().__init__()
        self._rows = rows

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        begin = time.perf_counter()
        made = func(*args, **(kwargs or {}))
        self._rows.append(["torch", str(func), begin, time.perf_counter(), {}])
        return made


def purpose_of(group):
    """The purpose of the calls of a group, as the mesh knows it; "" of other groups."""
    parts = group.split("/")
    return parts[1] if parts[0] == "mesh" and len(parts) > 2 else ""


# ---- the file --------------------------------------------------------------------------------------------------------
def write(path, ranks):
    """Writes a file in Chrome's format. ``ranks``: of each in order ``{"host", "offset", "error", "rows"}``, the second
    and third as ``clocks.aligned`` gives them."""
    hosts = {one["host"]: {"offset_s": one["offset"], "error_s": one["error"]} for one in ranks}
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "deepspeed": %s, "traceEvents": [\n' % json.dumps({"clocks": hosts}))
        for number, event in enumerate(events_of(ranks)):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")


def events_of(ranks):
    """The events of the file. Times begin with the first row. Calls of one collective are linked by a flow."""
    start = min((row[2] - one["offset"] for one in ranks for row in one["rows"]), default=0.0)
    flows, events = {}, []
    for rank, one in enumerate(ranks):
        events.append(_named("process_name", rank, 0, f"rank {rank} on {one['host']}"))
        lanes = {}  # (track, number) -> end of the last row there
        for track, name, begin, end, values in sorted(one["rows"], key=lambda row: (row[2], -row[3])):
            lane = _lane(lanes, track, begin, end)
            thread, at = TRACKS.index(track) * _LANES + lane, (begin - one["offset"] - start) * 1e6
            place = {"pid": rank, "tid": thread, "ts": round(at, 3)}
            events.append({"ph": "X", "name": name, "dur": round((end - begin) * 1e6, 3), **place, "args": values})
            if values.get("group") and values.get("number", -1) >= 0:
                flows.setdefault((values["group"], values["number"]), []).append((at, place, name))
        for track, lane in lanes:
            events.append(_named("thread_name", rank, TRACKS.index(track) * _LANES + lane, track))
    for number, ends in enumerate(ends for ends in flows.values() if len(ends) > 1):
        ends.sort(key=lambda end: end[0])
        for position, (_, place, name) in enumerate(ends):
            kind = "s" if position == 0 else "f" if position == len(ends) - 1 else "t"
            events.append({"ph": kind, "id": number, "cat": "collective", "name": name, "bp": "e", **place})
    return events


def _lane(lanes, track, begin, end):
    """The first lane of the track in which the row overlaps no other one; rows of one thread lie inside each other."""
    if track in ("phases", "modules", "torch"):
        lanes[track, 0] = end
        return 0
    lane = next((lane for lane in range(_LANES - 1) if lanes.get((track, lane), begin) <= begin), _LANES - 1)
    lanes[track, lane] = end
    return lane


def _named(kind, process, thread, name):
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
