"""Rounds tensors to few numbers, in place, for training with quantized weights."""

from deepspeed.ops.quantizer.quantizer import ds_quantizer

__all__ = ["ds_quantizer"]
