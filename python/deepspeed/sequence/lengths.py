"""The longest sequence that fits, found before a run: ``deepspeed.sequence.longest`` and ``explain``. The figures come
from ``deepspeed.planner.lengths``."""

from dataclasses import dataclass

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.log import logger
from deepspeed.registry import load_target

GAIN = 10  # a further step must allow this many percent more tokens
GIB = 1 << 30


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank when a step needs most. ``parts``: by name; ``moment``: of the step, which that is."""

    tokens: int
    bytes: int
    parts: dict
    moment: str


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
    longest_of = load_target("deepspeed.planner.lengths:longest")
    return longest_of(_memory(memory), model, config, ranks, inputs, batch)


class LengthReport:
    """The result of ``explain``; its text is a table.

    ``longest``: tokens that fit. ``check``: the distance of a further sample from the curve, in words. ``peaks``:
    a ``Peak`` each for some lengths. ``steps``: ``(what to change, the longest then)``, the cheapest first.
    ``next_step``: the cheapest one with which 10 % more fit, or None.
    """

    def __init__(self, curve, memory, lengths, steps):
        self.memory, self.longest, self.steps, self.curve = memory, curve.longest(memory), steps, curve
        self.check = curve.said()
        self.peaks = [curve.peak(tokens) for tokens in lengths or curve.shown(memory)]
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
    room, explained = _memory(memory), load_target("deepspeed.planner.lengths:explained")
    curve, steps = explained(room, lengths, model, config, ranks, inputs, batch)
    report = LengthReport(curve, room, lengths, steps)
    logger.debug("%s", report)
    return report
