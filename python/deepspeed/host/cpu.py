"""Cores, instruction sets and memory of this machine, as far as this process may use them."""

import contextlib
import ctypes
import os
import re
from functools import lru_cache

from deepspeed.host.texts import read_text

# Widest first; the names are those of DS_FORCE_ISA and of the report.
_ISA_FLAGS = (
    ("avx512_bf16", ("avx512f", "avx512_bf16")),
    ("avx512", ("avx512f", "avx512bw", "avx512dq", "avx512vl")),
    ("avx2", ("avx2", "fma")),
    ("sve", ("sve",)),
    ("neon", ("asimd",)),
)
# Units for products of few bits, by any of these flags.
_PRODUCT_UNITS = (("vnni", ("avx512_vnni", "avx_vnni")), ("amx", ("amx_tile", "amx_bf16", "amx_int8")))


def usable_cores():
    """Numbers of the logical cores that this process may run on, sorted."""
    return sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


@lru_cache(maxsize=1)
def cpu_info():
    """``(model name, set of feature flags)`` of the first core, from /proc/cpuinfo; empty where there is none."""
    first = read_text("/proc/cpuinfo").partition("\n\n")[0]
    model = re.search(r"(?im)^model name\s*:[ \t]*(.*?)[ \t]*$", first)
    flags = re.search(r"(?im)^(?:flags|features)\s*:(.*)$", first)
    return model[1] if model else "", set(flags[1].split()) if flags else set()


def widest_isa():
    """The widest vector instruction set that our kernels know and this CPU has, or ``"scalar"``."""
    flags = cpu_info()[1]
    return next((name for name, needed in _ISA_FLAGS if flags.issuperset(needed)), "scalar")


def product_units():
    """Names of what this CPU has for products of few bits: VNNI, AMX."""
    flags = cpu_info()[1]
    return [name for name, any_of in _PRODUCT_UNITS if not flags.isdisjoint(any_of)]


def openblas_coretype():
    """``"SkylakeX"`` where OpenBLAS should be told to use AVX-512, else None.

    OpenBLAS picks its kernels by CPU model and falls back to AVX2 or less on models younger than itself, which costs
    a factor of two; any CPU with these flags runs its SkylakeX kernels. A choice of the user is left alone.
    """
    if os.environ.get("OPENBLAS_CORETYPE"):
        return None
    wanted = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
    return "SkylakeX" if cpu_info()[1].issuperset(wanted) else None


def thread_siblings(core):
    """The system's name for the logical cores that share a physical one with ``core``, such as ``0,32``."""
    return read_text(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") or str(core)


def whole_cores(cores):
    """The given logical cores as lists, one for each physical core, in the order in which they begin."""
    found = {}
    for core in cores:
        found.setdefault(thread_siblings(core), []).append(core)
    return list(found.values())


def physical_cores(cores):
    """The given logical cores without the second and further threads of a physical core, in the same order."""
    return [threads[0] for threads in whole_cores(cores)]


def quota_cores():
    """The processor time that a container (cgroup) may use, in cores, such as 3.5; None without a limit."""
    limits = []
    for line in read_text("/proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0":  # version 2: each group above may have a limit of its own
            while True:
                quota, _, period = read_text(f"/sys/fs/cgroup{path}/cpu.max").partition(" ")
                limits.append((quota, period))
                if path in ("", "/"):
                    break
                path = os.path.dirname(path)
        elif "cpu" in names.split(","):
            folder = f"/sys/fs/cgroup/cpu{path}"
            folder = folder if os.path.isdir(folder) else "/sys/fs/cgroup/cpu"
            limits.append((read_text(f"{folder}/cpu.cfs_quota_us"), read_text(f"{folder}/cpu.cfs_period_us")))
    found = [int(quota) / int(period) for quota, period in limits if quota.isdigit() and period.isdigit()]
    return min(found) if found else None


def memory_bytes():
    """``(total, available)`` bytes of main memory; a container's (cgroup's) limit counts as its memory."""
    rows = re.findall(r"(?m)^(\w+):\s*(\d+)", read_text("/proc/meminfo"))
    fields = {key: int(value) * 1024 for key, value in rows}
    total = fields.get("MemTotal", 0)
    available = fields.get("MemAvailable", total)
    for limit_path, used_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, used = read_text(limit_path), read_text(used_path)
        if limit.isdigit() and 0 < int(limit) < total:
            total = int(limit)
            available = min(available, max(0, total - int(used or 0)))
            break
    return total, available


def resident_bytes():
    """Main memory that this process occupies now."""
    text = read_text("/proc/self/statm")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") if text else 0


def return_free_memory():
    """Gives memory that malloc keeps for later back to the system, where the C library can (glibc's malloc_trim)."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def socket_of(cores, index):
    """The number of the processor package of ``cores``. Of a process that may run on several, that of the ``index``-th
    process when they take turns over those."""
    packages = {read_text(f"/sys/devices/system/cpu/cpu{core}/topology/physical_package_id") or "0" for core in cores}
    found = sorted(int(package) for package in packages)
    return found[index % len(found)]


def socket_of_process(index):
    """``socket_of`` the cores of this process; ``index``: its number among those of the machine."""
    return socket_of(os.sched_getaffinity(0), index)
