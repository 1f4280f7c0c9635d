"""Other configurations of a job: the cheapest change with which it fits, and the fastest of all combinations."""

import copy
import functools
import itertools
from typing import NamedTuple

import torch

from deepspeed._native import _C
from deepspeed.planner.child import PlanError, run_each_apart
from deepspeed.planner.plans import plan
from deepspeed.zero.nested import replace, tensors_in

_STAGES = (0, 1, 2, 3)
_OFFLOADS = {
    "none": {},
    "offload_optimizer": {"offload_optimizer": {"device": "cpu"}},
    "offload_optimizer and offload_param": {
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


class Split(NamedTuple):
    """The way in which ranks share a model; None: as the job says it. ``num_stages`` and ``ep_size`` are arguments of
    the function that makes the model, ``autoep_size`` and ``sequence`` (ranks that share a sequence) keys of the
    configuration."""

    num_stages: object = None
    ep_size: object = None
    autoep_size: object = None
    sequence: object = None

    def words(self):
        kinds = {"num_stages": "pipeline stages", "sequence": "ranks of a sequence"}
        for name, size in self._asdict().items():
            if size:
                yield f"{size} {kinds.get(name, 'ranks of the experts')}"

    def arguments(self):
        """Arguments of the function that makes the model."""
        return {name: size for name, size in self._asdict().items() if size and name in ("num_stages", "ep_size")}

    def put_into(self, config):
        if self.autoep_size:
            config["expert_parallel"] = {
                **config.get("expert_parallel", {}), "enabled": True, "autoep_size": self.autoep_size,
            }  # fmt: skip
        if self.sequence:
            config["sequence_parallel"] = {**config.get("sequence_parallel", {}), "size": self.sequence}
            config.pop("sequence_parallel_size", None)
            config.pop("data_parallel_size", None)


def sequence_ranks(config):
    """Ranks that share a sequence in the job of a configuration."""
    return config.get("sequence_parallel_size") or (config.get("sequence_parallel") or {}).get("size") or 1


def tokens_of(inputs):
    """The length of the sequences: the second size of the first tensor that has one, or 0."""
    return next((one.size(1) for one in tensors_in(inputs) if one.dim() > 1), 0)


def with_tokens(inputs, tokens):
    """Inputs whose sequences have another length."""
    before = tokens_of(inputs)
    if tokens == before:
        return inputs
    wanted = lambda one: torch.is_tensor(one) and one.dim() > 1 and one.size(1) == before
    return replace(inputs, wanted, lambda one: one.new_empty((one.size(0), tokens, *one.shape[2:]), device="meta"))


class Candidate(NamedTuple):
    """``words``: the settings, as a user writes them. ``plan``: None where the engine refuses them: ``why``."""

    words: str
    config: dict
    recompute: bool
    micro_batch: int
    split: Split = Split()
    plan: object = None
    why: str = ""

    @property
    def samples_per_second(self):
        steps = self.config.get("gradient_accumulation_steps") or 1
        copies = self.plan.world / len(self.plan.ranks) / sequence_ranks(self.config)  # a rank of each stage is planned
        return self.micro_batch * steps * copies / self.plan.seconds if self.plan.seconds else 0.0


def _is_full(candidate):
    """Whether larger micro-batches cannot fit, either: they would not take fewer of them to a step."""
    plan = candidate.plan
    return plan is not None and not plan.fits and candidate.config["gradient_accumulation_steps"] == 1


class Search:
    """Plans other settings of one job. ``model``: a function of ``recompute``, and of ``Split.arguments()``, that makes
    the model on meta; ``sample``: a function of the micro-batch that makes its inputs; ``splits``: those to try;
    ``how``: more arguments of ``plan``."""

    def __init__(self, model, config, world, memory, sample, machine, can_recompute, splits=(Split(),), **how):
        self.how = {**how, "measure": {}} if how.get("measure") is True else how
        self.model, self.config, self.world, self.memory = model, config, world, memory
        self.sample, self.machine, self.can_recompute, self.splits = sample, machine, can_recompute, splits
        zero = config.get("zero_optimization") or {}
        self.stage = int(zero.get("stage", 0))
        self.micro_batch = int(config.get("train_micro_batch_size_per_gpu") or 1)
        self.steps = int(config.get("gradient_accumulation_steps") or 1)
        self._of_sequence = sequence_ranks(config)

    def candidate(self, stage=None, micro_batch=None, offload="none", recompute=False, split=Split()):
        """The settings with the same number of samples of a step, as far as whole micro-batches allow it."""
        stage, micro_batch = self.stage if stage is None else stage, micro_batch or self.micro_batch
        config = copy.deepcopy(self.config)
        config.pop("train_batch_size", None)
        zero = {**(config.get("zero_optimization") or {}), "stage": stage}
        zero = {key: value for key, value in zero.items() if not key.startswith("offload_")}
        copies = (split.num_stages or 1) * (split.sequence or self._of_sequence) / self._of_sequence
        steps = max(1, int(self.steps * self.micro_batch * copies) // micro_batch)
        config["zero_optimization"] = {**zero, **copy.deepcopy(_OFFLOADS[offload])}
        config.update(train_micro_batch_size_per_gpu=micro_batch, gradient_accumulation_steps=steps)
        split.put_into(config)
        words = [f"zero_optimization.stage {stage}", f"micro-batch {micro_batch} x {steps}"]
        words += [f"{part} on the host" for part in offload.split(" and ") if part != "none"]
        words += ["recomputation"] if recompute else []
        return Candidate(", ".join([*words, *split.words()]), config, recompute, micro_batch, split)

    def planned(self, candidate):
        """The candidate with its plan."""
        inputs, ranks = self.sample(candidate.micro_batch), candidate.split.sequence or self._of_sequence
        tokens, rest = divmod(tokens_of(inputs) * self._of_sequence, ranks)
        if rest:
            return candidate._replace(why=f"sequences cannot be cut into {ranks} equal parts")
        try:
            made = plan(
                functools.partial(self.model, candidate.recompute, **candidate.split.arguments()),
                candidate.config,
                self.world,
                self.memory,
                with_tokens(inputs, tokens),
                self.machine,
                ranks=[0],
                **self.how,
            )
        except (ValueError, PlanError) as error:
            return candidate._replace(why=str(error).splitlines()[0])
        return candidate._replace(plan=made, why="" if made.fits else made.why)

    @functools.cached_property
    def single_changes(self):
        """The plans of each setting changed alone, then of those that are needed together."""
        found = [self.candidate(recompute=True)] if self.can_recompute else []
        if self.world > 1:
            found += [self.candidate(stage=stage) for stage in _STAGES[self.stage + 1 :]]
        sizes = (self.micro_batch >> shift for shift in range(1, self.micro_batch.bit_length()))
        found += [self.candidate(micro_batch=size) for size in sizes]
        found.append(self.candidate(stage=max(1, self.stage), offload="offload_optimizer"))
        found.append(self.candidate(stage=3, offload="offload_optimizer and offload_param"))
        return self._all_planned(found)

    @functools.cached_property
    def all(self):
        """The plans of all combinations. Where one micro-batch of a step does not fit, larger ones are not planned."""
        sizes = sorted({max(1, self.micro_batch // 2), self.micro_batch, self.micro_batch * 2, self.micro_batch * 4})
        recompute, made = (False, True) if self.can_recompute else (False,), []
        ways = itertools.product(_STAGES, _OFFLOADS, recompute, self.splits)
        ways = [way for way in ways if self._is_of_use(*way)]
        for size in sizes:
            found = self._all_planned([self.candidate(stage, size, *rest) for stage, *rest in ways])
            ways = [way for way, one in zip(ways, found) if not _is_full(one)]
            made += found
        return made

    def _all_planned(self, candidates):
        """Plans one candidate on each core at a time; only one at a time where operators are measured."""
        if self.how.get("measure", False) is not False:
            return list(map(self.planned, candidates))
        return run_each_apart(self.planned, [(one,) for one in candidates])

    def _is_of_use(self, stage, offload, recompute, split):
        policy = _C.stage_policy(stage)
        if (split.num_stages or 1) > 1 and (policy.shards_grads or offload != "none"):
            return False  # its gradients stay whole until the end of a batch
        alike = self.world == 1 and policy.shards_states and not policy.shards_params  # as stage 0 then
        needed = policy.shards_params if "param" in offload else policy.shards_states or offload == "none"
        return needed and not alike

    def cheapest_change(self):
        """The fastest single change that fits; where none does, the fastest of all settings; None: nothing fits."""
        fitting = [one for one in self.single_changes if one.plan and one.plan.fits]
        return max(fitting or self.fastest(1), key=lambda one: one.samples_per_second, default=None)

    def fastest(self, count=10):
        """The ``count`` fastest candidates that fit."""
        fitting = [one for one in self.all if one.plan is not None and one.plan.fits]
        return sorted(fitting, key=lambda one: -one.samples_per_second)[:count]
