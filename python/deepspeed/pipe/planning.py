"""``deepspeed.pipe.plan``: what a pipeline will cost, in one process, before there is one."""

from dataclasses import dataclass

from deepspeed.pipe.layers import as_layers
from deepspeed.registry import load_target

NOT_SPLIT = "backwards are not split: both halves are computed in the first one (I), and W does nothing"


@dataclass(frozen=True)
class StagePlan:
    """The layers of one stage, and its work in a batch."""

    stage: int
    layers: list  # their numbers in the model
    parameters: int
    state_bytes: int
    peak_activation_bytes: int  # what live micro-batches keep, and what one pass needs besides
    peak_live: int  # micro-batches, by part, between forward and the end of backward
    bytes_sent: int


class PipelinePlan:
    """The schedule of a pipeline and its cost; as text a table and a timeline.

    ``schedule``: its name. ``note``: why it is not what it could be, or "". ``bubble``: the share of the stages' time
    in which they wait, 0 to 1. ``seconds``: of a batch, where times were given; else None. ``stages``: a ``StagePlan``
    each. ``bounds``: of the parts.
    """

    def __init__(self, native, cost, parameters, state_bytes, bounds, timed, note=""):
        self.native, self.cost, self.bounds, self.note = native, cost, bounds, note
        self.schedule, self.bubble = native.schedule, cost.bubble
        self.seconds = cost.seconds if timed else None
        self.stages = [self._stage(stage, parameters, state_bytes) for stage in range(native.shape.stages)]

    def _stage(self, stage, parameters, state_bytes):
        shape, cost = self.native.shape, self.cost.ranks[stage]
        parts = [shape.virtual_stage(stage, chunk) for chunk in range(shape.chunks)]
        layers = [layer for part in parts for layer in range(self.bounds[part], self.bounds[part + 1])]
        count = sum(parameters[layer] for layer in layers)
        states = round(state_bytes * count)
        return StagePlan(
            stage=stage,
            layers=layers,
            parameters=count,
            state_bytes=states,
            peak_activation_bytes=cost.peak_bytes - states,
            peak_live=cost.peak_live,
            bytes_sent=cost.bytes_sent,
        )

    def timeline(self, width=100):
        """A line for each stage: F, B, I (gradients of inputs), W (of weights), the micro-batch; dots: idle."""
        return self.native.timeline(self.cost, width)

    def __str__(self):
        shape = self.native.shape
        took = "" if self.seconds is None else f", {self.seconds * 1e3:.2f} ms"
        lines = [
            f"pipeline schedule {self.schedule}: {shape.stages} stages x {shape.chunks} parts, {shape.micro_batches} "
            f"micro-batches, bubble {self.bubble:.1%}{took}",
            "stage  layers        parameters    state MB    activation MB  live  sent MB",
        ]
        for one in self.stages:
            numbers = ",".join(map(str, one.layers)) if len(one.layers) < 5 else f"{one.layers[0]}..{one.layers[-1]}"
            lines.append(
                f"{one.stage:5d}  {numbers:12s}  {one.parameters:10d}  {one.state_bytes / 2**20:10.2f}  "
                f"{one.peak_activation_bytes / 2**20:15.2f}  {one.peak_live:4d}  {one.bytes_sent / 2**20:7.2f}"
            )
        return "\n".join([*lines, *([self.note] if self.note else []), self.timeline().rstrip()])


def plan(
    layers,
    num_stages,
    micro_batches,
    schedule="1f1b",
    sample=None,
    partition_method="parameters",
    virtual_stages=1,
    placement="loop",
    costs=None,
    memory_limit=0,
    state_bytes=16,
    latency=0.0,
    bytes_per_second=0.0,
    split_backward=True,
    activation_checkpoint_interval=0,
    checkpointable_layers=None,
    loss_fn=None,
    labels=None,
):
    """A ``PipelinePlan`` for ``layers``, which are what ``PipelineModule`` takes. Nothing is allocated or communicated:
    layers run once, on meta tensors.

    Args:
        schedule: ``1f1b``, ``gpipe``, ``interleaved``, ``zb-h1``, ``zb-v``, ``dualpipe-v``, or ``auto``: the fastest
            that needs at most ``memory_limit`` bytes on each stage (0: any).
        sample: the inputs of one micro-batch; only shapes and types are read.
        partition_method, virtual_stages, placement: of ``PipelineModule``; ``"profile"`` cuts by the time below.
            zb-v and dualpipe-v place their two parts down and up again by themselves.
        costs: ``PipelineModule.layer_costs`` of a module cut by ``"profile"``: measured times. Without them the
            operations of layers are counted, and times are relative.
        state_bytes: of parameters, gradients and optimizer states, for each parameter.
        latency, bytes_per_second: of messages between stages; wanted with measured times only.
        split_backward: False: what schedules split is computed at once, in the first half (ZeRO stage 3).
        activation_checkpoint_interval, checkpointable_layers: of ``PipelineModule``: segments that are computed again
            keep their inputs, and one of them at a time what it has computed. Their second forward is not in the times.
        loss_fn, labels: what the loss keeps on the last stage is counted where both are given; of labels only shapes
            and types are read.
    """
    given = dict(locals(), layers=as_layers(layers))
    if sample is None:
        raise ValueError("deepspeed.pipe.plan needs sample=: the inputs of one micro-batch (only shapes are read)")
    if costs is None and (latency or bytes_per_second):
        raise ValueError("latency and bytes_per_second are in seconds: give measured times, too (costs=)")
    if costs is not None and len(costs) != len(given["layers"]):
        raise ValueError(f"costs= has {len(costs)} layers, the pipeline {len(given['layers'])}")
    return load_target("deepspeed.planner.parts:pipeline_plan")(**given)
