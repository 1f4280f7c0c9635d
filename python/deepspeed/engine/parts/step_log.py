"""The figures of each step: phases and their times, memory by owner, speed; as dicts, and as lines of JSON."""

import collections
import contextlib
import json
import math
import os
import socket
import time
import weakref

import torch

from deepspeed import _native
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import mesh_views
from deepspeed.comm.timed import call_log, suppress_logging
from deepspeed.config import changed_values
from deepspeed.config.secrets import shown
from deepspeed.engine import checks
from deepspeed.engine.members import Part, engine_parts, member
from deepspeed.log import log_dist, logger
from deepspeed.profiling.phases import PHASES, Phases, PhaseTimes
from deepspeed.registry import load_target

VERSION = 1  # of the file
KEPT = 1000  # steps that ``step_log()`` returns
_OTHERS = ("communication", "gathers")  # a rank waits for other ones, or at ``gathers`` its host for its own device
_HOST_BYTES = 64


@engine_parts.add("_step_log")
class StepLog(Part):
    """A part of the engine. ``phases`` is there while the engine is made, and counts from its end on."""

    rank_times = None  # of the ranks, in the last report: ``{"min", "max", "slowest_rank", ...}``

    def __init__(self, engine):
        super().__init__(engine)
        self.section = engine._config.step_log_config
        self.phases = Phases()
        self.kept = collections.deque(maxlen=KEPT)
        self._file = self._loss = self._pending = self._all = self._names = self._leave = self._waits = None
        self._last_wait = None  # of the stream, in the last step that is finished; None on the CPU
        self._peak = None
        self._recent = []  # phases and waits of the stream, of the steps since the ranks have compared theirs

    # ---- begin and end -----------------------------------------------------------------------------------------------
    def start(self):
        engine, section = self.engine, self.section
        if engine.core is not None:
            self.phases.clock = engine.core.clock
        clock = self.phases.clock
        self.times = PhaseTimes(clock)
        self._compares = engine.world_size > 1 and engine.progress.every is not None
        if not section.enabled and not engine.wall_clock_breakdown():
            return
        if section.enabled and section.file is not None:
            self._open()
        clock.turn(True)
        streams = section.enabled and not get_accelerator().is_synchronized_device()
        self._waits = self.phases.waits = _native._C.StepWaits(clock, str(engine.device) if streams else "cpu")
        call_log.add(self._waits)
        self._leave = weakref.finalize(engine, call_log.remove, self._waits)
        self._leave.atexit = False

    def _open(self):
        engine, path = self.engine, self.engine._outputs.paths["step_log.file"]
        checks.check_file(engine, path, "step_log.file")
        if engine.global_rank == 0:
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
            if _ends_in_a_line(path):
                self._append("\n")
        self._write(
            {
                "kind": "run",
                "version": VERSION,
                "world_size": engine.world_size,
                "ranks": self._hosts(),
                "config": shown(engine._config.native.values()),
                "config_changed": changed_values(engine._config),
                "start": time.time(),
            }
        )

    def stop(self):
        self._finish_pending()
        if self._leave is not None:
            self._leave()
            self.phases.clock.turn(False)
            self._leave = self.phases.waits = None
        if self._file is not None:
            self._file.close()
        self._file = self._all = None

    # ---- what a step is made of --------------------------------------------------------------------------------------
    @member
    def step_log(self):
        """The last steps, at most 1,000: a list of dicts, oldest first, as docs/tutorials/profiling.md says; [] while
        ``step_log.enabled`` is false."""
        self._finish_pending()
        return list(self.kept)

    def before_step(self):
        self._loss = self.engine.losses

    def after_step(self):
        engine = self.engine
        if not self.section.enabled:
            return
        wall, phases, _ = self.times.take()
        samples, flops, norm = engine._data.last_samples, engine._operations.of_step, engine._steps.norm
        row = {
            "kind": "step",
            "step": engine.global_steps,
            "samples": engine.global_samples,
            "wall": wall,
            "phases": phases,
            "stream_wait": None,
            "loss": None,
            "lr": next(iter(engine.get_lr()), 0.0),
            "grad_norm": norm if norm is not None and math.isfinite(norm) else None,
            "loss_scale": engine.loss_scale(),
            "skipped": not engine._steps.applied,
            "memory": self._memory(),
            "samples_per_sec": samples / wall if wall > 0 else 0.0,
            "tokens_per_sec": None,
            "mfu": flops / wall / self._peak_flops() if flops and wall > 0 else None,
        }
        self._finish_pending(waits=False)
        self._waits.end_step()
        loss = getattr(engine, "agg_train_loss", self._loss)
        self._pending, self._loss = (row, _Copied(loss), _Copied(engine._tokens.of_rank)), None
        if engine.device.type == "cpu":
            self._finish_pending()
        if self._compares and engine.progress.due:
            self._compare_ranks()

    def _finish_pending(self, waits=True):
        """``waits`` False: the host has waited for the norm of a later step."""
        if self._pending is None:
            return
        (row, loss, tokens), self._pending = self._pending, None
        value, tokens = loss.read(waits), tokens.read(waits)
        row["loss"] = value if value is not None and math.isfinite(value) else None
        if tokens and row["wall"] > 0:
            row["tokens_per_sec"] = tokens * self.engine.parallel.dp_world_size / row["wall"]
        row["stream_wait"] = self._last_wait = self._waits.take()
        if self._compares:
            self._recent.append([*row["phases"].values(), self._last_wait or 0.0])
        self.kept.append(row)
        self._write(row)

    def _memory(self):
        held = collections.Counter(self.engine.stepping.bytes)
        return {
            "parameters": held["lp"],
            "gradients": held["grad"] + held["local"],
            "masters": held["master"],
            "states": held["slots"],
            "gathered": held["gathered"],
            "wire": held["wire"],
            "peak": get_accelerator().max_memory_allocated(),
        }

    def _peak_flops(self):
        if self._peak is None:
            given = self.section.peak_tflops
            dtype = next((param.dtype for param in self.engine.module.parameters()), torch.float32)
            measure = load_target("deepspeed.profiling.peak:peak_flops")
            self._peak = given * 1e12 if given is not None else measure(self.engine.device, dtype)
        return self._peak

    # ---- all ranks ---------------------------------------------------------------------------------------------------
    def all_ranks(self):
        """The communicator of all ranks for logs and traces. They open it together, at its first use."""
        if self._all is None:
            self._all = mesh_views.adopted_by_all()
        return self._all

    def _gather(self, mine):
        """A row of numbers from each rank."""
        if self.engine.world_size == 1:
            return mine[None]
        rows = torch.zeros(self.engine.world_size, mine.numel(), dtype=mine.dtype)
        with suppress_logging():
            self.all_ranks().run("all_gather", input=mine, output=rows, tag="step_log").wait()
        return rows

    def _hosts(self):
        """The names of the hosts of all ranks."""
        if self._names is not None:
            return self._names
        name = socket.gethostname().encode()[:_HOST_BYTES]
        rows = self._gather(torch.tensor(list(name.ljust(_HOST_BYTES, b"\0")), dtype=torch.uint8))
        self._names = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
        return self._names

    def _compare_ranks(self):
        """Finds the slowest rank: the one that waited least for the others, on the host or on the device. Its slowest
        phase is the one with the largest gap to the fastest rank. Gathers of a device are waits of its stream, and are
        counted there, because all hosts wait equally long for their devices then. The last step counts in the next
        report where a device has not ended it."""
        if not self._recent:
            return
        rows, self._recent = self._gather(torch.tensor(self._recent, dtype=torch.float64).mean(0)), []
        own = [number for number, name in enumerate(PHASES) if name not in _OTHERS]
        rows, streams = rows[:, :-1], rows[:, -1]
        least, most, alone = rows.min(0).values, rows.max(0).values, rows[:, own].sum(1)
        if self._last_wait is not None:
            alone += rows[:, PHASES.index("gathers")]
        slowest = int(torch.minimum(alone, rows.sum(1) - streams).argmax())
        phase = PHASES[max(own, key=lambda number: float(rows[slowest, number] - least[number]))]
        self.rank_times = {
            "kind": "ranks",
            "step": self.engine.global_steps,
            "min": dict(zip(PHASES, least.tolist(), strict=True)),
            "max": dict(zip(PHASES, most.tolist(), strict=True)),
            "slowest_rank": slowest,
            "slowest_phase": phase,
            "host": self._hosts()[slowest],
        }
        number = PHASES.index(phase)
        log_dist(
            f"step={self.engine.global_steps}, slowest rank {slowest} on {self.rank_times['host']}: {phase} "
            f"{rows[slowest, number] * 1e3:.1f} ms a step, on the fastest rank {least[number] * 1e3:.1f} ms",
            ranks=[0],
        )
        self._write(self.rank_times)

    def _write(self, row):
        if self._file is None:
            return
        self._append(json.dumps(row, default=str) + "\n")

    def _append(self, text):
        try:
            self._file.write(text)
        except OSError as error:
            logger.warning(f"step_log.file: {error}. The training goes on, and no more lines are written")
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _ends_in_a_line(path):
    """Whether the last line of a file has no end, because the run that wrote it was killed."""
    try:
        with open(path, "rb") as file:
            if not os.path.isfile(path) or file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False


class _Copied:
    """A number of the device on its way to the host, or one that the host has."""

    def __init__(self, value):
        self._value, self._there = value, None
        if not torch.is_tensor(value) or value.device.type == "cpu":
            return
        accelerator = get_accelerator()
        self._value = accelerator.pin_memory(torch.empty((), dtype=value.dtype))
        self._there, self._stream = accelerator.Event(), accelerator.current_stream()
        self._value.copy_(value.detach().reshape(()), non_blocking=True)
        self._there.record()

    def read(self, waits):
        """The number; None for None. ``waits`` False: the host has waited for later work of the current stream."""
        if self._there is not None and (waits or self._stream != get_accelerator().current_stream()):
            self._there.synchronize()
        return self._value.item() if torch.is_tensor(self._value) else self._value
