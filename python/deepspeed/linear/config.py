"""The two configurations of ``deepspeed.linear``: LoRA and where base weights rest, and the codes of base weights."""

import dataclasses

import torch

from deepspeed.ops.fp_quantizer.quantize import checked_bits

# The projections of transformers' decoders.
TARGET_MODS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _whole_number(value, least):
    return type(value) is int and value >= least


@dataclasses.dataclass
class LoRAConfig:
    """LoRA of the linear layers of a model, whose base weights are frozen.

    Args:
        lora_r: the rank of the matrices that are trained. lora_alpha: they count ``lora_alpha / lora_r``.
        base_weight_sharding: neighbouring ranks that share each base weight; it divides the number of ranks. A layer
            gathers its weight when it is used, in forward and in backward.
        offload: base weights rest in host memory and are copied to the device when they are used.
        offload_ratio: the share of the elements that rest there with ``offload``, between 0 and 1, by whole weights,
            which ``init_lora`` spreads over the model; 0 stands for all of them.
        delay_lora_init: a layer is an ordinary linear layer, whose weights can be loaded, until ``init_lora``.
        target_mods: ``init_lora(model)`` takes the layers whose names have one of these texts in them. Where no name
            of the model has one of the default texts, it takes all layers.

    Raises ValueError for values out of range.
    """

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: list = dataclasses.field(default_factory=lambda: list(TARGET_MODS))

    def __post_init__(self):
        for key in ("lora_r", "base_weight_sharding"):
            if not _whole_number(getattr(self, key), 1):
                raise ValueError(f"LoRAConfig: {key} is {getattr(self, key)!r}: it is a whole number from 1 on")
        if not 0 <= self.offload_ratio <= 1:
            raise ValueError(f"LoRAConfig: offload_ratio is {self.offload_ratio!r}: it is between 0 and 1")
        if self.offload_ratio and not self.offload:
            raise ValueError(
                f"LoRAConfig: offload_ratio is {self.offload_ratio} and offload is false, so that nothing would rest on "
                "the host: set offload=True, or leave offload_ratio out"
            )
        if isinstance(self.target_mods, str):
            raise ValueError(f"LoRAConfig: target_mods is a list of texts, and this is {self.target_mods!r}")
        self.target_mods = list(self.target_mods)

    def host_share(self):
        """The share of base elements that is to rest on the host."""
        return (self.offload_ratio or 1.0) if self.offload else 0.0


@dataclasses.dataclass
class QuantizationConfig:
    """Base weights as small floats ([Note: small floats] in csrc/kernels/codes.h).

    Args:
        q_bits: of a code: 4 (e2m1), 6 (e3m2), 8 (e4m3) or 12 (e4m7). mantissa_bits: 3, or that of the format.
        group_size: elements that share a scale. q_dtype: of the codes, torch.uint8.

    Raises ValueError for other widths, types and sizes.
    """

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8

    def __post_init__(self):
        checked_bits(self.q_bits, self.mantissa_bits)
        if not _whole_number(self.group_size, 1) or self.group_size * self.q_bits % 8:
            raise ValueError(
                f"QuantizationConfig: group_size is {self.group_size!r}: {self.q_bits} bits times the elements of a "
                "group are whole bytes, as with 512"
            )
        if self.q_dtype is not torch.uint8:
            raise ValueError(f"QuantizationConfig: q_dtype is {self.q_dtype}: codes are torch.uint8")
