"""Memory of a training step against the length of its sequences: ``deepspeed.sequence.longest`` and ``explain``.

The real engine makes steps of three lengths on tensors without memory. From their peaks csrc/plan/length_plan.h
computes the peaks of every length. A fourth step, twice as long as the longest of them, checks the result. If it is
wrong, more samples with longer sequences follow.
"""

import copy
import functools
import inspect
import re

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.mesh import made_here
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.model import layout
from deepspeed.planner.child import run_each_apart
from deepspeed.planner.machine import Machine, workspace_here
from deepspeed.planner.plans import files_apart, values_of
from deepspeed.planner.step import PlannedRun
from deepspeed.planner.world import World
from deepspeed.sequence import tiling
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.sequence.lengths import Peak
from deepspeed.utils.init_on_device import copy_on_meta
from deepspeed.zero.nested import loss_or_sum, tensors_in

LIMIT = 1 << 31  # tokens
SMALLEST = 64  # tokens of a rank in the first sample
CHUNKS = 4  # of a sequence, half as many as in the first sample
BOUND = 8  # thousandths of a peak by which the curve may be off at a sample that checks it
CHECKS = 3  # at most
PARTS = ("kept for backward", "attention", "mlp", "head and loss", "buffers", "other")
_KEPT, _ATTENTION, _MLP, _HEAD, _, _OTHER = PARTS
_KINDS = {
    _ATTENTION: re.compile("attn|attention"),
    _MLP: re.compile("mlp|ffn|feed_?forward|expert"),
    _HEAD: re.compile("head"),
}


class _World(World):
    """Memory of a step belongs to the part of the model that makes it, and is kept for backward if it is alive where
    the forward of a module ends. A *moment* is a position in the step: forward, backward or recomputation of a module,
    by its name without numbers."""

    inside = ()

    def at(self, phase):
        super().at(phase)
        self.phase, self.inside = phase, []
        self.memory.set_owner("engine" if phase == "step" else _HEAD)

    def watch(self, model):
        for name, module in model.named_modules():
            name = re.sub(r"\d+", "*", name)
            module.register_forward_pre_hook(functools.partial(self._enter, name))
            module.register_forward_hook(self._leave)

    def _enter(self, name, module, inputs):
        self.inside.append(name)
        self._be_in(name)

    def _leave(self, module, inputs, output):
        backward = functools.partial(self._start_backward, self.inside.pop())
        for part in (*_KINDS, _OTHER):
            self.memory.give_all(part, _KEPT)
        for one in tensors_in(output):
            if one.requires_grad:
                one.register_hook(backward)
        self._be_in(self.inside[-1] if self.inside else "")

    def _start_backward(self, name, grad):
        if not self.inside:
            self._be_in(name, "backward")

    def _be_in(self, name, what=None):
        what = what or ("recomputation" if self.phase == "backward" else "forward")
        self.memory.set_moment(f"{what} of {name}" if name else what)
        part = next((part for part, kind in _KINDS.items() if kind.search(name)), _OTHER if name else _HEAD)
        self.memory.set_owner(part)


class Setup:
    """A model, a configuration, and the settings that are compared. Arguments: of ``sequence.longest``."""

    recompute = False

    def __init__(self, model, config, ranks, inputs, batch):
        made = config if isinstance(config, DeepSpeedConfig) else DeepSpeedConfig(config, world_size=ranks)
        self.shared = made.sequence_parallel_size or 1
        self.ranks = ranks or made.world_size * self.shared
        if self.ranks % self.shared:
            raise ValueError(f"sequence_parallel_size {self.shared} does not divide {self.ranks} ranks")
        self.batch, self.inputs = batch or made.train_micro_batch_size_per_gpu or 1, inputs
        self.stage, given = made.zero_optimization_stage, made.sequence_parallel_config
        keys = layout("training", "sequence_parallel").items()
        self.section = {key: facts["default"] if given is None else given[key] for key, facts in keys}
        mlp = self.section["tile_mlp"]
        # Features of a token by the names of MLPs. What a model without values does to tokens is not checked.
        bare = any(param.is_meta for param in model.parameters())
        proven = tiling.proven(model, mlp if isinstance(mlp, list) else "auto", believe=bare)
        self.widths, self.can_tile = (proven, {}) if mlp else ({}, proven)
        if self.widths:
            self.section["tile_mlp"] = list(self.widths)
        self.config = {**values_of(made), "train_micro_batch_size_per_gpu": self.batch}
        # All micro-steps after the second one are alike.
        self.config["gradient_accumulation_steps"] = min(2, made.gradient_accumulation_steps or 1)
        self.config.setdefault("optimizer", {"type": "Adam"})  # nobody knows a client's
        for key in ("train_batch_size", "sequence_parallel_size", "data_parallel_size"):
            self.config.pop(key, None)
        self.model = copy_on_meta(model)  # a new process would get its values, too

    def changed(self, section=(), **changes):
        """A copy with other attributes, and other keys of ``sequence_parallel``."""
        made = copy.copy(self)
        vars(made).update(changes, section={**self.section, **dict(section)})
        return made

    def settings(self):
        """The configuration of the engine."""
        zero = {**(self.config.get("zero_optimization") or {}), "stage": self.stage}
        section = {**self.section, "size": self.shared}
        if section["offload"] == "file":
            section["folder"] = section["folder"] or "any"  # where nothing is written
        return {**self.config, "zero_optimization": zero, "sequence_parallel": section}

    @property
    def first(self):
        """Tokens of a rank from which on the peak is a polynomial: tiles and chunks are whole there, and few in
        number are no longer most of what there is."""
        wide = [2 * width for width in self.widths.values()]
        return max(SMALLEST, -(-CHUNKS * self.section["chunk"] // self.shared), *wide)

    def inputs_of(self, tokens):
        """``tokens``: of a rank."""
        if self.inputs is not None:
            return self.inputs(self.batch, tokens)
        ids = torch.zeros(self.batch, tokens, dtype=torch.int64, device="meta")
        asks = self.shared > 1 and "position_ids" in inspect.signature(self.model.forward).parameters
        return {"input_ids": ids, "labels": ids, "use_cache": False, **({"position_ids": ids} if asks else {})}

    def curve(self):
        return curves([self])[0]

    def steps(self):
        """``[(what to change, the changed setup)]`` in the order of what they cost in time."""
        found, section = [], self.section
        add = lambda what, *args, **changes: found.append((what, self.changed(*args, **changes)))
        if not section["tile_loss"] and tiling.has_known_loss(self.model):
            add("sequence_parallel.tile_loss: true", {"tile_loss": True})
        if self.can_tile:
            add("sequence_parallel.tile_mlp: true", {"tile_mlp": list(self.can_tile)}, widths=self.can_tile)
        if not _C.stage_policy(self.stage).shards_params and self.ranks > 1:
            add(f"zero_optimization.stage: {self.stage + 1}", stage=self.stage + 1)
        can_recompute = getattr(self.model, "supports_gradient_checkpointing", False)
        again = not getattr(self.model, "is_gradient_checkpointing", False)
        if can_recompute and again:
            add("model.gradient_checkpointing_enable()", recompute=True)
        if can_recompute and section["offload"] == "none":
            before = "gradient_checkpointing_enable() and " if again else ""
            medium = "file" if get_accelerator().device_name() == "cpu" else "host"
            add(f'{before}sequence_parallel.offload: "{medium}"', {"offload": medium}, recompute=again)
        double = 2 * self.shared
        what = f"{double} ranks for a sequence (sequence_parallel.size: {double})"
        add(what, shared=double, ranks=max(self.ranks, double))
        return found


# ---- in a process of its own -----------------------------------------------------------------------------------------
class _Steps:
    """Training steps of one engine."""

    def __init__(self, setup):
        self.setup, on_host = setup, get_accelerator().device_name() == "cpu"
        workspace = workspace_here()
        timeless = Machine("none", {"float32": 1e18}, 0, 0, (0, 1e18), (0, 1e18), 0, 0, 0, workspace=workspace)
        self.world = world = _World(0, setup.ranks, 1 << 62, timeless, on_host)
        world.install()
        world.memory.set_owner("parameters")
        model = copy_on_meta(setup.model).train()
        if setup.recompute:
            model.gradient_checkpointing_enable()
        world.memory.set_owner("engine")
        self.run = PlannedRun(world, model, setup.settings(), None, loss_or_sum, None)
        for module in model.modules():
            if isinstance(module, DistributedAttention):
                module.spg = self.run.engine.seq_parallel_group
        world.watch(model)
        self.peaks(setup.shared * setup.first)  # gathers and uses of gradients are learned
        self.states = _row(world.memory.owned)[0]

    def peaks(self, tokens):
        """``{moment: bytes of states and of each part}`` for a sequence of ``tokens``."""
        for kept in (made_here().stores, made_here().exchanges, self.world.shared):
            kept.clear()  # a step of another length has left it
        self.run.sample = self.setup.inputs_of(tokens // self.setup.shared)
        self.run.learn()
        self.world.calls()
        return {moment: _row(owned) for moment, owned in self.world.memory.peaks.items()}


def _row(owned):
    states = sum(size for owner, size in owned.items() if owner not in PARTS)
    return [states, *(owned.get(part, 0) for part in PARTS)]


def _curve(setup, memory, lengths):
    """With what will be asked for."""
    steps = _Steps(setup)
    sample = lambda tokens: (tokens, steps.peaks(tokens))
    curve = Curve(setup, steps.states, [sample(setup.shared * setup.first * factor) for factor in (2, 3, 4)])
    while not curve.checks or (curve.checks[-1][1] > BOUND and len(curve.checks) < CHECKS):
        if curve.checks:
            before, last = (tokens for tokens, _ in curve.samples[-2:])
            curve.samples.insert(-1, sample((before + last) // 2))
        further = sample(2 * curve.samples[-1][0])
        curve.checks.append((further[0], curve.miss(further)))
        curve.samples.append(further)
    curve.ask = steps.peaks
    if memory is not None:
        for tokens in (*curve.shown(memory), *(lengths or ())):
            curve.peak(tokens)
    curve.ask = None
    return curve


def _peaks(setup, tokens):
    return _Steps(setup).peaks(tokens)


# ---- results ---------------------------------------------------------------------------------------------------------
class Curve:
    """``samples``: ``(tokens, peaks by moment)``; ``checks``: ``(tokens, thousandths by which what was known before was
    off there)``; ``states``: bytes between two steps. ``ask``: gives the peaks of a length below the first sample,
    where tiles and chunks are not whole and buffers not full: no polynomial is asked there."""

    def __init__(self, setup, states, samples):
        self.shared, self.states, self.samples = setup.shared, states, samples
        self.unit = self.shared if self.shared == 1 else 2 * self.shared  # a ring halves parts
        self.checks, self.short, self.ask = [], {}, None

    def _native(self, *more):
        """The native curve, and the names of its moments. ``more``: samples whose moments it has, too."""
        moments = sorted({moment for _, peaks in (*self.samples, *more) for moment in peaks})
        return _C.lengths.Curve([self._row(sample, moments) for sample in self.samples]), moments

    def _row(self, sample, moments):
        tokens, peaks = sample
        return tokens, [peaks.get(moment, [0] * (1 + len(PARTS))) for moment in moments]

    def miss(self, sample):
        native, moments = self._native(sample)
        return native.miss(self._row(sample, moments))

    def said(self):
        """The accuracy of the curve, in words."""
        tokens, miss = self.checks[-1]
        if len(self.checks) == 1 and miss <= BOUND:
            return f"checked with {tokens} tokens: {miss / 10:.1f} % off"
        first, off = self.checks[0]
        bends, count = f"no polynomial: with {first} tokens three samples were {off / 10:.1f} % off", len(self.samples)
        if miss <= BOUND:
            return f"{bends}; {count} samples up to {tokens} tokens were {miss / 10:.1f} % off at the last"
        return (
            f"{bends}, and {count} up to {tokens} tokens still {miss / 10:.1f} % at the last: do not trust what "
            f"is said of more than {tokens} tokens"
        )

    def peak(self, tokens):
        if tokens < self.samples[0][0]:
            whole = max(self.unit, -(-tokens // self.unit) * self.unit)
            if whole not in self.short:
                self.short[whole] = self.ask(whole)
            moment, found = max(self.short[whole].items(), key=lambda peak: sum(peak[1]))
        else:
            native, moments = self._native()
            moment, found = moments[native.moment(tokens)], native.parts(tokens)
        return Peak(tokens, sum(found), dict(zip(("states", *PARTS), found)), moment)

    def longest(self, memory):
        first = self.samples[0][0]
        found = self._native()[0].longest(memory, self.shared, LIMIT) if self.peak(first).bytes <= memory else 0
        if found:
            return found
        low, high = 0, first // self.unit  # what fits, what does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle * self.unit).bytes <= memory else (low, middle)
        return low * self.unit

    def shown(self, memory):
        """Lengths around the longest one that fits."""
        found = self.longest(memory)
        return [tokens for tokens in (found // 2, found, found * 2) if tokens > 0]


def _apart(function, setups, *args):
    with files_apart(setups[0].config) as config:
        return run_each_apart(function, [(one.changed(config=config), *args) for one in setups])


def curves(setups, memory=None, lengths=None):
    """A ``Curve`` each. ``memory``, ``lengths``: what will be asked for, so that no further process has to answer."""
    made = _apart(_curve, setups, memory, lengths)
    for setup, curve in zip(setups, made):
        curve.ask = functools.partial(peaks, setup)
    return made


def peaks(setup, tokens):
    """``{moment: bytes of states and of each part}`` for a sequence of ``tokens``."""
    return _apart(_peaks, [setup], tokens)[0]


def longest(memory, *args):
    return curves([Setup(*args)], memory)[0].longest(memory)


def explained(memory, lengths, *args):
    """``(curve, [(what to change, the longest then)])``."""
    setup = Setup(*args)
    steps = setup.steps()
    first, *others = curves([setup, *(one for _, one in steps)], memory, lengths)
    return first, [(what, curve.longest(memory)) for (what, _), curve in zip(steps, others)]
