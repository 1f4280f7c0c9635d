"""Small helpers that belong nowhere else: seeds, a call as text, no decorator, attributes of engines."""

import random

import numpy
import torch

from deepspeed.accelerator import get_accelerator


def set_random_seed(seed):
    """Seeds Python, numpy, torch and all accelerators of this process."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def call_to_str(base, *args, **kwargs):
    """``call_to_str("f", 1, b="x")`` is ``"f(1, b='x')"``."""
    return f"{base}({', '.join([repr(arg) for arg in args] + [f'{key}={value!r}' for key, value in kwargs.items()])})"


def noop_decorator(func):
    """The function itself: stands where a decorator is optional."""
    return func


def attribute_or_that_of_module(engine, name):
    """``__getattr__`` of an engine: what it does not have itself is looked for in the model, its ``module``."""
    try:
        return torch.nn.Module.__getattr__(engine, name)
    except AttributeError:
        modules = engine.__dict__.get("_modules", {})
        if "module" in modules and name != "module":
            return getattr(modules["module"], name)
        raise
