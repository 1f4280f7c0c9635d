"""The op ``evoformer_attn``: attention with two biases and their gradients."""

from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention, EvoformerFusedAttention

__all__ = ["DS4Sci_EvoformerAttention", "EvoformerFusedAttention"]
