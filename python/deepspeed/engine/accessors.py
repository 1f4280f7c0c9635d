"""What the engine tells about its configuration. Each method is one line of the config; none has state."""

import torch

from deepspeed.engine.feature_accessors import FeatureAccessors
from deepspeed.engine.zero_accessors import ZeroAccessors

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_of(name):
    """``"fp32" | "fp16" | "bf16"`` (any case), a torch dtype or None, as a torch dtype or None."""
    if name is None or isinstance(name, torch.dtype):
        return name
    return _DTYPES[str(name).lower()]


class ConfigAccessors(ZeroAccessors, FeatureAccessors):
    """Mixed into the engine; ``self._config`` is the parsed config."""

    def train_batch_size(self):
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self):
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self):
        return self._config.gradient_accumulation_steps

    def get_batch_info(self):
        """``(train_batch_size, micro batch per rank, accumulation steps)``."""
        return (self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps())

    def gradient_clipping(self):
        return self._config.gradient_clipping

    def steps_per_print(self):
        return self._config.steps_per_print

    def wall_clock_breakdown(self):
        return self._config.wall_clock_breakdown

    def memory_breakdown(self):
        return self._config.memory_breakdown

    def dump_state(self):
        return self._config.dump_state

    def log_level(self):
        return self._config.log_level

    def fp16_enabled(self):
        return self._config.fp16_enabled

    def bfloat16_enabled(self):
        return self._config.bfloat16_enabled

    def fp16_auto_cast(self):
        return self._config.float16_config.auto_cast

    def fp16_master_weights_and_gradients(self):
        return self._config.float16_config.fp16_master_weights_and_grads

    def bf16_master_weights_and_gradients(self):
        return self._config.bfloat16_config.bf16_master_weights_and_grads

    def bf16_optimizer_states(self):
        return self._config.bfloat16_config.bf16_optimizer_states

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

    def loss_scale(self):
        """The loss scale in use now; 1.0 without fp16."""
        return self.optimizer.loss_scale if hasattr(self.optimizer, "loss_scale") else 1.0

    def optimizer_name(self):
        return self.client_optimizer.__class__.__name__ if self.client_optimizer else self._config.optimizer_name

    def optimizer_params(self):
        return self._config.optimizer_params

    def optimizer_legacy_fusion(self):
        return self._config.optimizer_legacy_fusion

    def scheduler_name(self):
        return self._config.scheduler_name

    def scheduler_params(self):
        return self._config.scheduler_params

    def prescale_gradients(self):
        return self._config.prescale_gradients

    def postscale_gradients(self):
        return not self._config.prescale_gradients

    def gradient_predivide_factor(self):
        return self._config.gradient_predivide_factor

    @property
    def communication_data_type(self):
        """torch dtype in which gradients travel: the configured one, else that in which they are kept."""
        return self._wire_dtype or self.get_data_types()[1]

    @property
    def _wire_dtype(self):
        """What ``communication_data_type`` says, or None."""
        return dtype_of(self._config.communication_data_type)

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

    def dataloader_drop_last(self):
        return self._config.dataloader_drop_last

    def managed_gradient_accumulation(self):
        return self._config.managed_gradient_accumulation

    def sparse_gradients_enabled(self):
        return self._config.sparse_gradients_enabled
