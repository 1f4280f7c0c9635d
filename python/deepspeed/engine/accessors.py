"""Values of the configuration, and values computed from it. No method has state.

The accessors that hand out one value as it is are a table, ``accessor_table.py``.
"""

import torch

from deepspeed import _native
from deepspeed.config.sections import DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.data.random_ltd import is_on
from deepspeed.engine.accessor_table import PATHS
from deepspeed.utils.forwarding import answers_from

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_of(name):
    """``"fp32" | "fp16" | "bf16"`` (any case), a torch dtype or None, as a torch dtype or None."""
    if name is None or isinstance(name, torch.dtype):
        return name
    return _DTYPES[str(name).lower()]


def _offload_device(engine):
    section = engine.zero_offload_optimizer()
    return "none" if section is None else str(getattr(section.device, "value", section.device))


@answers_from(PATHS, below="_config")
@answers_from(
    {  # Whether every rank keeps only its share: of the gradients (stages 2 and 3), of the weights (stage 3).
        "zero_optimization_partition_gradients": "_stage_policy.shards_grads",
        "zero_optimization_partition_weights": "_stage_policy.shards_params",
    }
)
class ConfigAccessors:
    """The engine's base class; ``self._config`` is the parsed config."""

    def get_batch_info(self):
        """``(train_batch_size, micro batch per rank, accumulation steps)``."""
        return (self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps())

    def dynamic_loss_scale(self):
        """True with fp16 and ``fp16.loss_scale`` 0."""
        return self.fp16_enabled() and self._config.float16_config.loss_scale == 0

    def initial_dynamic_scale(self):
        return 2**self._config.float16_config.initial_scale_power

    def dynamic_loss_scale_args(self):
        fp16 = self._config.float16_config
        return {
            "init_scale": 2**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def optimizer_name(self):
        return self.client_optimizer.__class__.__name__ if self.client_optimizer else self._config.optimizer_name

    def postscale_gradients(self):
        return not self._config.prescale_gradients

    @property
    def communication_data_type(self):
        """torch dtype in which gradients travel: the configured one, else that in which they are kept."""
        return self._wire_dtype or self.get_data_types()[1]

    @property
    def _wire_dtype(self):
        """The value of ``communication_data_type``, or of its namesake for ranks that share sequences; or None."""
        shared = self.parallel.sp_world_size > 1
        of_sequences, of_data = self._config.seq_parallel_communication_data_type, self._config.communication_data_type
        return dtype_of(of_sequences if shared else of_data)

    @property
    def _grad_dtype(self):
        """In which gradients are kept, whatever type parameters have; None: each parameter's own."""
        accumulates = self.gradient_accumulation_steps() > 1
        return dtype_of(self._config.grad_accum_dtype) or (torch.float32 if accumulates else None)

    def get_data_types(self):
        """``(model dtype, dtype in which gradients are kept)``."""
        model = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        model = dtype_of(self._config.param_dtype) or model
        return model, self._grad_dtype or model

    # ---- the section zero_optimization -----------------------------------------------------------------------------
    @property
    def _stage_policy(self):
        """The row of the ZeRO stage, see csrc/zero/stage_policy.h; nothing else looks at its number."""
        return _native._C.stage_policy(self._config.zero_optimization_stage)

    def is_first_weights_partition_group(self):
        """Stage 3: whether this rank belongs to the first group of ranks that holds a whole copy of the weights."""
        if not self.zero_optimization_partition_weights():
            return False
        return self.mics_shard_size() < 1 or self.get_data_parallel_rank() < self.mics_shard_size()

    def zero_grad_hooks(self):
        """True: gradients are taken by hooks as autograd produces them; there is no other way here."""
        return True

    def zero_gather_16bit_weights_on_model_save(self):
        """Whether a save gathers the weights: always where ranks have slices of whole parameters, at stage 3 if the
        configuration says so."""
        slices = self._config.tensor_parallel_config.autotp_size > 1 and not self._stage_policy.shards_params
        return slices or self._config.zero_config.gather_16bit_weights_on_model_save

    def cpuadam_cores_perc(self):
        """Share of torch's threads that make the steps of ``super_offload``."""
        return (self.zero_offload_optimizer() or DeepSpeedZeroOffloadOptimizerConfig()).cpuadam_cores_perc

    def zero_use_cpu_optimizer(self):
        """Whether the step runs on the CPU: optimizer states are offloaded to it, or through it to NVMe."""
        return _offload_device(self) in ("cpu", "nvme")

    def zero_cpu_offload(self):
        return _offload_device(self) == "cpu"

    def zero_nvme_offload_optimizer(self):
        return _offload_device(self) == "nvme"

    # ---- features beside training proper ---------------------------------------------------------------------------
    def checkpoint_writer_enabled(self):
        return self._config.checkpoint_config.writer is not None

    def is_elastic_model_parallel_supported(self):
        """Whether the elasticity in use knows model parallelism: it does from version 0.2 on."""
        return self.elasticity_enabled() and float(self._config.elasticity_config.version) >= 0.2

    def flops_profiler_enabled(self):
        return self._config.flops_profiler_config.enabled or self.autotuning_enabled()

    def flops_profiler_profile_step(self):
        step = self._config.flops_profiler_config.profile_step
        return self.autotuning_start_profile_step() if self.autotuning_enabled() else step

    def flops_profiler_detailed(self):
        return False if self.autotuning_enabled() else self._config.flops_profiler_config.detailed

    def random_ltd_enabled(self):
        """Whether layers may drop tokens: the section random_ltd and the two around it are on."""
        return is_on(self.data_efficiency_config())

    def autotuning_profile_model_info(self):
        """Whether the autotuner asked this run only for facts about the model."""
        info = self._config.autotuning_config.model_info
        return bool(self.autotuning_enabled() and info and info.get("profile", False))
