"""Which schedule a pipeline runs, and what it costs: a base of ``PipelineEngine``."""

import time

import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.activation_checkpointing import checkpointing
from deepspeed.log import log_dist, warning_once
from deepspeed.pipe import schedule
from deepspeed.pipe.planning import NOT_SPLIT, plan

MEASURED_AFTER = 10  # batches; the first two, which warm up and wait for the plan, are not among those measured


class Plans:
    """Schedules are proven before they start (csrc/plan/pipe_check.h)."""

    def _start_plans(self):
        section = self._config.pipeline
        self._own_train_schedule, self._own_eval_schedule = schedule.TrainSchedule, schedule.InferenceSchedule
        self._schedules, self._proven = {}, set()
        self._sample = shapes_of(self.module.profile_input)  # inputs of a micro-batch; None: not known yet
        self._label_sample, self._plan_told = None, False  # after the first batch
        self._busy = self._measured_since = self._measured = None
        self._last_pass = 0.0  # when the last one ended
        self._split_prepared = False
        self._check_section(section)
        self.schedule_name, self.memory_limit = section["schedule"], section["memory_limit"]
        if self.schedule_name != "auto":
            self._planned(self.micro_batches)

    def _check_section(self, section):
        stages, partition = section["stages"], section["partition"]
        if stages not in ("auto", self.num_stages):
            raise ValueError(
                f"pipeline.stages is {stages}, but the PipelineModule has {self.num_stages}: leave the key out, the "
                f"module decides"
            )
        if partition not in ("best", self.module.partition_method):
            raise ValueError(
                f"pipeline.partition is {partition!r}, but the PipelineModule was cut by "
                f"{self.module.partition_method!r}: leave the key out, the module decides"
            )
        if section["seed_layers"]:
            self.module.seed_layers = True
        if section["activation_checkpoint_interval"]:
            self.module.set_checkpoint_interval(section["activation_checkpoint_interval"])
        if not section["use_reentrant"] and self.module.activation_checkpoint_func is checkpointing.checkpoint:
            self.module.activation_checkpoint_func = checkpointing.non_reentrant_checkpoint

    def _why_whole(self):
        """Why this engine computes both halves of a backward at once; "" where it does not."""
        if self._stage_policy.shards_params:
            return "ZeRO stage 3 gathers weights for one pass; use stage 2, or a schedule that does not split"
        ours = (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint, checkpointing.split_checkpoint)
        if any(self.module.is_checkpointable_results) and self.module.activation_checkpoint_func not in ours:
            return (
                "activation_checkpoint_func may be re-entrant; leave it out, and segments are recomputed once for both"
            )
        return ""

    def _prepare_split(self):
        """Before the first schedule with backwards in two halves: nothing falls back in silence."""
        self._split_prepared, why = True, self._why_whole()
        if why:
            warning_once(f"pipeline.schedule {self.schedule_name}: {NOT_SPLIT}: {why}", key="pipeline: not split")
        elif any(self.module.is_checkpointable_results):
            self.module.activation_checkpoint_func = checkpointing.split_checkpoint

    # ---- schedules ---------------------------------------------------------------------------------------------------
    def _planned(self, micro_batches):
        """This stage's part of the schedule of the configuration."""
        key = ("train", micro_batches)
        if key not in self._schedules:
            shape, name = self.module.pipe_shape, self.schedule_name
            if name == "auto":
                name = self._fastest(micro_batches)
            native = _native._C.pipe.schedule(name, shape.stages, shape.chunks, micro_batches)
            if shape.chunks > 1 and native.shape.placement != shape.placement:
                raise ValueError(
                    f"pipeline.schedule {name!r} has its parts in placement {native.shape.placement!r}, the module in "
                    f"{shape.placement!r}: PipelineModule(virtual_stages={shape.chunks}, "
                    f"placement={native.shape.placement!r})"
                )
            self._schedules[key] = self._proved(native)
        return self._schedules[key]

    def _fastest(self, micro_batches):
        """The name of the schedule that is through first, of those that fit: as the first rank finds, for all."""
        found = [None]
        if self.is_first_stage():
            try:
                if self._sample is None:
                    self._sample = shapes_of(self._inputs_of(self._pair(self._peek())[0]))
                found = [self.pipe_plan(micro_batches).schedule]
            except Exception as error:
                found = [error]
        self._broadcast_from_first(found)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _broadcast_from_first(self, objects):
        """Stages of one copy hear of its first stage, copies of stages of the first copy: all have the same then."""
        grid = self.grid
        if self._copies is not None and self.is_first_stage():
            dist.broadcast_object_list(objects, self.parallel.source_rank(), group=self.parallel.dp_group)
        if self.is_pipe_parallel:
            dist.broadcast_object_list(objects, grid.stage_to_global(0), group=grid.get_pipe_parallel_group())

    def _eval_schedule(self, micro_batches):
        if schedule.InferenceSchedule is not self._own_eval_schedule:
            return schedule.InferenceSchedule(micro_batches, self.num_stages, self.stage_id)
        key = ("eval", micro_batches)
        if key not in self._schedules:
            shape = self.module.pipe_shape
            native = _native._C.pipe.schedule("inference", shape.stages, shape.chunks, micro_batches, shape.placement)
            self._schedules[key] = self._proved(native)
        return self._schedules[key]

    def _proved(self, native):
        native.check()
        return FixedSchedule(schedule.NativeSchedule(native, self.stage_id))

    def _clients_schedule(self, made):
        """``made`` is a class of the client's; it is proven for all stages before it runs here."""
        if self.module.pipe_shape.chunks > 1:
            raise ValueError(
                f"the schedule {made.__name__} is for one part on each stage, the module has "
                f"{self.module.pipe_shape.chunks}: PipelineModule(virtual_stages=1)"
            )
        key = (made, self.micro_batches)
        if key not in self._proven:
            schedule.plan_of(made, self.micro_batches, self.num_stages).check()
            self._proven.add(key)
        return made(self.micro_batches, self.num_stages, self.stage_id)

    # ---- what it costs -----------------------------------------------------------------------------------------------
    def pipe_plan(self, micro_batches=None):
        """The ``PipelinePlan`` of a batch: schedule, bubble, timeline, and for each stage layers, parameters, bytes of
        states and activations, bytes sent. Known from the first batch on, or with ``profile_input=``.

        ``measured`` of it is None, or after ten batches ``{"seconds", "bubble", "bytes_sent"}``: of a batch, the share
        of the stages' time without a pass, and what this stage has sent.
        """
        if self._sample is None:
            raise RuntimeError(
                "pipe_plan() does not know the inputs yet: call it after the first train_batch(), or give the "
                "PipelineModule a profile_input="
            )
        module = self.module
        found = plan(
            module._layer_specs,
            self.num_stages,
            micro_batches or self.micro_batches,
            schedule=self.schedule_name,
            sample=self._sample,
            partition_method=list(module.parts),
            virtual_stages=module.pipe_shape.chunks,
            placement=module.pipe_shape.placement,
            costs=module.layer_costs,
            memory_limit=self.memory_limit,
            state_bytes=self._state_bytes(),
            split_backward=not self._why_whole(),
            activation_checkpoint_interval=module.activation_checkpoint_interval,
            checkpointable_layers=module.checkpointable_layers,
            loss_fn=module.loss_fn,
            labels=self._label_sample,
        )
        found.note = found.note.replace(NOT_SPLIT, f"{NOT_SPLIT}: {self._why_whole()}")
        found.measured = self._measured
        return found

    def _state_bytes(self):
        """Of parameters, gradients, masters and two moments, for each parameter."""
        model, grads = (dtype.itemsize if hasattr(dtype, "itemsize") else torch.empty((), dtype=dtype).element_size()
                        for dtype in self.get_data_types())  # fmt: skip
        copies, policy = self.parallel.dp_world_size, self._stage_policy
        states = (8 if model == 4 else 12) / (copies if policy.shards_states else 1)
        grads = grads / (copies if policy.shards_grads else 1)
        return round(states + grads + model / (copies if policy.shards_params else 1))

    def _tell_of_plan(self, began, seconds):
        """At the first batch the plan, after ten what was measured: of the bubble, as the plan does, from the start of
        a batch to the end of the last pass of all stages, without reductions and update."""
        if self._measured is not None:
            return
        if not self._plan_told:
            sample, labels = [self._sample], [self._label_sample]
            self._broadcast_from_first(sample)
            if self.is_pipe_parallel:
                source = self.grid.stage_to_global(self._last_stage)
                dist.broadcast_object_list(labels, source, group=self.grid.get_pipe_parallel_group())
            self._label_sample = labels[0]
            self._sample, self._plan_told = sample[0], True
            self._print_plan()
            return
        if self._measured_since is None:  # in this batch the others have waited for the one that has printed
            self._measured_since = (self.global_steps, self.channel.sent[1])
            self._busy, self._seconds, self._span = 0.0, 0.0, 0.0
            return
        self._seconds += seconds
        self._span += self._last_pass - began
        batches = self.global_steps - self._measured_since[0]
        if batches < MEASURED_AFTER - 2:
            return
        busy, longest = (
            torch.tensor(one, dtype=torch.float32, device=self.device)
            for one in ([self._busy], [self._seconds, self._span])
        )
        if self.is_pipe_parallel:
            self._stages.run("all_reduce", output=busy, op="sum").wait()
            self._stages.run("all_reduce", output=longest, op="max").wait()
        seconds, span = (max(one, 1e-9) for one in longest.tolist())
        self._measured = {
            "seconds": seconds / batches,
            # The host only asks a device for passes: how long they take is not known here.
            "bubble": 1 - busy.item() / (span * self.num_stages) if self.device.type == "cpu" else None,
            "bytes_sent": (self.channel.sent[1] - self._measured_since[1]) // batches,
        }
        bubble = self._measured["bubble"]
        log_dist(
            f"pipeline, measured over {batches} batches: {self._measured['seconds'] * 1e3:.2f} ms a batch"
            + ("" if bubble is None else f", bubble {bubble:.1%}")
            + f", {self._measured['bytes_sent'] / 2**20:.2f} MB sent by stage {self.stage_id}",
            ranks=[0],
        )

    def _print_plan(self):
        if self.global_rank != 0 or self.is_model_parallel:  # sliced layers would wait for the other slices
            return
        try:
            log_dist(str(self.pipe_plan()), ranks=[0])
        except Exception as error:
            log_dist(f"the plan of the pipeline is not known: {error}", ranks=[0])

    def _now(self):
        return time.perf_counter()


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
    if isinstance(inputs, tuple):
        return tuple(shapes_of(one) for one in inputs)
    if not isinstance(inputs, torch.Tensor):
        return inputs
    return torch.empty(inputs.shape, dtype=inputs.dtype, device="meta")
