"""The text of ``ds_report``."""

import argparse
import os
import platform
import shutil
import subprocess
import sys

from deepspeed.env_report import native
from deepspeed.env_report.torch_facts import torch_facts
from deepspeed.host import cpu, devices, numa
from deepspeed.registry import load_target
from deepspeed.version import __version__

_WIDTH = 78
# Below this, data loader workers and collectives between processes of one host run out of room.
_SMALL_SHM_BYTES = 1 << 30


def _first_line(command):
    if shutil.which(command[0]) is None:
        return None
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (asked.stdout.strip().splitlines() or [None])[0]


def _nvcc_version():
    command = shutil.which("nvcc") or os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    try:
        asked = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = [part for part in asked.stdout.split(",") if part.strip().startswith("release")]
    return release[0].strip().split()[1] if release else None


def _gib(count):
    return f"{count / (1 << 30):.1f} GiB"


def _device_problem(facts):
    def problem(device):
        if device != "cuda":
            return ""
        if facts.get("version") and not facts.get("cuda"):
            return "this torch is built without CUDA"
        return "" if devices.nvidia_device_count() else "no NVIDIA GPU on this machine"

    return problem


def _title(text):
    return ["-" * _WIDTH, text, "-" * _WIDTH]


def op_lines(facts):
    """The op table: one line per op with installed, compatible and why not."""
    lines = _title("Native ops")
    lines.append(f"{'op':<16}{'installed':<12}{'compatible':<12}why not")
    for row in load_target("deepspeed.ops.op_table:OPS"):
        status = native.op_status(row, _device_problem(facts))
        installed = "[YES]" if status.installed else "[NO]"
        compatible = "[OKAY]" if status.compatible else "[NO]"
        lines.append(f"{status.name:<16}{installed:<12}{compatible:<12}{status.why_not}".rstrip())
    return lines


def software_lines(facts):
    """Versions of the software that deepspeed stands on."""
    lines = _title("Software")
    add = lambda name, value: lines.append(f"{name:<24}{value}")  # noqa: E731
    add("deepspeed", f"{__version__} ({os.path.dirname(native.LIB_DIR)})")
    add("Python", f"{platform.python_version()} ({sys.executable})")
    if "error" in facts:
        add("torch", f"not usable: {facts['error']}")
    else:
        add("torch", f"{facts['version']} ({facts['folder']})")
        add("torch's CUDA", facts["cuda"] or "none")
        if facts.get("nccl"):
            add("NCCL", facts["nccl"])
        add("torch.distributed", ", ".join(facts["backends"]) or "none")
        name, path = facts["blas"]
        add("BLAS in use", f"{name} ({path or 'inside torch'})")
        add("oneDNN", "yes" if facts["mkldnn"] else "no")
    add("native module", facts.get("native") or "not usable")
    add("built modules", ", ".join(native.modules()) or "none")
    add("compiler", _first_line(["c++", "--version"]) or "none")
    add("CUDA toolkit (nvcc)", _nvcc_version() or "none")
    add("MPI", _first_line(["mpirun", "--version"]) or "none")
    return lines


def machine_lines(facts):
    """Cores, instruction sets, memory and devices."""
    lines = _title("Machine")
    add = lambda name, value: lines.append(f"{name:<24}{value}")  # noqa: E731
    cores = cpu.usable_cores()
    total, available = cpu.memory_bytes()
    _, isa, _ = native.kernel_table("cpu")
    add("CPU", cpu.cpu_info()[0] or platform.machine())
    add(
        "cores",
        f"{len(cores)} usable ({len(cpu.physical_cores(cores))} physical), {numa.numa_node_count()} NUMA node(s)",
    )
    add("instruction set", f"{cpu.widest_isa()} (kernels use: {isa or 'nothing, not built'})")
    add("memory", f"{_gib(total)}, {_gib(available)} available")
    add("shared memory", _shm_text())
    gpus = facts.get("gpus") or []
    add(
        "GPUs",
        ", ".join(gpus) or (f"{devices.nvidia_device_count()} (not usable by torch)" if _gpu_unused(facts) else "none"),
    )
    return lines


def _gpu_unused(facts):
    return devices.nvidia_device_count() > 0 and not facts.get("gpus")


def _shm_bytes():
    try:
        return shutil.disk_usage("/dev/shm")
    except OSError:
        return None


def _shm_text():
    usage = _shm_bytes()
    return f"/dev/shm {_gib(usage.total)}, {_gib(usage.free)} free" if usage else "no /dev/shm"


def warnings(facts):
    """One paragraph for each thing that makes training slow or impossible here, with its fix."""
    found = []
    if "error" in facts:
        found.append(
            f"torch cannot be imported ({facts['error']}): training needs it. Install it with `apt install "
            f"python3-torch` or `pip install torch`."
        )
    elif "native_error" in facts:
        found.append(f"the native module cannot be loaded: {facts['native_error']}")
    if facts.get("blas_warning"):
        found.append(facts["blas_warning"])
    usage = _shm_bytes()
    if usage is None or usage.total < _SMALL_SHM_BYTES:
        found.append(
            f"shared memory is small ({_shm_text()}): data loader workers and collectives may fail with a bus error. "
            f"In a container start it with --shm-size=8g or --ipc=host."
        )
    return found


def main(hide_operator_status=False, hide_errors_and_warnings=False):
    """Prints the report; never fails because something is missing, that is what it reports."""
    facts = torch_facts()
    lines = [] if hide_operator_status else op_lines(facts)
    lines += software_lines(facts) + machine_lines(facts)
    if not hide_errors_and_warnings:
        lines += [f"[WARNING] {text}" for text in warnings(facts)]
    print("\n".join(lines + ["-" * _WIDTH]))


def cli_main(args=None):
    """``ds_report``; returns the exit code 0."""
    parser = argparse.ArgumentParser(prog="ds_report", description="Shows what DeepSpeed can do on this machine.")
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out the op table")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out the warnings")
    options = parser.parse_args(args)
    main(options.hide_operator_status, options.hide_errors_and_warnings)
    return 0
