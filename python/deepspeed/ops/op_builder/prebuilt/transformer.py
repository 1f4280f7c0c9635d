"""The op ``transformer``: layers for training, and the operations that they are made of."""

from deepspeed.ops.transformer.functions import activation, dropout_add, dropout_add_norm, norm, rotary
from deepspeed.ops.transformer.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

__all__ = [
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "activation",
    "dropout_add",
    "dropout_add_norm",
    "norm",
    "rotary",
]
