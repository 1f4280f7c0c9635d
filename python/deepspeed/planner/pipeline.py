"""Plans of pipelines: one rank of each stage is planned in a process of its own, and sends the others its messages,
which have shapes and no values."""

import functools
import itertools
import os
import tempfile
from typing import NamedTuple

from torch import nn

from deepspeed._native import _C
from deepspeed.pipe import instructions as ops
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.schedule import plan_of
from deepspeed.pipe.topology import ProcessTopology
from deepspeed.planner.child import run_each_apart
from deepspeed.planner.step import PlannedRun
from deepspeed.planner.world import Peers
from deepspeed.utils.init_on_device import copy_on_meta

_BACKWARD = {ops.BackwardPass, ops.BackwardInputPass, ops.BackwardWeightPass, ops.SendGrad, ops.RecvGrad}
_PHASES = {**dict.fromkeys((*_BACKWARD, ops.ReduceTiedGrads, ops.ReduceGrads), "backward"), ops.OptimizerStep: "step"}


def maker_of(module):
    """A function that makes the stage of any rank of the job of ``module``, a ``PipelineModule``. ValueError where its
    layers have groups of that job."""
    if module.mpu().slice_parallel_size * module.mpu().sequence_parallel_size > 1:
        raise ValueError(
            "the layers of this PipelineModule are shared by several ranks, whose groups belong to this job: pass "
            "deepspeed.plan a function that makes the grid, the layers and the PipelineModule"
        )
    layers = [copy_on_meta(one, hooks=False) if isinstance(one, nn.Module) else one for one in module._layer_specs]
    given = {
        name: getattr(module, name)
        for name in ("loss_fn", "seed_layers", "seed_fn", "base_seed", "activation_checkpoint_interval",
                     "activation_checkpoint_func", "checkpointable_layers", "dynamic_shape")
    }  # fmt: skip
    shape, topology = module.pipe_shape, module.topology()
    given.update(partition_method=module.partitions(), virtual_stages=shape.chunks, placement=shape.placement)
    return functools.partial(_made_again, type(module), layers, topology.axes, topology.dims, given)


def _made_again(kind, layers, axes, dims, given):
    made = PipelineModule(layers, topology=ProcessTopology(axes, dims), **given)
    made.__class__ = kind  # whose constructor may take something else
    return made


class Copy(NamedTuple):
    """The ranks of all stages that compute with the same data."""

    ranks: tuple


def plan_ranks(function, rows, copies=None):
    """``[function(*row) for row in rows]``, each in a process of its own. ``function`` plans a rank, the first of its
    arguments. Where it returns a ``Copy``, all stages of that one are planned with each other: they have one argument
    more, their ``Peers``. ``copies``: the largest number of copies."""
    made = run_each_apart(function, rows)
    if not isinstance(made[0], Copy):
        return made
    chosen, made = list(dict.fromkeys(made))[:copies], []
    for copy in chosen:
        with tempfile.TemporaryDirectory(prefix="ds_plan_") as folder:
            peers = Peers(copy.ranks, os.path.join(folder, "messages"))
            made += run_each_apart(function, [(rank, *rows[0][1:], peers) for rank in copy.ranks], together=True)
    return made


class PlannedPipeline(PlannedRun):
    """The engine of one stage, and its batches. The stages that are planned with it have to do the same."""

    def __init__(self, *args):
        super().__init__(*args)
        engine, (inputs, named) = self.engine, self.sample
        if len(inputs) != 2 and not named:
            raise ValueError("the sample of a pipeline is what its data iterator gives: a pair (inputs, labels)")
        engine._measured.found = {}  # this engine tells nobody its own plan
        steps = engine._INSTRUCTION_MAP.items()
        engine._INSTRUCTION_MAP = {kind: functools.partial(self._carry_out, kind, run) for kind, run in steps}

    def _batches(self):
        while True:
            inputs, named = self._inputs()
            yield (inputs, named) if named else inputs

    def _train(self):
        self.world.at("forward")
        self.world.memory.reset_peak()
        self._took = {}  # (instruction, part of the model) -> nanoseconds and bytes sent, of the first micro-batch
        self.engine.train_batch(self._batches())

    def _carry_out(self, kind, run, engine, **kwargs):
        self.world.at(_PHASES.get(kind, "forward"))
        before = self._now()
        run(engine, **kwargs)
        part = engine.module.pipe_shape.virtual_stage(engine.stage_id, kwargs.get("chunk", 0))
        self._took.setdefault((kind, part), [now - then for now, then in zip(self._now(), before)])

    def _now(self):
        self.world.host.pause()
        return sum(self.world.clock.phases.values()), self.engine.channel.sent[1]

    def waits(self):
        """Seconds of a batch in which this stage waits for others, from the costs of all stages."""
        engine, world = self.engine, self.world
        took = dict(itertools.chain.from_iterable(one.items() for one in world.told_by_peers(self._took)))

        def sum_of(part, *kinds, what=0):
            return sum(took.get((kind, part), (0, 0))[what] for kind in kinds)

        parts = [
            _C.pipe.Part(
                forward=sum_of(part, ops.ForwardPass) / 1e9,
                backward_input=sum_of(part, ops.BackwardPass, ops.BackwardInputPass) / 1e9,
                backward_weight=sum_of(part, ops.BackwardWeightPass) / 1e9,
                output_bytes=sum_of(part, ops.SendActivation, what=1),
            )
            for part in range(engine._execution.last_part + 1)
        ]
        schedule = engine._plans.train_schedule()
        native = getattr(schedule, "plan", None) or plan_of(type(schedule), engine.micro_batches, engine.num_stages)
        link = world.machine.link(world.peers)
        cost = native.cost(parts, latency=link.latency_ns / 1e9, bytes_per_second=link.bytes_per_second)
        return {"bubble": cost.seconds - cost.ranks[engine.stage_id].busy}
