"""Monitors, which receive the metrics of a run."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
