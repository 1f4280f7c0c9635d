"""The op ``fp_quantizer``: small floats, in groups that share a scale."""

from deepspeed.ops.codes import code_ops
from deepspeed.ops.fp_quantizer import FP_Quantize, Quantizer, matmul_fp8

__all__ = ["FP_Quantize", "Quantizer", "code_ops", "matmul_fp8"]
