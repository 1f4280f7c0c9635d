"""Records some steps of all ranks for https://ui.perfetto.dev."""

import json
import socket
import weakref

import torch

from deepspeed.comm.timed import suppress_logging
from deepspeed.engine import checks
from deepspeed.engine.members import Part, engine_parts, member
from deepspeed.log import log_dist, logger
from deepspeed.profiling import trace
from deepspeed.profiling.clocks import aligned


@engine_parts.add("_tracing")
class Tracing(Part):
    """A part of the engine. Every rank records, and rank 0 writes one file."""

    _recorder = _told = None
    _left = 0  # steps to record

    @member
    def trace(self, steps=1, path="trace.json"):
        """Records the next ``steps`` steps of all ranks, which all call it, and writes them to ``path`` on rank 0.

        The file is for https://ui.perfetto.dev: phases, modules, collectives, copies of offload; the operations of
        torch while a profiler of torch runs.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"engine.trace: steps is a whole number of at least 1, got {steps!r}")
        if self._recorder is not None:
            raise RuntimeError(f"engine.trace: {self._left} steps of another trace are still to be recorded")
        told = self.engine._outputs.problem_with("trace.path", path) if self.engine.global_rank == 0 else None
        checks.refuse_on_all(self.engine, told)
        checks.check_file(self.engine, path, "engine.trace: path")
        self._begin(steps, path)

    def start(self):
        section = self.engine._config.trace_config
        self._start_step = section.start_step
        if self._start_step is None:
            return
        checks.check_file(self.engine, self.engine._outputs.paths["trace.path"], "trace.path")
        self._told = weakref.finalize(self.engine, _tell_of_missing, self._start_step, self.engine.global_rank)
        self._follow_section()

    def _follow_section(self):
        """Begins what the section ``trace`` asks for, after a trace that is being recorded."""
        section = self.engine._config.trace_config
        if self._start_step is None or self._recorder is not None or self.engine.global_steps + 1 < self._start_step:
            return
        self._start_step = None
        self._told.detach()
        self._begin(section.steps, self.engine._outputs.paths["trace.path"])

    def after_step(self):
        if self._recorder is not None:
            self._left -= 1
            if self._left == 0:
                self._finish()
        self._follow_section()

    def stop(self):
        if self._recorder is not None:
            self._finish()
        if self._told is not None:
            self._told()

    def _begin(self, steps, path):
        engine, storage = self.engine, None
        if engine.core is not None:
            storage = engine.core.storage
        self._left, self._path, self._clock = steps, path, (0.0, 0.0)
        if engine.world_size > 1:
            with suppress_logging():
                self._clock = aligned(engine._step_log.all_ranks())
        self._recorder = trace.Recorder(engine.module, engine._step_log.phases, storage)
        self._recorder.begin()

    def _finish(self):
        recorder, self._recorder = self._recorder, None
        recorder.end()
        offset, error = self._clock
        mine = {"host": socket.gethostname(), "offset": offset, "error": error, "rows": recorder.rows}
        try:
            ranks = self._gathered(mine)
            if self.engine.global_rank == 0:
                trace.write(self._path, ranks)
                log_dist(f"the trace of {len(ranks)} ranks is in {self._path}", ranks=[0])
        except OSError as found:
            logger.warning(f"the trace was not written: {found}. The training goes on")

    def _gathered(self, mine):
        """The record of each rank, on rank 0; [] on the others."""
        if self.engine.world_size == 1:
            return [mine]
        data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        sizes, found = torch.zeros(self.engine.world_size, 1, dtype=torch.int64), [mine]
        ranks = self.engine._step_log.all_ranks()
        with suppress_logging():
            own = torch.tensor([data.numel()], dtype=torch.int64)
            ranks.run("all_gather", input=own, output=sizes, tag="trace").wait()
            if self.engine.global_rank != 0:
                ranks.run("send", input=data, peer=0, tag="trace").wait()
                return []
            for rank in range(1, self.engine.world_size):
                received = torch.empty(int(sizes[rank]), dtype=torch.uint8)
                ranks.run("recv", output=received, peer=rank, tag="trace").wait()
                found.append(json.loads(bytes(received.numpy())))
        return found


def _tell_of_missing(step, rank):
    if rank == 0:
        logger.warning(f"trace.start_step is {step}, and the training has ended before that step: there is no trace")
