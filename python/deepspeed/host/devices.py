"""Counts the accelerators that a process started now would see, without loading a driver."""

import itertools
import os
import re

from deepspeed.host.programs import find_program, output_of


def nvidia_device_count():
    """Number of NVIDIA GPUs of this machine, 0 without a driver. Does not look at CUDA_VISIBLE_DEVICES."""
    known = _count("/proc/driver/nvidia/gpus", r".+")
    nodes = _count("/dev", r"nvidia\d+")
    if known or nodes:
        # A container may see all GPUs of its host in one folder and only its own in the other; and before the first
        # use after a boot there are no device nodes.
        return min(known, nodes) if known and nodes else known or nodes
    # Neither in some virtual machines (WSL2), where only the tool answers.
    if not os.path.exists("/dev/dxg") or not find_program("nvidia-smi"):
        return 0
    return len(re.findall(r"(?m)^GPU ", output_of("nvidia-smi", "-L")))


def _count(folder, pattern):
    return sum(1 for name in os.listdir(folder) if re.fullmatch(pattern, name)) if os.path.isdir(folder) else 0


def visible_device_ids():
    """CUDA_VISIBLE_DEVICES as a list of texts (numbers, UUIDs or MIG names), or None when it is not set.

    As the driver does, the list ends at the first ``-1`` or empty entry.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    parts = (part.strip() for part in text.split(","))
    return list(itertools.takewhile(lambda part: part and not part.startswith("-"), parts))


def visible_gpu_ids():
    """The names, for CUDA_VISIBLE_DEVICES, of the GPUs that a child sees, in order; [] on a machine without GPUs."""
    count = nvidia_device_count()
    if count == 0:
        return []
    ids = visible_device_ids()
    return [str(index) for index in range(count)] if ids is None else ids


def nvidia_compute_capabilities():
    """Compute capabilities of this machine's NVIDIA GPUs, each once, ascending: ["8.0", "9.0"]; [] without any."""
    if nvidia_device_count() == 0 or not find_program("nvidia-smi"):
        return []
    listed = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    found = set(re.findall(r"(?m)^\s*(\d+\.\d)\s*$", listed))
    return sorted(found, key=lambda text: [int(part) for part in text.split(".")])
