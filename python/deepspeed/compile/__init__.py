"""The section ``compile`` of the configuration under the path that scripts import."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
