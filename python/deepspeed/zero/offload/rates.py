"""Transfer rates of the memory tiers of this machine, measured once and kept in ``~/.cache/deepspeed/rates``."""

import os

from deepspeed._native import _C


def tier_rate(tier, device, folder="", pinned=False):
    """Bytes per second ``(read, written)`` of the tier "host" as seen by ``device``, or "file" for files in ``folder``.

    The first process that asks measures, 64 MiB, while others of this machine wait for it. None for files in a folder
    that is not there.
    """
    if tier == "file" and not os.path.isdir(folder):
        return None
    pinned = bool(pinned) and tier == "host" and device.type != "cpu"
    return _C.known_rate(device, _C.Placement(tier, pinned, folder if tier == "file" else ""))


def mean_rate(rate):
    """Of bytes that are read and written in equal parts, one after the other."""
    read, written = rate
    return 2 / (1 / read + 1 / written)
