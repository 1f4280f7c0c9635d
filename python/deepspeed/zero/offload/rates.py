"""Transfer rates of the memory tiers of this machine, measured once and kept in ``~/.cache/deepspeed/rates``."""

import os

from deepspeed._native import _C


def folder_of(sections):
    """The folder for files that the first of the sections ``offload_*`` with one names, "" without."""
    return next((str(s.nvme_path) for s in sections if s is not None and s.nvme_path is not None), "")


def tier_rate(tier, device, sections):
    """Bytes per second ``(read, written)`` of the tier "host" as seen by ``device``, or "file" for files in the folder
    of the ``sections`` (None: not given).

    The first process that asks measures, 64 MiB, while others of this machine wait for it. None for files in a folder
    that is not there.
    """
    folder = folder_of(sections) if tier == "file" else ""
    if tier == "file" and not os.path.isdir(folder):
        return None
    pinned = tier == "host" and device.type != "cpu" and any(s is not None and s.pin_memory for s in sections)
    return _C.known_rate(device, _C.Placement(tier, pinned, folder))
