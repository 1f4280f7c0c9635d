"""The conditions a figure was measured under; every result carries them."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys


def cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return re.search(r"^model name\s*:\s*(.*)$", file.read(), re.M).group(1).strip()
    except (OSError, AttributeError):
        return platform.processor() or platform.machine()


def cpu_features():
    """The vector instruction sets that our kernels tell apart."""
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            line = re.search(r"^(flags|Features)\s*:\s*(.*)$", file.read(), re.M).group(2).split()
    except (OSError, AttributeError):
        return []
    return [name for name in known if name in line]


def gpu_names():
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return out.stdout.splitlines() if out.returncode == 0 else []


def blas_libraries():
    """File names of the BLAS libraries mapped into this process (call it after a matrix product)."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as file:
            paths = {line.split()[-1] for line in file if "/" in line}
    except OSError:
        return []
    return sorted({os.path.basename(p) for p in paths if re.search(r"blas|mkl|dnnl|lapack", os.path.basename(p), re.I)})


def torch_version():
    """Read from torch itself where it is imported, else from its metadata."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(root):
    out = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return out.stdout.strip() or None


def describe():
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "cpu_features": cpu_features(),
        "cores": os.cpu_count(),
        "gpus": gpu_names(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def host_kind():
    """A file name part for this kind of machine, for example ``amd-epyc-2cores``."""
    gpus = gpu_names()
    name = f"{cpu_name()} {os.cpu_count()}cores" + (f" {len(gpus)}x {gpus[0]}" if gpus else "")
    name = re.sub(r"\((R|TM)\)|CPU|Processor|@.*?GHz", "", name, flags=re.I)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write_json(path, name, figures, **conditions):
    """Writes ``{"name", "machine", "figures"}``; ``path`` may be None."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"name": name, "machine": {**describe(), **conditions}, "figures": figures}, file, indent=1)
            file.write("\n")
