"""Layers of a model that is not changed by its user, replaced by layers of this library: experts spread over ranks."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
