"""Monitors: where metrics of a run go."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
