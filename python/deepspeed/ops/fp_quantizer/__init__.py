"""Small floats: codes of 4, 6, 8 and 12 bits in groups that share a scale."""

from deepspeed.ops.fp_quantizer.fp8_gemm import matmul_fp8
from deepspeed.ops.fp_quantizer.quantize import FP_Quantize, Quantizer

__all__ = ["FP_Quantize", "Quantizer", "matmul_fp8"]
