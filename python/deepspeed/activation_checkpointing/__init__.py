"""Activation checkpointing: save a segment's inputs instead of its activations, and compute it again in backward."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
