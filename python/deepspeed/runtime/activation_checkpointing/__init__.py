"""Import paths of existing scripts."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
