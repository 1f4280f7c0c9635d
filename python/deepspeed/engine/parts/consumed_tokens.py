"""Counts the tokens that the engine trains on."""

import collections.abc
import functools
import inspect

import torch

from deepspeed import comm as dist
from deepspeed.engine.members import Part, engine_parts, member, through_hooks
from deepspeed.log import logger

_KEYS = (
    '"max_train_tokens", "unit": "tokens" in "scheduler.params", "curriculum_learning": {"enabled": true} or '
    '"data_efficiency": {"enabled": true}'
)
_UNCOUNTED = (
    "the tokens cannot be counted, because forward got neither a 2-dimensional attention_mask nor input_ids. Call "
    "engine.count_tokens(n) before engine.step()"
)


class Uncounted(AttributeError, RuntimeError):
    """Tokens are not counted. It is an AttributeError so that ``hasattr(engine, "consumed_tokens")`` is an answer."""


@engine_parts.add("_tokens")
class ConsumedTokens(Part):
    """A part of the engine. It counts nothing unless a key of the configuration needs tokens.

    Each forward that a backward has reached is a micro-batch. Its number of tokens is the number that ``count_tokens``
    was given. Without that it is the number of entries other than 0 in the 2-dimensional ``attention_mask``, then the
    known number of a dynamic batch, then the number of elements of ``input_ids``, or in a pipeline of the first
    2-dimensional tensor of whole numbers. Tokens that the model cuts off at ``curriculum_seqlen`` are not counted. The
    hooks ``effective_tokens`` of all parts may change the number. Sums over ranks are made once for each step.
    """

    counts = needed = False  # needed: the learning rate or the end of the training depends on them
    notes = False  # whether this rank's tokens are known to reports
    of_rank = None  # tokens of this rank in the last step, a number or a tensor; None: not known
    consumed, of_step = 0, 0  # by all ranks, up to the last step and in the step under way
    unknown = None  # the first step with micro-batches that could not be counted, if tokens are not needed
    # ([tokens, micro-batches without a count], number of the step) of the step under way, and of the last one
    _sums = _late = None
    _told = None  # the number that ``count_tokens`` was given for the micro-batch under way

    def __init__(self, engine):
        super().__init__(engine)
        self._seen = []  # in a pipeline: tokens of the micro-batches of this step; None if they cannot be counted
        self._noted = None  # tokens of the forward under way
        self._forwards = {}  # those of the forwards since the last call of step, by their numbers
        self._window = []  # effective tokens of the earlier micro-batches of this step; None if they cannot be counted
        self._reported = []  # the same, where reports take them from inputs of any name

    def start(self):
        engine = self.engine
        by_tokens = "tokens" in getattr(engine.lr_scheduler, "units", ())
        self.needed = by_tokens or engine._config.max_train_tokens is not None
        self.counts = self.needed or engine.data_efficiency_enabled() or engine.curriculum_enabled_legacy()
        self.notes = self.counts or engine._config.step_log_config.enabled

    # ---- what users ask ----------------------------------------------------------------------------------------------
    @property
    @member
    def consumed_tokens(self):
        """Effective tokens of all steps up to now, over all ranks, those of skipped steps included."""
        self._need_counts("consumed_tokens")
        self._settle()
        if self.unknown is not None:
            raise Uncounted(f"engine.consumed_tokens: step {self.unknown} has micro-batches for which {_UNCOUNTED}")
        return self.consumed

    def _need_counts(self, name):
        if not self.counts:
            raise Uncounted(f"engine.{name}: tokens are not counted in this run. Set {_KEYS}")

    @member
    def count_tokens(self, tokens):
        """Sets the number of tokens of this rank's micro-batch, or in a pipeline of all micro-batches of the next
        ``train_batch()``. Call it before ``engine.step()``. Several calls add up."""
        self._need_counts("count_tokens()")
        if isinstance(tokens, bool) or not isinstance(tokens, (int, float)) or tokens < 0 or tokens != int(tokens):
            raise ValueError(f"engine.count_tokens({tokens!r}): the number of tokens must be a whole number >= 0")
        self._told = int(tokens) + (self._told or 0)

    @member
    def training_ended(self):
        """Whether the steps up to now have reached ``max_train_tokens``. Without that key it is always False."""
        limit = self.engine._config.max_train_tokens
        return limit is not None and self.consumed >= limit

    def done(self):
        """``{unit: number}`` of samples, tokens and tokens of layers at the end of the step under way, for
        schedules."""
        engine = self.engine
        return {
            "samples": engine.global_samples + engine._data.samples_of_step(),
            "tokens": self.consumed + self.of_step,
            "layer_tokens": engine._token_dropping.layer_tokens(),
        }

    # ---- a step ------------------------------------------------------------------------------------------------------
    def see_inputs(self, inputs, kwargs):
        if self.notes:
            found = self._tokens_in(inputs, kwargs)
            self._noted = found, _first_ids((*inputs, *kwargs.values())) if found is None else None

    def forwarded(self, number):
        if self.notes:
            self._forwards[number] = self._noted

    def see_micro_batch(self, inputs, number):
        """Counts the tokens in the inputs of a micro-batch of a pipeline, on the first stage."""
        if self.notes and torch.is_grad_enabled():
            several = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
            ids = (one for one in several if _has_rows(one) and not one.is_floating_point() and one.dtype != torch.bool)
            known = self.engine._dynamic.tokens(number)
            self._seen.append((next((one.numel() for one in ids), None) if known is None else known, None))

    @functools.cached_property
    def _positions(self):
        try:
            return list(inspect.signature(self.engine.module.forward).parameters)
        except (TypeError, ValueError):  # written in C
            return []

    def _tokens_in(self, inputs, kwargs):
        whole = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], collections.abc.Mapping) else {}
        named = {**dict(zip(self._positions, inputs)), **whole, **kwargs}
        ids, mask, cut = (named.get(key) for key in ("input_ids", "attention_mask", "curriculum_seqlen"))
        if _has_rows(mask) and (not torch.is_tensor(ids) or ids.shape == mask.shape):
            return mask[:, :cut].count_nonzero()
        known = self.engine._dynamic.tokens()
        if known is not None or not torch.is_tensor(ids):
            return known
        return ids[:, :cut].numel() if _has_rows(ids) else ids.numel()

    def before_micro_step(self, boundary):
        if not self.notes:
            return
        seen = [*self._seen, *self.engine._backward.counted(self._forwards)] if self._told is None else [(self._told, None)]
        for tokens, of_report in seen:
            self._window.append(None if tokens is None else through_hooks(self.engine, "effective_tokens", tokens))
            self._reported.append(of_report if tokens is None else self._window[-1])
        self._seen, self._forwards, self._told = [], {}, None
        if boundary and self.counts:
            self._add_up()

    def _add_up(self):
        """Adds up the tokens of all ranks that see different data, and sends the sum from the first stage of a pipeline
        to the others. All ranks learn of micro-batches without a count on any rank."""
        parallel, device = self.engine.parallel, self.engine.device
        known = [tokens for tokens in self._window if tokens is not None]
        own = [round(tokens) for tokens in known if not torch.is_tensor(tokens)]
        sums = torch.tensor([sum(own), len(self._window) - len(known)], dtype=torch.int64, device=device)
        for tokens in known:
            if torch.is_tensor(tokens):  # on a device: the host does not wait for it here
                sums[0] += tokens.to(device).round().long() if tokens.is_floating_point() else tokens.to(device)
        if parallel.dp_world_size > 1:
            dist.all_reduce(sums, group=parallel.dp_group)
        if parallel.mp_world_size > 1:
            dist.all_reduce(sums, op=dist.ReduceOp.MAX, group=parallel.mp_group)
        self._sums = sums, self.engine.global_steps
        if not self.needed:
            return
        self.of_step, uncounted = sums.tolist()
        if uncounted:
            self._forget()
            raise RuntimeError(f"this step has {uncounted} micro-batches for which {_UNCOUNTED}")

    def _forget(self):
        self._seen, self._told, self._window, self._sums, self.of_step = [], None, [], None, 0
        self._forwards, self._reported = {}, []

    def after_micro_step(self, boundary):
        if not boundary:
            return
        known = [tokens for tokens in self._reported if tokens is not None]
        self.of_rank = sum(known) if known else None
        self._settle()
        self._late = self._sums
        if self.needed:
            self._settle()
        self._forget()

    def _settle(self):
        """Adds the last step. The host reads its sums as late as possible, because on a device it waits for them."""
        if self._late is None:
            return
        (sums, step), self._late = self._late, None
        tokens, uncounted = sums.tolist()
        self.consumed += tokens
        if uncounted and self.unknown is None:
            self.unknown = step

    @property
    def saved(self):
        """The number for checkpoints; None if not all tokens were counted."""
        self._settle()
        return self.consumed if self.counts and self.unknown is None else None

    def restore(self, consumed):
        """Continues after a checkpoint. ``consumed`` is None if the checkpoint has no number of tokens."""
        self.consumed, self.unknown, self._late = consumed or 0, None, None
        self._forget()
        if self.counts and consumed is None and self.engine.global_steps:
            logger.warning("the checkpoint has no number of consumed tokens: they are counted from 0")


def _first_ids(values):
    """The elements of the first tensor of whole numbers with two dimensions: tokens, for reports. None without one."""
    ids = (one for one in values if _has_rows(one) and one.dtype in (torch.int64, torch.int32))
    return next((one.numel() for one in ids), None)


def _has_rows(value):
    return torch.is_tensor(value) and value.dim() == 2
