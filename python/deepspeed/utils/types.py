"""Enumerations that the native transformer code and Python share."""

from enum import IntEnum


class ActivationFuncType(IntEnum):
    """The activation of a feed-forward block."""

    UNKNOWN = 0
    GELU = 1
    ReLU = 2
    GATED_GELU = 3
    GATED_SILU = 4


GATED_ACTIVATION_TYPES = [ActivationFuncType.GATED_GELU, ActivationFuncType.GATED_SILU]


class NormType(IntEnum):
    """The normalisation of a transformer layer."""

    UNKNOWN = 0
    LayerNorm = 1
    GroupNorm = 2
    RMSNorm = 3
