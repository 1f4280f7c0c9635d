"""Optimizers and operators with native kernels. Submodules are imported when they are first used."""

import importlib
import importlib.util
import pkgutil


def __getattr__(name):
    if name == "__compatible_ops__":
        value = importlib.import_module("deepspeed.git_version_info").compatible_ops
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_folders())}")


def _folders():
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def __dir__():
    return sorted([*globals(), "__compatible_ops__", *_folders()])
