"""Layers that work on some of the tokens."""

from deepspeed.ops.random_ltd.dropping_utils import (
    GatherTokens,
    ScatterTokens,
    bert_sample_tokens,
    gpt_sample_tokens,
)

__all__ = ["GatherTokens", "ScatterTokens", "bert_sample_tokens", "gpt_sample_tokens"]
