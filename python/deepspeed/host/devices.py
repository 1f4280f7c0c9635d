"""How many accelerators a process started now would see, learned without loading a driver."""

import os
import re
import shutil
import subprocess


def nvidia_device_count():
    """Number of NVIDIA GPUs of this machine, 0 without a driver. Does not look at CUDA_VISIBLE_DEVICES."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        pass
    try:
        nodes = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    except OSError:
        nodes = []
    if nodes:
        return len(nodes)
    # Neither in some virtual machines (WSL2), where only the tool answers.
    if not os.path.exists("/dev/dxg") or not shutil.which("nvidia-smi"):
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(1 for line in listed.stdout.splitlines() if line.startswith("GPU "))


def visible_device_ids():
    """CUDA_VISIBLE_DEVICES as a list of texts (numbers, UUIDs or MIG names), or None when it is not set.

    As the driver does, the list ends at the first ``-1`` or empty entry.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    ids = []
    for part in text.split(","):
        part = part.strip()
        if not part or part.startswith("-"):
            break
        ids.append(part)
    return ids


def visible_gpu_ids():
    """What each GPU visible to a child is called in CUDA_VISIBLE_DEVICES, in order; [] on a machine without GPUs."""
    count = nvidia_device_count()
    if count == 0:
        return []
    ids = visible_device_ids()
    return [str(index) for index in range(count)] if ids is None else ids
