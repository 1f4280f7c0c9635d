"""Schedules as scripts see them: for each stage, an iterator over steps, which are lists of instructions.

Ours read a plan of ``csrc/plan/pipe_schedule.h``. Clients derive from ``PipeSchedule`` and yield their own steps;
``plan_of`` turns such a schedule into a plan, which can be proven to run.
"""

import functools
from abc import ABC, abstractmethod

from deepspeed import _native
from deepspeed.pipe import instructions
from deepspeed.pipe.instructions import (  # noqa: F401
    BackwardInputPass,
    BackwardPass,
    BackwardWeightPass,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from deepspeed.utils.forwarding import forwarded


def _is_even(x):
    return x % 2 == 0


def _is_odd(x):
    return x % 2 != 0


_PASSES = ("ForwardPass", "BackwardPass", "BackwardInputPass", "BackwardWeightPass")
_MESSAGES = ("SendActivation", "RecvActivation", "SendGrad", "RecvGrad")


class PipeSchedule(ABC):
    """The instructions of stage ``stage_id`` of ``stages`` for a batch of ``micro_batches``.

    A step is what a stage does between two points at which neighbours are in step with it: iterating gives the steps.
    """

    def __init__(self, micro_batches, stages, stage_id):
        if not 0 <= stage_id < stages:
            raise ValueError(f"stage_id {stage_id}: a pipeline of {stages} stages has 0 to {stages - 1}")
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self._steps = None

    @abstractmethod
    def steps(self):
        """Yields lists of instructions."""

    def num_pipe_buffers(self):
        """Buffers that the instructions number: at most one for each micro-batch."""
        return self.micro_batches

    stage = forwarded("stage_id", False, "This stage's number.")
    num_stages = forwarded("stages", False, "Stages of the pipeline.")
    num_micro_batches = forwarded("micro_batches", False, "Micro-batches of a batch.")

    @property
    def is_first_stage(self):
        """Whether this stage reads the inputs."""
        return self.stage_id == 0

    @property
    def is_last_stage(self):
        """Whether this stage computes the loss."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id):
        return 0 <= micro_batch_id < self.micro_batches

    def _buffer_idx(self, micro_batch_id):
        assert self._valid_micro_batch(micro_batch_id), f"there is no micro-batch {micro_batch_id}"
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self):
        self._steps = None
        return self

    def __next__(self):
        if self._steps is None:
            self._steps = iter(self.steps())
        return next(self._steps)


class PlannedSchedule(PipeSchedule):
    """The native schedule called ``name``, with ``chunks`` parts of the model on each stage. The last step of one that
    trains reduces gradients and updates."""

    name, chunks = None, 1

    @functools.cached_property
    def plan(self):
        """The native plan of all stages."""
        return _native._C.pipe.schedule(self.name, self.stages, self.chunks, self.micro_batches)

    def num_pipe_buffers(self):
        return max(2, self.plan.buffers[self.stage_id])

    def steps(self):
        shape = self.plan.shape
        first, last = shape.rank_of(0), shape.rank_of(shape.stages * shape.chunks - 1)
        steps = []
        for slot in self.plan.slots(self.stage_id):
            step = []
            for act in slot:
                where = self._where(act)
                part = shape.virtual_stage(self.stage_id, act.chunk)
                loads = part == 0 or (part == shape.stages * shape.chunks - 1 and first != last)
                if act.op == "ForwardPass" and loads:
                    step.append(LoadMicroBatch(act.buffer, **where))
                peer = {"peer": act.peer} if where and act.op in _MESSAGES else {}
                step.append(getattr(instructions, act.op)(act.buffer, **where, **peer))
            steps.append(step)
        if self.plan.trains:
            steps[-1] += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
        yield from steps

    def _where(self, act):
        """With one part on each stage instructions say their buffer only, as clients' do."""
        return {"chunk": act.chunk, "micro": act.micro} if self.plan.shape.chunks > 1 else {}


class NativeSchedule(PlannedSchedule):
    """The instructions of one stage in ``plan``."""

    def __init__(self, plan, stage_id):
        super().__init__(plan.shape.micro_batches, plan.shape.stages, stage_id)
        self.plan = plan


class InferenceSchedule(PlannedSchedule):
    """Forward passes only."""

    name = "inference"


class TrainSchedule(PlannedSchedule):
    """One forward, one backward (1F1B); the last step reduces gradients and updates."""

    name = "1f1b"


class DualPipeVSchedule(PlannedSchedule):
    """Two parts on each stage, down the stages and up again; forward and backward of different micro-batches alternate."""

    name, chunks = "dualpipe-v", 2


class DataParallelSchedule(PipeSchedule):
    """No pipeline: forward and backward of one micro-batch after the other."""

    def num_pipe_buffers(self):
        return 1

    def steps(self):
        for micro_batch in range(self.micro_batches):
            step = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if micro_batch == self.micro_batches - 1:
                step += [ReduceGrads(), OptimizerStep()]
            yield step


def kind_of(instruction):
    """The kind of an instruction in a plan: its class, a base class, or its ``plan_op``; None: it has no such kind."""
    named = getattr(instruction, "plan_op", None)
    for kind in type(instruction).__mro__:
        if named is None and kind.__name__ in _PASSES + _MESSAGES and kind is getattr(instructions, kind.__name__):
            named = kind.__name__
    return named


def plan_of(make_schedule, micro_batches, stages, trains=True):
    """The native plan that ``make_schedule(micro_batches, stages, stage_id)`` of all stages amounts to: its ``check()``
    proves that it runs, or names rank, step and instruction.

    Instructions say which buffer they work on, not which micro-batch: these come in order, as inputs are received (or,
    on the first stage, as forward passes run). Classes of your own that are passes or messages without deriving from
    ours name in ``plan_op`` what they are (``plan_op = "BackwardWeightPass"``); others are no part of the plan.
    """
    ranks, buffers, name = [], [], getattr(make_schedule, "__name__", "schedule")
    for stage in range(stages):
        schedule = make_schedule(micro_batches, stages, stage)
        acts, holds, seen = [], {}, 0
        for instruction in (one for step in schedule for one in step):
            op = kind_of(instruction)
            if op is None:
                continue
            buffer = instruction.buffer_id
            if op == "RecvActivation" or (op == "ForwardPass" and schedule.is_first_stage):
                holds[buffer], seen = seen, seen + 1
            if buffer not in holds:
                raise ValueError(
                    f"pipeline schedule {name}, rank {stage}, step {len(acts)}, {instruction!r}: nothing has been put "
                    f"into buffer {buffer} before"
                )
            peer = -1 if op in _PASSES else stage + (1 if op in ("SendActivation", "RecvGrad") else -1)
            acts.append(_native._C.pipe.Act(op, holds[buffer], 0, buffer, peer))
        ranks.append(acts)
        buffers.append(schedule.num_pipe_buffers())
    return _native._C.pipe.Plan(name, _native._C.pipe.Shape(stages, 1, micro_batches), trains, ranks, buffers)
