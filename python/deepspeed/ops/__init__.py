"""Optimizers and operators with native kernels. Submodules are imported when they are first used."""

import importlib
import importlib.util


def __getattr__(name):
    if name == "__compatible_ops__":
        value = importlib.import_module("deepspeed.git_version_info").compatible_ops
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), "__compatible_ops__"])
