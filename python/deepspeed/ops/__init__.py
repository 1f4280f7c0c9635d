"""Optimizers and operators with native kernels. Submodules are imported when they are first used."""

import importlib

_SUBMODULES = ("adam",)


def __getattr__(name):
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_SUBMODULES)}")


def __dir__():
    return sorted([*globals(), *_SUBMODULES])
