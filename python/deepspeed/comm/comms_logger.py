"""The record of communication operations: what, how large, how long; as lines, as a table, as a dict."""

import copy
import time

import torch.distributed

from deepspeed import _native
from deepspeed.comm.bandwidth import bandwidths, readable_size
from deepspeed.log import logger, print_rank

trimmed_mean = _native._C.trimmed_mean  # without the smallest and the largest tenth: one hiccup is not the speed


def _world_size():
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if initialized else 1


class CommsLogger:
    """One for each process; see ``deepspeed.comm.configure``.

    ``comms_dict``: name of the operation -> bytes -> ``[count, [ms], [algorithm Gbit/s], [bus Gbit/s]]``.
    """

    def __init__(self):
        self.recorder = None  # of the native log, which ``collect`` reads
        self.comms_dict = {}
        self.verbose = False
        self.debug = False
        self.prof_ops = []
        self.prof_all = True
        self._enabled = False
        self.on_switch = lambda on: None  # told when recording starts and ends

    @property
    def enabled(self):
        return self._enabled

    @enabled.setter
    def enabled(self, on):
        on = bool(on)
        if on != self._enabled:
            self._enabled = on
            self.on_switch(on)

    def configure(self, comms_config):
        """Takes the section ``comms_logger``: an object with ``enabled``, ``verbose``, ``debug``, ``prof_ops`` and
        ``prof_all``, or one that has it as ``comms_logger`` beside ``comms_logger_enabled``."""
        section = getattr(comms_config, "comms_logger", comms_config)
        self.verbose = bool(section.verbose)
        self.debug = bool(section.debug)
        self.prof_ops = list(section.prof_ops)
        self.prof_all = bool(section.prof_all)
        self.enabled = getattr(comms_config, "comms_logger_enabled", getattr(section, "enabled", False))

    # ---- which operations ------------------------------------------------------------------------------------------
    def wants(self, name, asked=False):
        """Whether the operation with this log name is recorded; ``asked``: its caller says so."""
        return self._enabled and (self.prof_all or asked or name in self.prof_ops)

    def start_profiling_comms(self):
        """Records all operations from now on."""
        self.prof_all = True

    def stop_profiling_comms(self):
        """Records only those in ``prof_ops``, and those whose callers ask for it."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list):
        """Records these, too."""
        self.prof_ops = list(dict.fromkeys([*self.prof_ops, *op_name_list]))

    def stop_profiling_op(self, op_name_list):
        """No longer records these, where not all are recorded."""
        self.prof_ops = [name for name in self.prof_ops if name not in op_name_list]

    # ---- the record ------------------------------------------------------------------------------------------------
    def append(self, raw_name, record_name, latency, msg_size):
        """Adds an operation among all ranks: the function's name, the name it is recorded under, ms, bytes."""
        self.add(raw_name, record_name, latency, msg_size, _world_size())

    def add(self, raw_name, record_name, latency, msg_size, ranks):
        """``append`` for an operation among ``ranks``."""
        algorithm, bus = bandwidths(raw_name, msg_size, latency, ranks)
        entry = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        entry[0] += 1
        for values, value in zip(entry[1:], (latency, algorithm, bus), strict=True):
            values.append(value)
        if self.verbose and print_rank() == 0:
            logger.info(
                "rank=0 | comm op: %s | time (ms): %.2f | msg size: %s | algbw (Gbps): %.2f | busbw (Gbps): %.2f",
                record_name,
                latency,
                readable_size(msg_size),
                algorithm,
                bus,
            )

    def collect(self):
        """Takes over the calls that the native log has recorded since the last time."""
        for call in self.recorder.take() if self._enabled and self.recorder is not None else ():
            name, label = call.op, call.label
            if label or self.wants(name):
                debug = f"{name} | [Caller Func: {call.caller}]" if self.debug else name
                ms = (call.end - call.begin) * 1e3
                self.add(name, label or debug, ms, call.bytes, call.ranks or _world_size())

    def has_data(self):
        return bool(self.comms_dict)

    def reset_data(self):
        """Forgets what was recorded."""
        self.comms_dict = {}

    def get_raw_data(self):
        """A copy of ``comms_dict``."""
        return copy.deepcopy(self.comms_dict)

    def get_operation_names(self):
        return list(self.comms_dict)

    def get_total_operations(self):
        """The number of recorded operations."""
        return sum(entry[0] for sizes in self.comms_dict.values() for entry in sizes.values())

    def get_operation_summary(self, operation_name):
        """bytes -> dict of figures (``count``, ``total_latency_ms``, ...); {} for an operation that is not there."""
        sizes = sorted(self.comms_dict.get(operation_name, {}).items())
        return {size: _native._C.call_figures(size, entry) for size, entry in sizes}

    # ---- the summary -----------------------------------------------------------------------------------------------
    def log_all(self, print_log=True, show_straggler=False, return_dict=False):
        """The summary: a table in the log with ``print_log``, a dict with ``return_dict``.

        The averages leave out the fastest and the slowest tenth. ``show_straggler``: every rank calls it with the same
        record; the ranks exchange their times. The straggler effect of an operation is how long this rank was in it
        beyond the rank that was in it for the shortest time, which is the one that came last: the others waited for it.
        """
        log, everyone = list(self.comms_dict.items()), self._times_of_all_ranks() if show_straggler else None
        if print_log:
            logger.info("%s", _native._C.call_table(log, everyone))
        if not return_dict:
            return None
        initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        found = {
            "summary": {name: self.get_operation_summary(name) for name in self.comms_dict},
            "metadata": {
                "world_size": _world_size(),
                "rank": torch.distributed.get_rank() if initialized else 0,
                "timestamp": time.time(),
            },
        }
        if show_straggler:
            found["straggler_analysis"] = _native._C.call_stragglers(log, everyone)
        return found

    def _times_of_all_ranks(self):
        mine = {name: {size: entry[1] for size, entry in sizes.items()} for name, sizes in self.comms_dict.items()}
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return [mine]
        everyone = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, mine)
        return everyone
