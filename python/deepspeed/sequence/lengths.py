"""The longest sequence that fits, found before a run: ``deepspeed.sequence.longest`` and ``explain``.

A training step runs with three lengths on the device ``meta``, where operations allocate nothing. From their peaks
csrc/plan/length_plan.h computes the peaks of every length. A fourth step, twice as long as the longest of them, checks
the result. If it is wrong, more samples with longer sequences follow.
"""

import functools
from dataclasses import dataclass

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.model import layout
from deepspeed.config.sections import ZeroStageEnum
from deepspeed.log import logger
from deepspeed.registry import load_target
from deepspeed.sequence import tiling
from deepspeed.sequence.ledger import PARTS
from deepspeed.sequence.planned import PlannedStep

LIMIT = 1 << 31  # tokens
GAIN = 10  # a further step must allow this many percent more tokens
SMALLEST = 64  # tokens of a rank in the first sample
CHUNKS = 4  # of a sequence, half as many as in the first sample
BOUND = 8  # thousandths of a peak by which the curve may be off at a sample that checks it
CHECKS = 3  # at most
GIB = 1 << 30


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank when a step needs most. ``parts``: by name; ``moment``: of the step, which that is."""

    tokens: int
    bytes: int
    parts: dict
    moment: str


class Setup:
    """A model, a configuration, and the settings that are compared."""

    def __init__(self, model, config, ranks, inputs, batch):
        self.model, self.inputs = model, inputs
        made = config if isinstance(config, DeepSpeedConfig) else DeepSpeedConfig(config, world_size=ranks)
        self.config, self.ranks = made, ranks or made.world_size * (made.sequence_parallel_size or 1)
        self.shared = made.sequence_parallel_size or 1
        if self.ranks % self.shared:
            raise ValueError(f"sequence_parallel_size {self.shared} does not divide {self.ranks} ranks")
        self.batch = batch or made.train_micro_batch_size_per_gpu or 1
        self.dtype = torch.float16 if made.fp16_enabled else torch.bfloat16 if made.bfloat16_enabled else None
        self.stage = made.zero_optimization_stage
        given = made.sequence_parallel_config
        if given is None:
            given = {key: facts["default"] for key, facts in layout("training", "sequence_parallel").items()}
        mlp = given["tile_mlp"]
        self.how = {
            **{key: given[key] for key in ("method", "chunk", "offload")},
            "tile_loss": bool(given["tile_loss"]),
            "widths": self.widths(mlp if isinstance(mlp, list) else "auto") if mlp else {},
            "checkpointing": bool(getattr(model, "is_gradient_checkpointing", False)),
        }

    def widths(self, mlp):
        """Of MLPs that can be cut. A model without values is not checked."""
        return tiling.proven(self.model, mlp, believe=any(param.is_meta for param in self.model.parameters()))

    def states(self, stage=None, ranks=None):
        """Bytes of parameters, gradients, masters and optimizer states on a rank, and of buffers of the step."""
        given = {**self.config._param_dict} if isinstance(self.config._param_dict, dict) else self.config.native.raw()
        for key in ("train_batch_size", "sequence_parallel", "sequence_parallel_size", "data_parallel_size"):
            given.pop(key, None)
        given.update(train_micro_batch_size_per_gpu=self.batch)
        if stage is not None:
            given["zero_optimization"] = {**(given.get("zero_optimization") or {}), "stage": stage}
        ranks = ranks or self.ranks
        plan = load_target("deepspeed.planner.tiers:offload_plan")
        tiers = plan(self.model, DeepSpeedConfig(given, world_size=ranks), world_size=ranks, rates={})["tiers"]
        return tiers["device"]["peak_bytes"]

    def step(self, shared=None, **changes):
        how = {**self.how, **changes}
        return PlannedStep(self.model, self.dtype, self.batch, shared or self.shared, self.inputs, how)

    def first_length(self, how, shared):
        """Tokens of a rank from which on the peak is a polynomial: tiles and chunks are whole there, and few in
        number are no longer most of what there is."""
        wide = [2 * width for width in how["widths"].values()]
        chunk = -(-CHUNKS * how["chunk"] // shared)
        return max(SMALLEST, chunk, *wide)

    def curve(self, states=None, shared=None, **changes):
        shared = shared or self.shared
        states = self.states() if states is None else states
        step, base = self.step(shared, **changes), self.first_length({**self.how, **changes}, shared)
        sample = lambda tokens: (tokens, step.peaks(tokens))
        samples, checks = [sample(shared * base * factor) for factor in (2, 3, 4)], []
        while not checks or (checks[-1][1] > BOUND and len(checks) < CHECKS):
            if checks:
                samples.insert(-1, sample((samples[-2][0] + samples[-1][0]) // 2))
            further = sample(2 * samples[-1][0])
            checks.append((further[0], _Curve(samples, states, shared, known=further[1]).miss(further)))
            samples.append(further)
        return _Curve(samples, states, shared, checks, short=sample)


class _Curve:
    """``samples``: ``(tokens, peaks by moment)``; ``checks``: ``(tokens, thousandths by which what was known before was
    off there)``; ``known``: moments beside those of the samples. ``short``: makes samples of lengths below the first
    one, where tiles and chunks are not whole and buffers not full: no polynomial is asked there."""

    def __init__(self, samples, states, shared, checks=(), known=(), short=None):
        self.shared, self.states, self.checks, self.samples = shared, states, list(checks), len(samples)
        self.unit = shared if shared == 1 else 2 * shared  # a ring halves parts
        self.first, self.short = samples[0][0], None if short is None else functools.lru_cache(maxsize=None)(short)
        self.moments = sorted({moment for _, peaks in samples for moment in peaks} | set(known))
        self.native = _C.lengths.Curve([self._row(sample) for sample in samples])

    def _row(self, sample):
        tokens, peaks = sample
        return tokens, [[self.states, *peaks.get(moment, [0] * len(PARTS))] for moment in self.moments]

    def miss(self, sample):
        return self.native.miss(self._row(sample))

    def said(self):
        """The accuracy of the curve, in words."""
        tokens, miss = self.checks[-1]
        if len(self.checks) == 1 and miss <= BOUND:
            return f"checked with {tokens} tokens: {miss / 10:.1f} % off"
        first, off = self.checks[0]
        bends = f"no polynomial: with {first} tokens three samples were {off / 10:.1f} % off"
        if miss <= BOUND:
            return f"{bends}; {self.samples} samples up to {tokens} tokens were {miss / 10:.1f} % off at the last"
        return (
            f"{bends}, and {self.samples} up to {tokens} tokens still {miss / 10:.1f} % at the last: do not trust what "
            f"is said of more than {tokens} tokens"
        )

    def peak(self, tokens):
        if tokens < self.first:
            whole = max(self.unit, -(-tokens // self.unit) * self.unit)
            moment, found = max(self.short(whole)[1].items(), key=lambda peak: sum(peak[1]))
            found = [self.states, *found]
        else:
            moment, found = self.moments[self.native.moment(tokens)], self.native.parts(tokens)
        parts = dict(zip(("states", *PARTS), found))
        return Peak(tokens, sum(parts.values()), parts, moment)

    def longest(self, memory):
        found = self.native.longest(memory, self.shared, LIMIT) if self.peak(self.first).bytes <= memory else 0
        if found:
            return found
        low, high = 0, self.first // self.unit  # what fits, what does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle * self.unit).bytes <= memory else (low, middle)
        return low * self.unit


def _memory(memory):
    if memory is None:
        return int(get_accelerator().total_memory())
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or memory <= 0:
        raise ValueError(f"memory is {memory!r}: it must be bytes of one rank, more than 0")
    return int(memory)


def longest(model, config, memory=None, ranks=None, inputs=None, batch=None):
    """The most tokens of a sequence with which a training step of ``model`` fits; 0 where none do.

    model: a module, of the device ``meta``, too; nothing of it is changed, and nothing is allocated. config: of
    ``deepspeed.initialize``. memory: bytes of one rank; None: those of the device. ranks: of the job; None: those of
    the configuration. inputs: ``(batch, tokens of a rank)`` to the arguments of the model (a dict, a tuple or
    a tensor of the device ``meta``); None: tokens and labels of a causal language model of transformers. batch:
    sequences in a micro-batch, where not those of the configuration.
    """
    room = _memory(memory)
    return Setup(model, config, ranks, inputs, batch).curve().longest(room)


class LengthReport:
    """The result of ``explain``; its text is a table.

    ``longest``: tokens that fit. ``check``: the distance of a further sample from the curve, in words. ``peaks``:
    a ``Peak`` each for some lengths. ``steps``: ``(what to change, the longest then)``, the cheapest first.
    ``next_step``: the cheapest one with which 10 % more fit, or None.
    """

    def __init__(self, curve, memory, lengths, steps):
        self.memory, self.longest, self.steps, self.curve = memory, curve.longest(memory), steps, curve
        self.check = curve.said()
        wanted = lengths or [tokens for tokens in (self.longest // 2, self.longest, self.longest * 2) if tokens > 0]
        self.peaks = [curve.peak(tokens) for tokens in wanted]
        found = _C.lengths.cheapest_step([tokens for _, tokens in steps], self.longest, GAIN)
        self.next_step = None if found < 0 else steps[found]

    def peak(self, tokens):
        return self.curve.peak(tokens)

    def __str__(self):
        names = list(self.peaks[0].parts) if self.peaks else []
        lines = [f"{self.longest} tokens fit into {self.memory / GIB:.2f} GiB of each rank", f"({self.check})"]
        lines.append("".join(["  tokens", "   GiB  ", *(f"{name:>19}" for name in names), "  most in"]))
        for peak in self.peaks:
            parts = "".join(f"{size / GIB:19.2f}" for size in peak.parts.values())
            lines.append(f"{peak.tokens:8d} {peak.bytes / GIB:6.2f} {parts}  {peak.moment}")
        lines += [f"  {tokens:10d} tokens with {what}" for what, tokens in self.steps]
        if self.next_step is not None:
            lines.append(f"cheapest next step: {self.next_step[0]}")
        return "\n".join(lines)


def explain(model, config, memory=None, ranks=None, inputs=None, batch=None, lengths=None):
    """A ``LengthReport``: peak bytes by part against length, the longest that fits, and what each further choice would
    add, the cheapest first. ``lengths``: of whole sequences, for the table. Other arguments: those of ``longest``."""
    room, setup = _memory(memory), Setup(model, config, ranks, inputs, batch)
    report = LengthReport(setup.curve(), room, lengths, _steps(setup, room))
    logger.debug("%s", report)
    return report


def _steps(setup, memory):
    """``[(what, the longest with it)]`` in the order of what they cost in time."""
    how, found = setup.how, []

    def add(what, **changes):
        found.append((what, setup.curve(**changes).longest(memory)))

    if not how["tile_loss"] and tiling.has_known_loss(setup.model):
        add("sequence_parallel.tile_loss: true", tile_loss=True)
    widths = {} if how["widths"] else setup.widths("auto")
    if widths:
        add("sequence_parallel.tile_mlp: true", widths=widths)
    more = setup.stage + 1
    if more <= ZeroStageEnum.max_stage and setup.ranks > 1:
        add(f"zero_optimization.stage: {more}", states=setup.states(stage=more))
    can_recompute = getattr(setup.model, "supports_gradient_checkpointing", False)
    if can_recompute and not how["checkpointing"]:
        add("model.gradient_checkpointing_enable()", checkpointing=True)
    if can_recompute and how["offload"] == "none":
        again = {} if how["checkpointing"] else {"checkpointing": True}
        before = "".join("gradient_checkpointing_enable() and " for _ in again)
        medium = "file" if get_accelerator().device_name() == "cpu" else "host"
        add(f'{before}sequence_parallel.offload: "{medium}"', offload=medium, **again)
    double = 2 * setup.shared
    states = setup.states(ranks=max(setup.ranks, double))
    add(f"{double} ranks for a sequence (sequence_parallel.size: {double})", shared=double, states=states)
    return found
