"""``PipelineEngine``: what ``deepspeed.initialize`` makes of a ``PipelineModule``."""

import time

import torch

from deepspeed.engine import pipeline_parts as parts
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.members import pipeline_parts
from deepspeed.engine.pipeline_parts.execution import INSTRUCTIONS
from deepspeed.log import log_dist
from deepspeed.pipe.failures import PipelineError
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.ranks import PipelineMesh
from deepspeed.utils.forwarding import answers_from

_DTYPES = [
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float16, torch.bfloat16, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip


@answers_from(
    {
        "get_pipeline_parallel_rank": "stage_id",
        "get_additional_losses": "module.get_additional_losses()",  # of this stage
    }
)
@pipeline_parts.compose(parts)
class PipelineEngine(DeepSpeedEngine):
    """Trains the stages of a ``PipelineModule``: ``train_batch()`` stands for forward, backward and step of
    ``gradient_accumulation_steps()`` micro-batches. The other arguments are those of ``DeepSpeedEngine``."""

    ID_TO_DTYPE = _DTYPES
    DTYPE_TO_ID = {dtype: number for number, dtype in enumerate(_DTYPES)}

    def __init__(self, has_bool_tensors=False, *super_args, **super_kwargs):
        model = super_kwargs["model"] if "model" in super_kwargs else super_args[1]
        if not isinstance(model, PipelineModule):
            raise TypeError(f"PipelineEngine trains a PipelineModule, not {type(model).__name__}")
        parameters = super_kwargs.get("model_parameters")
        parameters = None if parameters is None else list(parameters)
        if not parameters and not any(one.requires_grad for one in model.parameters()):
            parameters = [{"params": []}]  # nothing to train on this stage: it takes part all the same
        super_kwargs["model_parameters"] = parameters
        super().__init__(*super_args, **super_kwargs)
        self.grid = self.parallel.grid
        self.stage_id, self.num_stages = self.grid.get_stage_id(), self.grid.pipe_parallel_size
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.micro_batches, self.micro_batch_size = (
            self.gradient_accumulation_steps(),
            self.train_micro_batch_size_per_gpu(),
        )
        self.is_pipe_parallel, self.is_data_parallel = self.num_stages > 1, self.dp_world_size > 1
        self.is_model_parallel = self.grid.slice_parallel_size > 1
        self.has_bool_tensors, self.has_attention_mask = has_bool_tensors, False
        self.agg_train_loss = None
        self._last_line = None  # when and at which step a line about batches was logged last
        for part in (self._batches, self._measured, self._plans):
            part.begin()
        self._links.meet()

    def _ranks(self, mpu):
        assert self.managed_gradient_accumulation(), (
            "managed_gradient_accumulation false is not supported with pipeline parallelism: train_batch() decides "
            "when gradients are reduced; leave the key out"
        )
        return PipelineMesh(mpu)

    # ---- a batch -----------------------------------------------------------------------------------------------------
    def train_batch(self, data_iter=None):
        """Trains on ``gradient_accumulation_steps()`` micro-batches of ``data_iter``, or of the loader of this engine,
        and updates. Returns their mean loss, over the copies of the pipeline too, on every rank.

        The first and the last stage take ``(inputs, labels)`` pairs from the iterator, the others nothing.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() inside of torch.no_grad(): gradients are needed; or call eval_batch()")
        self._need_optimizer("train_batch()")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._batches.need_data("train_batch()")
        self.module.train()
        self.total_loss, self._compute_loss = None, True
        # Seeds of layers follow it: evaluation counts no micro-batch, and a resumed run goes on.
        self.module.micro_offset = self.micro_steps
        self.progress.time_samples(True)
        self._last_line = self._last_line or (time.perf_counter(), self.global_steps, self.global_samples)
        with self._failures.guarded():
            self._user_weights.bring_home()
            began = time.perf_counter()
            self._exec_schedule(self._plans.train_schedule())
            seconds = time.perf_counter() - began
            with self._failures.told_to_all():
                self.agg_train_loss = self._losses.total()
            self._tell_of_batch()
            self._measured.end_batch(began, seconds)
        self._steps.end()
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter,
        return_logits=False,
        compute_loss=True,
        reduce_output="avg",
        bcast_loss=True,
        num_micro_batches=None,
    ):
        """Runs ``num_micro_batches`` (None: the accumulation steps) of ``data_iter`` forward, without gradients.

        Returns the mean loss, over the copies too: on every rank, or with ``bcast_loss`` false on the last stage and
        None elsewhere. With ``compute_loss`` false the outputs of the model are returned instead of losses, on the last
        stage. ``reduce_output``: ``"avg"``, ``"sum"`` (both over micro-batches and copies, of tuples of tensors for
        each index), or None: a list with one entry for each micro-batch. ``return_logits``: ``(that, outputs)``, where
        outputs are those of the model on the last stage (a list where there are several micro-batches) and None
        elsewhere.
        """
        if reduce_output not in (None, "avg", "sum"):
            raise NotImplementedError(f"eval_batch(reduce_output={reduce_output!r}): 'avg', 'sum' or None (a list)")
        self._need_alive("eval_batch()")
        count = num_micro_batches or self.micro_batches
        trained, total = self.module.training, self.total_loss
        broadcasts = compute_loss and bcast_loss and self.is_pipe_parallel
        try:
            self._compute_loss = compute_loss
            self.module.eval()
            with self._batches.reading(data_iter, "eval_batch()"), torch.no_grad(), self._failures.guarded():
                self._user_weights.bring_home()
                self._exec_schedule(self._plans.eval_schedule(count))
                with self._failures.told_to_all(broadcasts):
                    output = self._losses.outputs(reduce_output) if self.is_last_stage() else None
                    if broadcasts:
                        output = self._losses.from_last_stage(output, None if reduce_output else count)
        finally:
            self.module.train(trained)
            self._compute_loss, self.total_loss = True, total
        if compute_loss and self.monitor.enabled and self.global_rank == 0 and isinstance(output, torch.Tensor):
            self.monitor.write_events([("Train/Samples/eval_loss", output.mean().item(), self.global_samples)])
        if not return_logits:
            return output
        logits = self.logits if self.is_last_stage() else None
        return output, logits[0] if logits and len(logits) == 1 else logits

    def _tell_of_batch(self):
        loss = self.agg_train_loss
        if self.progress.due:
            now, (then, step, samples) = time.perf_counter(), self._last_line
            seconds, per_second = (now - then) / max(1, self.global_steps - step), self.global_samples - samples
            per_second /= max(1e-9, now - then)
            self._last_line = now, self.global_steps, self.global_samples
            log_dist(
                f"steps: {self.global_steps} loss: {loss.item():.4f} iter time (s): {seconds:.3f} "
                f"samples/sec: {per_second:.3f}",
                ranks=[0],
            )
        if self.monitor.enabled and self.global_rank == 0:
            self.monitor.write_events([("Train/Samples/train_loss", loss.item(), self.global_samples)])

    # ---- what there is of an engine ----------------------------------------------------------------------------------
    def is_first_stage(self):
        """Whether the first layer is on this stage."""
        return self.stage_id == 0

    def is_last_stage(self):
        """Whether the last layer, and the loss, is on this stage."""
        return self.stage_id == self._last_stage

    @property
    def _last_stage(self):
        return self.module.pipe_shape.rank_of(self._execution.last_part)

    def set_train_batch_size(self, train_batch_size):
        super().set_train_batch_size(train_batch_size)
        self.micro_batches = self.gradient_accumulation_steps()

    def set_train_micro_batch_size(self, micro_batch_size):
        super().set_train_micro_batch_size(micro_batch_size)
        self.micro_batch_size = micro_batch_size

    def set_has_attention_mask(self, value):
        """Accepted: a mask in the tuple of activations is a tensor like any other."""
        assert isinstance(value, bool), f"set_has_attention_mask({value!r}): True or False"
        self.has_attention_mask = value

    def reset_activation_shape(self):
        """Nothing to forget: every message says its own shapes."""

    def destroy(self):
        if self.error_propagation is not None and not self._destroyed:
            self.error_propagation.leave()
        super().destroy()

    def log_for_device(self, *msg):
        """A line on one rank of each stage, if ``LOG_STAGE`` or its own number is asked for: of all stages."""
        if self.parallel.dp_rank == 0 and self.grid.get_slice_parallel_rank() == 0:
            log_dist(f"RANK={self.global_rank} STAGE={self.stage_id} {' '.join(map(str, msg))}", ranks=[-1])

    def tput_log(self, *msg):
        """A line on rank 0 every ``steps_per_print`` steps."""
        if self.progress.due:
            log_dist(" ".join(map(str, msg)), ranks=[0])

    def forward(self, *args, **kwargs):
        raise PipelineError("a pipeline has no forward() of one rank: call train_batch() or eval_batch()")

    def backward(self, *args, **kwargs):
        raise PipelineError("a pipeline has no backward() of one rank: train_batch() runs forward, backward and step")

    def coalesce_grad_reduction(self):
        """Not for pipelines."""
        raise AssertionError(
            "coalesce_grad_reduction is not supported with pipeline parallelism: train_batch() runs all backwards of a "
            "batch and reduces once"
        )

    def step(self, *args, **kwargs):
        raise PipelineError("a pipeline has no step() of one rank: train_batch() runs forward, backward and step")


PipelineEngine._INSTRUCTION_MAP = {kind: getattr(PipelineEngine, name) for kind, name in INSTRUCTIONS.items()}


class DualPipeVEngine(PipelineEngine):
    """The engine of a ``DualPipeVModule``."""
