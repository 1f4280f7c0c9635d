"""The one importer of the extension module.

The module is built for one (Python, torch) pair and lies in ``_lib/<pair>/``; the kernel libraries, which know
neither, lie in ``_lib/``. ``torch`` must be imported first: it loads the libraries that the module resolves against.
"""

import importlib.machinery
import importlib.util
import os
import re
import sys

import torch

from deepspeed._compat import dispatch_modes
from deepspeed.log import logger

NEWEST_TESTED_TORCH = (2, 15)
LIB_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_lib")


def tag():
    """Name of the (Python, torch) pair of this process, for example ``cp312-torch2.11.0``."""
    version = torch.__version__.split("+")[0]
    return f"cp{sys.version_info[0]}{sys.version_info[1]}-torch{version}"


def untested_torch(version):
    """A sentence about a torch that is newer than all that the tests of this release have seen; "" for others."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers <= NEWEST_TESTED_TORCH:
        return ""
    newest = ".".join(map(str, NEWEST_TESTED_TORCH))
    return f"torch {version} is newer than torch {newest}, the newest that this release was tested with."


def _load():
    folder = os.path.join(LIB_DIR, tag())
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = os.path.join(folder, "_C" + suffix)
        if os.path.exists(path):
            spec = importlib.util.spec_from_file_location("deepspeed._C", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    built = sorted(os.listdir(LIB_DIR)) if os.path.isdir(LIB_DIR) else []
    built = [name for name in built if name.startswith("cp")]
    raise ImportError(
        f"deepspeed has no native module for {tag()} (Python {sys.version.split()[0]}, torch {torch.__version__}). "
        f"Built here: {', '.join(built) or 'nothing'}. Build it with `make` in the source tree, or reinstall with "
        f"`pip install --no-build-isolation .` in this environment."
    )


_C = _load()
if untested_torch(torch.__version__) and os.environ.get("RANK", "0") == "0":
    logger.warning(untested_torch(torch.__version__))
sys.modules["deepspeed._C"] = _C
DeepSpeedConfigError = _C.DeepSpeedConfigError


def tell_modes(name, out, *args):
    """A kernel has run that torch does not see: modes with a method ``kernel_ran(name, out, *args)`` are told."""
    for mode in dispatch_modes():
        told = getattr(mode, "kernel_ran", None)
        if told is not None:
            told(name, out, *args)
