"""Mixture of experts: layers in which each token uses only the experts that a gate chooses for it."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
