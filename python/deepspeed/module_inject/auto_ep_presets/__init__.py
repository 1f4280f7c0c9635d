"""Presets of models with experts: names of their modules, and rules of their routers."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
