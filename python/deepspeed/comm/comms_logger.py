"""The record of communication operations: what, how large, how long; as lines, as a table, as a dict."""

import copy
import time

import torch.distributed

from deepspeed.comm.bandwidth import bandwidths, readable_size
from deepspeed.log import logger, print_rank

_WIDTH = 20
_COLUMNS = ("Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)")
_STRAGGLER_COLUMNS = ("Count", "Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)", "Avg straggler(ms)")


def trimmed_mean(values, share=0.1):
    """The mean without the smallest and the largest ``share`` of the values: one hiccup is not the speed."""
    values = sorted(values)
    cut = int(len(values) * share)
    kept = values[cut : len(values) - cut] or values
    return sum(kept) / len(kept) if kept else 0.0


class CommsLogger:
    """One for each process; see ``deepspeed.comm.configure``.

    ``comms_dict``: name of the operation -> bytes -> ``[count, [ms], [algorithm Gbit/s], [bus Gbit/s]]``.
    """

    def __init__(self):
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
        initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.add(raw_name, record_name, latency, msg_size, torch.distributed.get_world_size() if initialized else 1)

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
        """How many operations were recorded."""
        return sum(entry[0] for sizes in self.comms_dict.values() for entry in sizes.values())

    def get_operation_summary(self, operation_name):
        """bytes -> dict of figures (``count``, ``total_latency_ms``, ...); {} for an operation that is not there."""
        return {
            size: self._figures(size, entry) for size, entry in sorted(self.comms_dict.get(operation_name, {}).items())
        }

    @staticmethod
    def _figures(size, entry):
        count, latencies, algorithm, bus = entry
        return {
            "count": count,
            "total_latency_ms": sum(latencies),
            "avg_latency_ms": trimmed_mean(latencies),
            "tput_avg_gbps": trimmed_mean(algorithm),
            "busbw_avg_gbps": trimmed_mean(bus),
            "msg_size_bytes": size,
            "msg_size_str": readable_size(size),
        }

    # ---- the summary -----------------------------------------------------------------------------------------------
    def log_all(self, print_log=True, show_straggler=False, return_dict=False):
        """The summary: a table in the log with ``print_log``, a dict with ``return_dict``.

        The averages leave out the fastest and the slowest tenth. ``show_straggler``: every rank calls it with the same
        record; the ranks exchange their times. The straggler effect of an operation is how long this rank was in it
        beyond the rank that was in it for the shortest time, which is the one that came last: the others waited for it.
        """
        stragglers = self._stragglers() if show_straggler else None
        if print_log:
            logger.info("%s", self._table(stragglers))
        if not return_dict:
            return None
        initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        found = {
            "summary": {name: self.get_operation_summary(name) for name in self.comms_dict},
            "metadata": {
                "world_size": torch.distributed.get_world_size() if initialized else 1,
                "rank": torch.distributed.get_rank() if initialized else 0,
                "timestamp": time.time(),
            },
        }
        if stragglers is not None:
            found["straggler_analysis"] = stragglers
        return found

    def _stragglers(self):
        """name -> bytes -> figures, from the times of all ranks. Operations that another number of ranks has seen
        another number of times are compared among those that agree with this rank."""
        mine = {name: {size: entry[1] for size, entry in sizes.items()} for name, sizes in self.comms_dict.items()}
        everyone = [mine]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            everyone = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, mine)
        found = {}
        for name, sizes in mine.items():
            for size, times in sorted(sizes.items()):
                others = [theirs.get(name, {}).get(size, ()) for theirs in everyone]
                comparable = [theirs for theirs in others if len(theirs) == len(times)]
                effect = [own - min(column) for own, column in zip(times, zip(*comparable))]  # noqa: B905 (equal)
                found.setdefault(name, {})[size] = {
                    "count": len(times),
                    "total_comm_lat_ms": sum(times),
                    "total_straggler_ms": sum(effect),
                    "avg_comm_lat_ms": trimmed_mean(times),
                    "avg_straggler_ms": trimmed_mean(effect),
                    "ranks_compared": len(comparable),
                }
        return found

    def _table(self, stragglers):
        lines = ["", _row("Comm. Op", "Message Size", *_COLUMNS)]
        for name in self.comms_dict:
            lines.append(name)
            for size, row in self.get_operation_summary(name).items():
                figures = (row["total_latency_ms"], row["avg_latency_ms"], row["tput_avg_gbps"], row["busbw_avg_gbps"])
                lines.append(_row("", readable_size(size), row["count"], *(f"{figure:.2f}" for figure in figures)))
        if stragglers is not None:
            lines += ["", _row("Comm. Op", "Message Size", *_STRAGGLER_COLUMNS)]
            for name, sizes in stragglers.items():
                lines.append(name)
                for size, row in sizes.items():
                    keys = ("total_comm_lat_ms", "total_straggler_ms", "avg_comm_lat_ms", "avg_straggler_ms")
                    lines.append(_row("", readable_size(size), row["count"], *(f"{row[key]:.2f}" for key in keys)))
        return "\n".join(lines)


def _row(*cells):
    return "".join(str(cell).ljust(_WIDTH) for cell in cells).rstrip()
