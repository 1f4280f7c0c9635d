"""``deepspeed.plan``: what a training step of a job will take, from the real engine on tensors without memory."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import tempfile

import torch

from deepspeed.comm import mesh, mesh_views
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.read import read
from deepspeed.formats.weight_files import parse_size
from deepspeed.pipe.module import PipelineModule
from deepspeed.planner.machine import Machine
from deepspeed.planner.operators import nanoseconds
from deepspeed.planner.pipeline import Copy, PlannedPipeline, maker_of, plan_ranks
from deepspeed.planner.step import Constants, FlagError, PlannedRun, arguments_in, by_owner, on_meta
from deepspeed.planner.world import World
from deepspeed.profiling.trace import purpose_of
from deepspeed.utils.init_on_device import OnDevice, copy_on_meta
from deepspeed.zero.nested import loss_or_sum

GIB = 1 << 30
_OFFLOADS = ("offload_optimizer", "offload_param")


def bytes_of(text):
    """Bytes of ``"80GB"`` (10**9) or ``"80GiB"`` (2**30). ValueError without a unit."""
    try:
        if str(text).strip()[-1:].isalpha():
            return parse_size(text)
    except ValueError:
        pass
    raise ValueError(f"{text!r} is not a size of memory: write a number and a unit, such as 80GB or 40GiB")


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """A training step of one rank. ``peak_bytes``: of the device, by its allocator, at the ``moment`` of the step when
    most is alive, and ``owners``, their bytes then. ``tiers``: ``{tier: {"peak_bytes", "bytes_per_step"}}`` of the host
    and of files. ``calls``: ``{(verb, purpose): (count, bytes)}``. ``flops``: of the model's operators. ``seconds``: by
    phase; ``not_known``: operators whose cost is not known, and "transfers of files" where the rate of their drive is
    not; ``not_measured``: operators that could not be measured, whose times are those of the rates; ``run_small``:
    operators that torch cannot run without memory: a run on the CPU with few rows has told the shapes of their results,
    and masks choose all elements there. ``peak_flops``: of the device in a second, in the dtype of the model.
    ``counts``: what the host does in each phase: ``{phase: {"dispatched", "launches", "kernels", "collectives",
    "host_waits"}}``: calls of torch's dispatcher, operations that the device carries out, those of them that are
    kernels of this library, calls of groups of ranks, and waits for the device.
    ``timeline``: rows ``(lane, name, phase, begin, end, exposed)`` in nanoseconds, if it was asked for."""

    rank: int
    peak_bytes: int
    moment: str
    owners: dict
    tiers: dict
    calls: dict
    flops: int
    seconds: dict
    checkpoint_bytes: int
    not_known: tuple = ()
    not_measured: tuple = ()
    run_small: tuple = ()
    peak_flops: float = 0.0
    counts: dict = dataclasses.field(default_factory=dict)
    timeline: tuple = ()

    @property
    def step_seconds(self):
        return sum(self.seconds.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """The forecast of a job. ``ranks``: a ``RankPlan`` of each kind of rank. ``memory``: bytes of a device, None where
    there is no limit. ``machine``: the name of the machine whose rates give the times."""

    ranks: tuple
    world: int
    memory: object
    machine: str
    parameters: int

    @property
    def fullest(self):
        """The rank that needs most memory of its device."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def peak_bytes(self):
        return self.fullest.peak_bytes

    @property
    def fits(self):
        return self.memory is None or self.peak_bytes <= self.memory

    @property
    def seconds(self):
        return max(rank.step_seconds for rank in self.ranks)

    @property
    def mfu(self):
        """The share of the peak flops of their devices that the planned ranks reach; None where no time is known."""
        peak = self.seconds * sum(rank.peak_flops for rank in self.ranks)
        return sum(rank.flops for rank in self.ranks) / peak if peak else None

    @property
    def why(self):
        """The owners of the peak, in words."""
        most = sorted(self.fullest.owners.items(), key=lambda item: -item[1])[:3]
        held = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in most)
        fits = "fits" if self.fits else f"needs more than the {self.memory / GIB:.2f} GiB of a device"
        peak = f"rank {self.fullest.rank} peaks at {self.peak_bytes / GIB:.2f} GiB in {self.fullest.moment}"
        return f"{fits}: {peak} ({held})"

    def as_dict(self):
        """Plain values, for JSON, without timelines."""
        ranks = tuple(dataclasses.replace(rank, timeline=()) for rank in self.ranks)
        made = dataclasses.asdict(dataclasses.replace(self, ranks=ranks))
        for rank, one in zip(made["ranks"], self.ranks):
            del rank["timeline"]
            rank["calls"] = [
                {"verb": verb, "purpose": purpose, "count": count, "bytes": size}
                for (verb, purpose), (count, size) in sorted(one.calls.items())
            ]
        for name in ("fits", "peak_bytes", "seconds", "mfu", "why"):
            made[name] = getattr(self, name)
        return made

    def __str__(self):
        one, lines = self.fullest, [self.why]
        lines.append(f"{self.parameters} parameters on {self.world} ranks; rates of {self.machine}")
        lines += [
            f"  {owner:20s} {size / GIB:10.3f} GiB" for owner, size in sorted(one.owners.items(), key=lambda i: -i[1])
        ]
        for tier, figures in one.tiers.items():
            if figures["peak_bytes"] or figures["bytes_per_step"]:
                peak, moved = figures["peak_bytes"] / GIB, figures["bytes_per_step"] / GIB
                lines.append(f"  in the tier {tier}: {peak:.3f} GiB at its peak, {moved:.3f} GiB moved in a step")
        for (verb, purpose), (count, size) in sorted(one.calls.items()):
            lines.append(f"  {count:6d} x {verb:16s} {size / GIB:10.3f} GiB  {purpose}")
        lines.append(
            f"  checkpoint: {sum(rank.checkpoint_bytes for rank in self.ranks) / GIB:.3f} GiB of planned ranks"
        )
        phases = ", ".join(f"{phase} {seconds * 1e3:.1f} ms" for phase, seconds in one.seconds.items())
        lines.append(f"  step {self.seconds * 1e3:.1f} ms: {phases}; {one.flops / 1e12:.3f} Tflop of a rank")
        lines.append(f"  calls of the host: {'; '.join(itertools.starmap(_counted, one.counts.items()))}")
        if self.mfu is not None:
            lines.append(f"  {self.mfu:.1%} of the peak flops of the devices (MFU)")
        if one.not_known:
            lines.append(f"  not counted: {', '.join(one.not_known)}")
        if one.run_small:
            lines.append(f"  shapes from a small run on the CPU: {', '.join(one.run_small)}")
        if one.not_measured:
            lines.append(f"  times from rates, because they cannot run alone: {', '.join(one.not_measured)}")
        return "\n".join(lines)


def _counted(phase, counts):
    return f"{phase} " + ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counts.items())


# ---- making one ------------------------------------------------------------------------------------------------------
def plan(
    model,
    config,
    world=None,
    memory=None,
    sample=None,
    machine=None,
    ranks=None,
    loss=None,
    optimizer=None,
    imbalance=1.0,
    measure=False,
    timeline=False,
):
    """The forecast of training ``model`` with ``config``: memory, traffic and time of a step. The engine is built as in
    the job and makes steps, on tensors without memory, in a process of its own; ``model`` is not changed.

    model: a module (of the device ``meta``, too), or a function that makes one. The function may return a pair: the
    module and its mpu, whose groups it has made. Of a pipeline it is the ``PipelineModule`` or a function that makes
    it. config: of ``deepspeed.initialize``. world: the number of ranks; None: WORLD_SIZE, else 1. memory: bytes of a
    device, or a text such as ``"80GB"``; None: no limit. sample: the inputs of one micro-batch of a rank: a dict, a
    tuple or a tensor, of which only shapes and dtypes are read; of a pipeline the pair ``(inputs, labels)``. machine: a
    ``Machine`` or the path of a machine file; None: the kept one, else this machine. ranks: of the job, whose steps are
    planned; None: the first and the last one. Of a pipeline all stages that compute with their data are planned; None:
    with that of the first rank. loss: a function of the model's output; None: its attribute ``loss``, its first number,
    or the sum of its first tensor. optimizer: a function of parameters, where the configuration names none.
    imbalance: the rows of the rank whose experts have most to do, divided by the mean over ranks. measure: True: each
    operator runs on a device of this machine, which gives its time; False: the rates of ``machine`` give the times; a
    dict: as True, and it keeps the times for further plans. timeline: whether the plans of ranks have their timelines.

    Returns a ``Plan``. ValueError for arguments that do not fit together; ``PlanError`` where the model or the engine
    raises.
    """
    size = int(world or os.environ.get("WORLD_SIZE", 1))
    if size < 1:
        raise ValueError(f"world is {world!r}: a job has at least one rank")
    room = bytes_of(memory) if isinstance(memory, str) else None if memory is None else int(memory)
    if room is not None and room <= 0:
        raise ValueError(f"memory is {memory!r}: it must be more than 0 bytes, or a text such as 80GB")
    wanted = sorted({0, size - 1}) if ranks is None else list(ranks)
    if not wanted or not all(0 <= rank < size for rank in wanted):
        raise ValueError(f"ranks are {ranks!r}: a job of {size} ranks has the ranks 0 to {size - 1}")
    if sample is None:
        raise ValueError("sample is missing: pass the inputs of one micro-batch; only shapes and dtypes are read")
    if not 1 <= imbalance < float("inf"):
        raise ValueError(f"imbalance is {imbalance!r}: the busiest rank receives 1 or more times the rows of the mean")
    given = values_of(config)
    rates = machine if isinstance(machine, Machine) else Machine.of_jobs(machine)
    if isinstance(model, PipelineModule):
        model = maker_of(model)
    elif isinstance(model, torch.nn.Module) and not _has_no_values(model):
        model = copy_on_meta(model)  # a new process would get its values, too
    inputs = on_meta(arguments_in(sample))
    rates = rates.with_drives(folders_in(given).values())
    with files_apart(given) as given:
        common = model, given, size, room, inputs, rates, loss, optimizer, imbalance
        times = measure if isinstance(measure, dict) else {} if measure else None

        def planned(flag):
            rows = [(rank, *common, times, flag, timeline) for rank in wanted]
            return plan_ranks(_plan_rank, rows, copies=1 if ranks is None else None)

        made, flag = _with_flags(planned)
        calls = dict.fromkeys(itertools.chain.from_iterable(calls for *_, calls in made))
        if times is not None and calls:
            times.update(nanoseconds(calls, min(size, rates.ranks_of_host or size)))
            made = planned(flag)
    found, parameters, _ = zip(*made)
    return Plan(found, size, room, rates.name, parameters[0])


def _with_flags(planned):
    """``(planned(flag), flag)``, where flags are false if the model raises an error when they are true, as one does
    that looks for nan."""
    try:
        return planned(True), True
    except FlagError:
        return planned(False), False


def plan_of_engine(engine, inputs, memory=None, machine=None):
    """The ``Plan`` of this rank of ``engine``, whose forward takes ``inputs``."""
    client, model = engine.client_optimizer, engine.module
    optimizer = _another(client) if isinstance(client, torch.optim.Optimizer) else client
    if not isinstance(model, PipelineModule):
        groups = mesh.known_groups()
        if engine.mpu is not None and not groups:
            raise ValueError(
                f"engine.plan(): in torch {torch.__version__} the groups of this engine's mpu work in this job alone: "
                "pass deepspeed.plan a function that makes the groups and returns (model, mpu), or use torch 2"
            )
        bare = copy_on_meta(model, hooks=False, shared=groups)
        model = functools.partial(_with_groups, bare, engine.mpu) if groups else bare
    rank, size = engine.global_rank, engine.world_size
    return plan(model, engine._config, size, memory, inputs, machine, [rank], optimizer=optimizer)


def _with_groups(model, mpu):
    """The model and the mpu of a running job, whose groups they use in the planned one."""
    mesh_views.take_over()
    return (model, mpu)


def _another(optimizer):
    """A function that makes an optimizer as this one for other parameters."""
    return functools.partial(type(optimizer), **optimizer.defaults)


def _has_no_values(model):
    return all(one.is_meta for one in (*model.parameters(), *model.buffers()))


def values_of(config):
    """The configuration as plain values. The engine judges them, because it knows how many ranks see different data."""
    given = config._param_dict if isinstance(config, DeepSpeedConfig) else config
    return given if isinstance(given, dict) else read(given).raw()


def folders_in(config):
    """The folders for states in files, by section."""
    zero = config.get("zero_optimization") or {}
    sections = {name: zero[name] for name in _OFFLOADS if isinstance(zero.get(name), dict)}
    return {name: section["nvme_path"] for name, section in sections.items() if section.get("nvme_path")}


@contextlib.contextmanager
def files_apart(config):
    """The configuration with a folder of its own for states in files: those that it names may be a run's."""
    zero, named = config.get("zero_optimization") or {}, folders_in(config)
    with tempfile.TemporaryDirectory(prefix="ds_plan_") as folder:
        changed = {name: {**zero[name], "nvme_path": folder} for name in named}
        yield {**config, "zero_optimization": {**zero, **changed}} if named else config


def _plan_rank(
    rank, model, config, size, memory, sample, machine, loss, optimizer, imbalance, times, flag, timeline, peers=None
):
    """The work of the child process: the ``RankPlan``, parameters, and the calls of operators without a time. Of a
    pipeline without ``peers`` it returns a ``Copy``."""
    world = World(rank, size, memory or 1 << 62, machine, peers=peers)
    world.times, world.flag = times, flag
    world.clock.record(timeline)
    world.install()
    world.memory.set_owner("parameters")
    mpu = None
    if isinstance(model, torch.nn.Module):
        made = copy_on_meta(model)
    else:
        with Constants(world.memory), OnDevice(dtype=torch.get_default_dtype(), device="meta"):
            made = model()
        made, mpu = made if isinstance(made, tuple) else (made, None)
        made = made if _has_no_values(made) else copy_on_meta(made)
    pipeline = isinstance(made, PipelineModule)
    if pipeline and peers is None:
        return Copy(tuple(made.mpu().pp_group))
    if pipeline and loss is not None:
        raise ValueError("loss= is not for pipelines: PipelineModule(loss_fn=) is their loss")
    # Before the engine, which may move a part of them; and no name here keeps a parameter that it replaces.
    own = sum(param.numel() for param in made.parameters() if not getattr(param, "ds_pipe_replicated", False))
    parameters = sum(world.told_by_peers(own))
    world.memory.set_owner("engine")
    kind = PlannedPipeline if pipeline else PlannedRun
    run = kind(world, made, config, sample, loss or loss_or_sum, optimizer, mpu)
    for layer in run.engine._experts.layers.values():
        layer.deepspeed_moe.busiest = imbalance
    world.memory.set_owner("activations")
    run.learn()
    counted, moved = run.step()
    moments = {moment: by_owner(owned) for moment, owned in world.memory.peaks.items()}
    moment, owners = max(moments.items(), key=lambda item: sum(item[1].values()))
    calls = collections.Counter(), collections.Counter()
    for call in world.calls():
        purpose = purpose_of(call.group)
        key = call.op, f"{purpose} of {call.ranks} ranks" if purpose else call.group
        calls[0][key] += 1
        calls[1][key] += call.bytes
    tiers = {
        tier: {"peak_bytes": one["peak_bytes"], "bytes_per_step": moved.get(tier, 0)}
        for tier, one in run.media().items()
        if tier != "device"
    }
    seconds = {phase: ns / 1e9 for phase, ns in world.clock.phases.items()}
    seconds["step"] = seconds.get("step", 0.0) + run.update_seconds(moved)
    not_known = {*counted.not_counted, *(["transfers of files"] if moved.get("file") and not machine.file else [])}
    seconds["communication"] = world.clock.waited / 1e9
    seconds.update(run.waits())
    plan = RankPlan(
        rank=rank,
        peak_bytes=world.memory.peak,
        moment=moment,
        owners=owners,
        tiers=tiers,
        calls={key: (count, calls[1][key]) for key, count in calls[0].items()},
        flops=counted.flops,
        seconds=seconds,
        checkpoint_bytes=run.checkpoint_bytes(),
        not_known=tuple(sorted(not_known)),
        not_measured=tuple(sorted(counted.not_measured)),
        run_small=tuple(sorted(run.run_small)),
        peak_flops=machine.peak(run.engine.get_data_types()[0]),
        counts=world.clock.counts,
        timeline=tuple(world.clock.timeline),
    )
    return plan, parameters, list(counted.calls)
