"""Import path that existing scripts use. Its files are imported when they are first used."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
