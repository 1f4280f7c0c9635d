"""The device under the program: one object with the verbs of ``torch.cuda`` for any kind of device."""

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.real_accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)
from deepspeed.registry import lazy_package

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

__getattr__, __dir__ = lazy_package(__name__)
