"""Other configurations of a job: the cheapest change with which it fits, and the fastest of all combinations."""

import copy
import functools
import itertools
from typing import NamedTuple

from deepspeed._native import _C
from deepspeed.planner.child import PlanError
from deepspeed.planner.plans import plan

_STAGES = (0, 1, 2, 3)
_OFFLOADS = {
    "none": {},
    "offload_optimizer": {"offload_optimizer": {"device": "cpu"}},
    "offload_optimizer and offload_param": {
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


class Candidate(NamedTuple):
    """``words``: the settings, as a user writes them. ``plan``: None where the engine refuses them: ``why``."""

    words: str
    config: dict
    recompute: bool
    micro_batch: int
    pipe: object = None  # the number of stages of a pipeline, where the search chooses it
    plan: object = None
    why: str = ""

    @property
    def samples_per_second(self):
        steps = self.config.get("gradient_accumulation_steps") or 1
        copies = self.plan.world / len(self.plan.ranks)  # a rank of each stage is planned
        return self.micro_batch * steps * copies / self.plan.seconds if self.plan.seconds else 0.0


class Search:
    """Plans other settings of one job. ``model``: a function of ``recompute``, and of a number of pipeline stages if
    there are ``pipes`` to try, that makes the model on meta; ``sample``: a function of the micro-batch that makes its
    inputs; ``how``: more arguments of ``plan``."""

    def __init__(self, model, config, world, memory, sample, machine, can_recompute, pipes=(None,), **how):
        self.how = {**how, "measure": {}} if how.get("measure") else how
        self.model, self.config, self.world, self.memory = model, config, world, memory
        self.sample, self.machine, self.can_recompute, self.pipes = sample, machine, can_recompute, pipes
        zero = config.get("zero_optimization") or {}
        self.stage = int(zero.get("stage", 0))
        self.micro_batch = int(config.get("train_micro_batch_size_per_gpu") or 1)
        self.steps = int(config.get("gradient_accumulation_steps") or 1)

    def candidate(self, stage=None, micro_batch=None, offload="none", recompute=False, pipe=None):
        """The settings with the same number of samples of a step, as far as whole micro-batches allow it."""
        stage, micro_batch = self.stage if stage is None else stage, micro_batch or self.micro_batch
        config = copy.deepcopy(self.config)
        config.pop("train_batch_size", None)
        zero = {**(config.get("zero_optimization") or {}), "stage": stage}
        zero = {key: value for key, value in zero.items() if not key.startswith("offload_")}
        steps = max(1, self.steps * self.micro_batch * (pipe or 1) // micro_batch)
        config["zero_optimization"] = {**zero, **copy.deepcopy(_OFFLOADS[offload])}
        config.update(train_micro_batch_size_per_gpu=micro_batch, gradient_accumulation_steps=steps)
        words = [f"zero_optimization.stage {stage}", f"micro-batch {micro_batch} x {steps}"]
        words += [f"{part} on the host" for part in offload.split(" and ") if part != "none"]
        words += ["recomputation"] if recompute else []
        words += [f"{pipe} pipeline stages"] if pipe else []
        return Candidate(", ".join(words), config, recompute, micro_batch, pipe)

    def planned(self, candidate):
        """The candidate with its plan."""
        try:
            made = plan(
                functools.partial(self.model, candidate.recompute, *([candidate.pipe] if candidate.pipe else [])),
                candidate.config,
                self.world,
                self.memory,
                self.sample(candidate.micro_batch),
                self.machine,
                ranks=[0],
                **self.how,
            )
        except (ValueError, PlanError) as error:
            return candidate._replace(why=str(error).splitlines()[0])
        return candidate._replace(plan=made, why="" if made.fits else made.why)

    def single_changes(self):
        """Each setting changed alone, then those that are needed together."""
        yield self.candidate(recompute=True) if self.can_recompute else None
        for stage in _STAGES[self.stage + 1 :] if self.world > 1 else ():
            yield self.candidate(stage=stage)
        size = self.micro_batch // 2
        while size:
            yield self.candidate(micro_batch=size)
            size //= 2
        yield self.candidate(stage=max(1, self.stage), offload="offload_optimizer")
        yield self.candidate(stage=3, offload="offload_optimizer and offload_param")

    def all(self):
        sizes = sorted({max(1, self.micro_batch // 2), self.micro_batch, self.micro_batch * 2, self.micro_batch * 4})
        recompute = (False, True) if self.can_recompute else (False,)
        for stage, size, offload, again, pipe in itertools.product(_STAGES, sizes, _OFFLOADS, recompute, self.pipes):
            policy = _C.stage_policy(stage)
            if (pipe or 1) > 1 and (policy.shards_grads or offload != "none"):
                continue  # its gradients stay whole until the end of a batch
            needed = policy.shards_params if "param" in offload else policy.shards_states or offload == "none"
            alike = self.world == 1 and policy.shards_states and not policy.shards_params  # as stage 0 then
            if needed and not alike:
                yield self.candidate(stage, size, offload, again, pipe)

    def cheapest_change(self):
        """The fastest single change that fits; where none does, the fastest of all settings; None: nothing fits."""
        fitting = [one for one in map(self.planned, filter(None, self.single_changes())) if one.plan and one.plan.fits]
        return max(fitting or self.fastest(1)[0], key=lambda one: one.samples_per_second, default=None)

    def fastest(self, count=10):
        """The ``count`` fastest candidates that fit, and the number of all."""
        tried = list(map(self.planned, self.all()))
        fitting = [one for one in tried if one.plan is not None and one.plan.fits]
        return sorted(fitting, key=lambda one: -one.samples_per_second)[:count], len(tried)
