"""The accelerator that this process uses: the one that was set, the one ``DS_ACCELERATOR`` names, or the best
present."""

import functools
import os
import threading

from deepspeed.accelerator import torch_module
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.host.vendors import VENDORS
from deepspeed.log import logger
from deepspeed.registry import Registry, nearest

accelerators = Registry("accelerator", group="deepspeed.accelerators")
_OWN_PROBES = {"cuda": "deepspeed.accelerator.cuda_accelerator:probe", "cpu": None}
for _place, _name in enumerate(reversed(VENDORS)):
    accelerators.register(
        _name,
        f"deepspeed.accelerator.{_name}_accelerator:{_name.upper()}_Accelerator",
        probe=_OWN_PROBES.get(_name, functools.partial(torch_module.probe, _name)),
        priority=_place,
    )

_lock = threading.Lock()
_current = None


def _check(candidate):
    if not isinstance(candidate, DeepSpeedAccelerator):
        raise TypeError(
            f"{type(candidate).__name__} is not an accelerator: derive it from "
            f"deepspeed.accelerator.DeepSpeedAccelerator and pass an instance."
        )
    return candidate


def _choose():
    name = os.environ.get("DS_ACCELERATOR")
    if name:
        if name not in accelerators.names():
            raise ValueError(
                f"the environment variable DS_ACCELERATOR is {name!r}, which is not an accelerator known here. "
                f"Set it to one of: {', '.join(accelerators.names())}; or unset it for automatic detection."
                f"{nearest(name, accelerators.names())}"
            )
        made = _check(accelerators.get(name)())
        reason = accelerators.why_not(name)
        if reason:
            logger.warning("DS_ACCELERATOR=%s is used although it does not seem to work here: %s.", name, reason)
        return made
    return _check(accelerators.get(accelerators.detect())())


def get_accelerator():
    """The accelerator of this process; chosen at the first call and kept."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = _choose()
    return _current


def set_accelerator(accel_obj):
    """Makes ``accel_obj`` (a ``DeepSpeedAccelerator``; TypeError otherwise) the accelerator of this process."""
    global _current
    with _lock:
        _current = _check(accel_obj)
    logger.debug("The accelerator is set to %s.", accel_obj._name)


def is_current_accelerator_supported():
    """True when the accelerator in use is one that this installation knows by name."""
    return get_accelerator()._name in accelerators.names()
