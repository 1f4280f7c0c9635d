"""Finds the version of the NCCL that a torch contains, without importing torch.

This file imports nothing of the package, because setup.py reads this file.
"""

import glob
import os
import re
import sys


def nccl_version(torch_folder):
    """``"2.28"``: the release of the package ``nvidia-nccl-cu*`` that is installed beside the torch in
    ``torch_folder``.

    "0.0" where there is none: torch was built without CUDA, or NCCL is inside torch itself, which then has to be asked.
    """
    beside = os.path.dirname(os.path.abspath(torch_folder)) if torch_folder else ""
    found = [
        match.group(1)
        for path in glob.glob(os.path.join(glob.escape(beside), "nvidia_nccl_cu*-*.dist-info"))
        if (match := re.search(r"-(\d+\.\d+)[^-]*\.dist-info$", path))
    ]
    return max(found, key=lambda text: tuple(map(int, text.split("."))), default="0.0")


def nccl_in_use(torch_folder):
    """The same; where torch is imported already it is asked itself, because NCCL may be linked into it."""
    torch = sys.modules.get("torch")
    try:
        return ".".join(map(str, torch.cuda.nccl.version()[:2]))
    except (AttributeError, RuntimeError, TypeError):
        return nccl_version(torch_folder)
