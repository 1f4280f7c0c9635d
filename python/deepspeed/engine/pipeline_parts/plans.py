"""The schedule of a pipeline, and its cost."""

import sys

import torch

from deepspeed import _native
from deepspeed.activation_checkpointing import checkpointing
from deepspeed.engine.members import Part, member, pipeline_parts
from deepspeed.log import warning_once
from deepspeed.pipe import schedule
from deepspeed.pipe.planning import NOT_SPLIT
from deepspeed.pipe.profile import tensors_of
from deepspeed.registry import load_target
from deepspeed.zero.nested import replace


@pipeline_parts.add("_plans")
class Plans(Part):
    """A part of a pipeline's engine. Schedules are proven before they start (csrc/plan/pipe_check.h).

    ``sample``, ``label_sample``: inputs and labels of a micro-batch, as shapes; None: not known yet.
    """

    def begin(self):
        """Once this engine knows its stage."""
        section = self.engine._config.pipeline
        self._own_train_schedule, self._own_eval_schedule = schedule.TrainSchedule, schedule.InferenceSchedule
        self._fastest_names, self._schedules, self._proven = {}, {}, set()
        self.sample, self.label_sample = shapes_of(self.engine.module.profile_input), None
        self._split_prepared = False
        self._check_section(section)
        self.name, self.memory_limit = self.engine.module.schedule or section["schedule"], section["memory_limit"]
        if self.name != "auto":
            self.planned(self.engine.micro_batches)

    def _check_section(self, section):
        stages, partition = section["stages"], section["partition"]
        if stages not in ("auto", self.engine.num_stages):
            raise ValueError(
                f"pipeline.stages is {stages}, but the PipelineModule has {self.engine.num_stages}: leave the key out, "
                f"the module decides"
            )
        if partition not in ("best", self.engine.module.partition_method):
            raise ValueError(
                f"pipeline.partition is {partition!r}, but the PipelineModule was cut by "
                f"{self.engine.module.partition_method!r}: leave the key out, the module decides"
            )
        if section["seed_layers"]:
            self.engine.module.seed_layers = True
        if section["activation_checkpoint_interval"]:
            self.engine.module.set_checkpoint_interval(section["activation_checkpoint_interval"])
        if not section["use_reentrant"] and self.engine.module.activation_checkpoint_func is checkpointing.checkpoint:
            self.engine.module.activation_checkpoint_func = checkpointing.non_reentrant_checkpoint

    def why_whole(self):
        """The reason why this engine computes both halves of a backward at once; "" where it does not."""
        if self.engine._stage_policy.shards_params:
            return "ZeRO stage 3 gathers weights for one pass; use stage 2, or a schedule that does not split"
        ours = (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint, checkpointing.split_checkpoint)
        module = self.engine.module
        if any(module.is_checkpointable_results) and module.activation_checkpoint_func not in ours:
            return (
                "activation_checkpoint_func may be re-entrant; leave it out, and segments are recomputed once for both"
            )
        return ""

    def prepare_split(self):
        """Before a schedule with backwards in two halves: nothing falls back in silence."""
        if self._split_prepared:
            return
        self._split_prepared, why = True, self.why_whole()
        if why:
            warning_once(f"pipeline.schedule {self.name}: {NOT_SPLIT}: {why}", key="pipeline: not split")
        elif any(self.engine.module.is_checkpointable_results):
            self.engine.module.activation_checkpoint_func = checkpointing.split_checkpoint

    # ---- schedules ---------------------------------------------------------------------------------------------------
    def planned(self, micro_batches):
        """This stage's part of the schedule of the configuration."""
        if self.name != "auto":
            return self._proved(self.name, micro_batches)
        if micro_batches not in self._fastest_names:
            self._fastest_names[micro_batches] = self._fastest(micro_batches)
        return self._proved(self._fastest_names[micro_batches], micro_batches)

    def used(self):
        """The name of the schedule that a batch has now."""
        return self._fastest_names.get(self.engine.micro_batches, self.name)

    def _proved(self, name, micro_batches, *placement):
        """This stage's part of the schedule ``name``, which is made and proven once."""
        key, shape = (name, micro_batches), self.engine.module.pipe_shape
        if key not in self._schedules:
            native = _native._C.pipe.schedule(name, shape.stages, shape.chunks, micro_batches, *placement)
            if shape.chunks > 1 and native.shape.placement != shape.placement:
                raise ValueError(
                    f"pipeline.schedule {name!r} has its parts in placement {native.shape.placement!r}, the module in "
                    f"{shape.placement!r}: PipelineModule(virtual_stages={shape.chunks}, "
                    f"placement={native.shape.placement!r})"
                )
            native.check()
            self._schedules[key] = FixedSchedule(schedule.NativeSchedule(native, self.engine.stage_id))
        return self._schedules[key]

    def _fastest(self, micro_batches):
        """The name of the schedule that is through first, of those that fit: as the first rank finds, for all."""
        found = [None]
        if self.engine.is_first_stage():
            try:
                batches = self.engine._batches
                if self.sample is None:
                    self.sample = shapes_of(batches.inputs_of(batches.pair(batches.peek())[0]))
                found = [self.engine.pipe_plan(micro_batches).schedule]
            except Exception as error:
                found = [error]
        self.engine._links.from_first(found)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def train_schedule(self):
        """The schedule that a client has assigned instead of ours; else the one that ``pipeline.schedule`` names."""
        facade = sys.modules.get("deepspeed.runtime.pipe.schedule")
        for module in (facade, schedule):
            made = getattr(module, "TrainSchedule", None)
            if made is not None and made is not self._own_train_schedule:
                return self._of_client(made)
        return self.planned(self.engine.micro_batches)

    def see_inputs(self, inputs):
        """Remembers the shapes of a micro-batch for the plan."""
        if self.sample is None:
            self.sample = shapes_of(inputs)

    def see_labels(self, labels):
        """Remembers the shapes of its labels."""
        if self.label_sample is None:
            self.label_sample = _shapes_of_labels(labels)

    def eval_schedule(self, micro_batches):
        if schedule.InferenceSchedule is not self._own_eval_schedule:
            return schedule.InferenceSchedule(micro_batches, self.engine.num_stages, self.engine.stage_id)
        return self._proved("inference", micro_batches, self.engine.module.pipe_shape.placement)

    def _of_client(self, made):
        """``made`` is a class of the client's; it is proven for all stages before it runs here."""
        if self.engine.module.pipe_shape.chunks > 1:
            raise ValueError(
                f"the schedule {made.__name__} is for one part on each stage, the module has "
                f"{self.engine.module.pipe_shape.chunks}: PipelineModule(virtual_stages=1)"
            )
        key = (made, self.engine.micro_batches)
        if key not in self._proven:
            schedule.plan_of(made, self.engine.micro_batches, self.engine.num_stages).check()
            self._proven.add(key)
        return made(self.engine.micro_batches, self.engine.num_stages, self.engine.stage_id)

    # ---- what it costs -----------------------------------------------------------------------------------------------
    @member
    def pipe_plan(self, micro_batches=None):
        """The ``PipelinePlan`` of a batch: schedule, bubble, timeline, and for each stage layers, parameters, bytes of
        states and activations, bytes sent. Known from the first batch on, or with ``profile_input=``.

        ``measured`` of it is None, or after ten batches ``{"seconds", "bubble", "bytes_sent"}``: of a batch, the share
        of the stages' time without a pass, and what this stage has sent.
        """
        if self.sample is None:
            raise RuntimeError(
                "pipe_plan() does not know the inputs yet: call it after the first train_batch(), or give the "
                "PipelineModule a profile_input="
            )
        return load_target("deepspeed.planner.parts:pipe_plan_of")(self.engine, micro_batches)


class FixedSchedule:
    """The instructions of a schedule, made once."""

    def __init__(self, made):
        self.plan, self._buffers, self._steps = made.plan, made.num_pipe_buffers(), [list(step) for step in made]

    def num_pipe_buffers(self):
        return self._buffers

    def __iter__(self):
        return iter(self._steps)


def shapes_of(inputs):
    """The same, of shapes and types alone, which can be sent; None for None."""
    return replace(inputs, torch.is_tensor, lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"))


def _shapes_of_labels(labels):
    """For the plan; None where they are more than a tensor or some tensors."""
    plain = isinstance(labels, torch.Tensor)
    labels = labels if plain else tuple(labels) if isinstance(labels, (tuple, list)) else ()
    return shapes_of(labels) if plain or (labels and len(tensors_of(labels)) == len(labels)) else None
