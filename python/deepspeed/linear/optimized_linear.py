"""Linear layers with a frozen base weight, and LoRA beside it."""

import math

import torch
from torch.nn import Linear  # not the class that Init puts in its place

from deepspeed.accelerator import get_accelerator
from deepspeed.linear.config import LoRAConfig, QuantizationConfig
from deepspeed.linear.frozen_weight import FrozenWeight


class OptimizedLinear(torch.nn.Module):
    """Makes a linear layer ``[..., input_dim] -> [..., output_dim]``.

    Args:
        input_dim, output_dim, bias: as ``torch.nn.Linear`` has them. ``bias`` is False by default.
        lora_config: a ``LoRAConfig``: a ``LoRAOptimizedLinear`` is made.
        quantization_config: a ``QuantizationConfig``: the base weight is small floats; without ``lora_config`` a
            ``QuantizedLinear`` is made.
        device: of the weights; None: the accelerator's current one. dtype: of the weights.
        linear_cls: of the matrices of LoRA, and of the layer where neither configuration is given.

    Raises TypeError for configurations of another type.
    """

    def __new__(
        cls,
        input_dim,
        output_dim,
        bias=False,
        lora_config=None,
        quantization_config=None,
        device=None,
        dtype=torch.bfloat16,
        linear_cls=Linear,
    ):
        for key, given, kind in (
            ("lora_config", lora_config, LoRAConfig),
            ("quantization_config", quantization_config, QuantizationConfig),
        ):
            if given is not None and not isinstance(given, kind):
                raise TypeError(f"OptimizedLinear: {key} is a {type(given).__name__}: pass a {kind.__name__}, or None")
        common = {"bias": bias, "device": device, "dtype": dtype, "linear_cls": linear_cls}
        if lora_config is not None:
            common.update(lora_config=lora_config, quantization_config=quantization_config)
            return LoRAOptimizedLinear(input_dim, output_dim, **common)
        if quantization_config is not None:
            return QuantizedLinear(input_dim, output_dim, quantization_config=quantization_config, **common)
        return linear_cls(input_dim, output_dim, bias=bias, device=_device(device), dtype=dtype)


def _device(device):
    return get_accelerator().current_device_name() if device is None else device


class LoRAOptimizedLinear(FrozenWeight, torch.nn.Module):
    """A linear layer with a frozen ``weight`` and, beside it, ``lora_weight_2(lora_weight_1(x)) * lora_alpha / lora_r``.

    Arguments as ``OptimizedLinear``. With ``lora_config.delay_lora_init`` it is an ordinary linear layer, which cannot
    be run, until ``init_lora()``.
    """

    def __init__(
        self,
        input_dim,
        output_dim,
        bias=False,
        lora_config=None,
        quantization_config=None,
        device=None,
        dtype=torch.bfloat16,
        linear_cls=Linear,
    ):
        super().__init__()
        self.lora_config = LoRAConfig() if lora_config is None else lora_config
        self.quantization_config, self.linear_cls = quantization_config, linear_cls
        self.disabled = self.initialized = False
        self.take(Linear(input_dim, output_dim, bias=bias, device=_device(device), dtype=dtype))
        if not self.lora_config.delay_lora_init:
            self.init_lora()

    @property
    def lora_scaling_factor(self):
        return self.lora_config.lora_alpha / self.lora_config.lora_r

    def init_lora(self, on_host=None):
        """Freezes the base weight in the form that the configuration asks for, and makes the matrices of LoRA: the
        first as ``torch.nn.Linear`` does, the second of zeros. Once; a disabled layer stays as it is.

        ``on_host``: whether the weight rests in host memory; None: where ``offload`` asks for at least half of it.
        """
        if self.disabled or self.initialized:
            return
        config, device, dtype = self.lora_config, self.weight.device, self.weight.dtype
        on_host = config.host_share() >= 0.5 if on_host is None else on_host
        self.freeze(self.quantization_config, config.base_weight_sharding, on_host)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.lora_weight_1 = self.linear_cls(self.input_dim, config.lora_r, bias=False, device=device, dtype=dtype)
        self.lora_weight_2 = self.linear_cls(config.lora_r, self.output_dim, bias=False, device=device, dtype=dtype)
        torch.nn.init.kaiming_uniform_(self.lora_weight_1.weight, a=math.sqrt(5))
        torch.nn.init.zeros_(self.lora_weight_2.weight)
        self.initialized = True

    @torch.no_grad()
    def disable(self):
        """Makes an ordinary layer of it, without LoRA, whose whole weight is here and is not trained. All ranks that
        share the weight call it."""
        if self.disabled:
            return
        self.melt()
        for name in ("lora_weight_1", "lora_weight_2") if self.initialized else ():
            delattr(self, name)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.disabled, self.initialized = True, False

    def forward(self, input_tensor):
        if not self.initialized and not self.disabled:
            raise RuntimeError(
                "LoRAOptimizedLinear has no LoRA yet (delay_lora_init): call deepspeed.linear.init_lora(model), or "
                "init_lora() of the layer, when its weights are loaded"
            )
        base = self.product(input_tensor)
        if self.disabled:
            return base
        return base + self.lora_weight_2(self.lora_weight_1(input_tensor)) * self.lora_scaling_factor

    def extra_repr(self):
        rest = "disabled" if self.disabled else f"lora_r={self.lora_config.lora_r}"
        return f"{super().extra_repr()}, {rest}"


class QuantizedLinear(FrozenWeight, torch.nn.Module):
    """A linear layer with a frozen weight of small floats.

    Args:
        input_dim, output_dim, bias, device, dtype: as ``torch.nn.Linear`` has them; the bias is trained.
        quantization_config: a ``QuantizationConfig``. linear_cls: the class whose initial values the weight takes.
        delayed: the layer is an ordinary linear layer until ``init_lora()``.
    """

    def __init__(
        self,
        input_dim,
        output_dim,
        bias=False,
        quantization_config=None,
        device=None,
        dtype=torch.bfloat16,
        linear_cls=Linear,
        delayed=False,
    ):
        super().__init__()
        self.take(linear_cls(input_dim, output_dim, bias=bias, device=device, dtype=dtype))
        self.quantization_config = quantization_config or QuantizationConfig()
        if not delayed:
            self.init_lora()

    def init_lora(self):
        """Quantizes the weight, once; there is no LoRA in this layer."""
        self.freeze(self.quantization_config)

    def forward(self, input_tensor):
        return self.product(input_tensor)
