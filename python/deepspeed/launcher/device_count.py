"""The accelerator that ranks will choose on this machine, and the number of its devices, asked in a process of its own."""

import importlib.metadata
import json
import subprocess
import sys

from deepspeed.host.vendors import VENDORS

_PROGRAM = """
import json
from deepspeed.accelerator import get_accelerator
chosen = get_accelerator()
print(json.dumps([chosen._name, chosen.device_count()]))
"""
_TIMEOUT_S = 120


def is_asked(wanted):
    """Whether ranks may choose another device than a GPU of NVIDIA or the CPU. ``wanted``: the value of
    DS_ACCELERATOR."""
    if wanted:
        return wanted not in ("cuda", "cpu")
    others = (row for row in VENDORS.values() if row.package != "torch")
    return any(not row.missing() for row in others) or _torch_of_intel()


def _torch_of_intel():
    try:
        return "+xpu" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def ask(environment):
    """``(name of the accelerator, number of devices, an empty text)``; or ``("", 0, the reason)``."""
    command = [sys.executable, "-c", _PROGRAM]
    try:
        asked = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        name, count = json.loads(asked.stdout.splitlines()[-1])
        return name, count, ""
    except subprocess.TimeoutExpired:
        return "", 0, f"there was no answer within {_TIMEOUT_S} seconds"
    except (ValueError, IndexError):
        return "", 0, (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
