"""The text of ``ds_report``."""

import argparse
import os
import platform
import shutil
import subprocess
import sys

from deepspeed import git_version_info as build
from deepspeed.env_report import native
from deepspeed.env_report.op_report import WIDTH, op_lines, op_warnings, title
from deepspeed.env_report.torch_facts import torch_facts
from deepspeed.host import cpu, cuda_toolkit, devices, numa

_LABEL_WIDTH = 33
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
    version = cuda_toolkit.nvcc_version()
    return f"{version[0]}.{version[1]}" if version else None


def _gib(count):
    return f"{count / (1 << 30):.1f} GiB"


def _line(label, value):
    return f"{label} {'.' * (_LABEL_WIDTH - len(label))} {value}"


def software_lines(facts):
    """Versions of the software that deepspeed stands on."""
    lines = title("DeepSpeed general environment info:")
    add = lambda label, value: lines.append(_line(label, value))  # noqa: E731
    usable = "error" not in facts
    add("torch install path", [facts["folder"]] if usable else f"not usable: {facts['error']}")
    add("torch version", facts["version"] if usable else None)
    add("deepspeed install path", [os.path.dirname(native.LIB_DIR)])
    add("deepspeed info", f"{build.version}, {build.git_hash}, {build.git_branch}")
    add("torch cuda version", facts.get("cuda"))
    add("torch hip version", facts.get("hip"))
    add("nvcc version", _nvcc_version())
    add("deepspeed wheel compiled w.", _compiled_with())
    add("shared memory (/dev/shm) size", _shm_text())
    add("Python", f"{platform.python_version()} ({sys.executable})")
    if usable:
        if facts.get("nccl"):
            add("NCCL", facts["nccl"])
        add("torch.distributed", ", ".join(facts["backends"]) or "none")
        name, path = facts["blas"]
        add("BLAS in use", f"{name} ({path or 'inside torch'})")
        add("oneDNN", "yes" if facts["mkldnn"] else "no")
        add("bf16 products on the CPU", facts["bf16_products"])
    add("native module", facts.get("native") or "not usable")
    add("built modules", ", ".join(native.modules()) or "none")
    add("compiler", _first_line(["c++", "--version"]) or "none")
    add("MPI", _first_line(["mpirun", "--version"]) or "none")
    return lines


def _compiled_with():
    text = f"torch {build.torch_info['version']}"
    for key, label in (("cuda_version", "cuda"), ("hip_version", "hip")):
        if build.torch_info[key] != "0.0":
            text += f", {label} {build.torch_info[key]}"
    return text


def machine_lines(facts):
    """Cores, instruction sets, memory and devices."""
    lines = title("Machine")
    add = lambda label, value: lines.append(_line(label, value))  # noqa: E731
    cores = cpu.usable_cores()
    total, available = cpu.memory_bytes()
    add("CPU", cpu.cpu_info()[0] or platform.machine())
    add(
        "cores",
        f"{len(cores)} usable ({len(cpu.physical_cores(cores))} physical), {numa.numa_node_count()} NUMA node(s)",
    )
    add("instruction set", cpu.widest_isa())
    add("CPU kernels use", _isa_text())
    add("memory", f"{_gib(total)}, {_gib(available)} available")
    gpus = facts.get("gpus") or []
    add(
        "GPUs",
        ", ".join(gpus) or (f"{devices.nvidia_device_count()} (not usable by torch)" if _gpu_unused(facts) else "none"),
    )
    add("CUDA kernels", _cuda_text())
    return lines


def _isa_text():
    _, isa, why_not = native.kernel_table("cpu")
    if not isa:
        return f"nothing: {why_not}"
    forced = os.environ.get("DS_FORCE_ISA")
    paths = ", ".join(native.isa_paths())
    return f"{isa}{f' (DS_FORCE_ISA={forced})' if forced else ''}, of {paths}"


def _cuda_text():
    abi, isa, why_not = native.kernel_table("cuda")
    return isa if abi else f"none: {why_not}"


def _gpu_unused(facts):
    return devices.nvidia_device_count() > 0 and not facts.get("gpus")


def _shm_bytes():
    try:
        return shutil.disk_usage("/dev/shm")
    except OSError:
        return None


def _shm_text():
    usage = _shm_bytes()
    return f"{_gib(usage.total)}, {_gib(usage.free)} free" if usage else "no /dev/shm"


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
    elif "ops_error" in facts:
        found.append(f"the op builders cannot be asked: {facts['ops_error']}")
    found += [facts[name] for name in ("blas_warning", "product_warning") if facts.get(name)]
    abi, _, why_not = native.kernel_table("cpu")
    if abi == 0:
        found.append(f"the CPU kernels cannot be used: {why_not}")
    found += op_warnings()
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
    print("\n".join(lines + ["-" * WIDTH]))


def cli_main(args=None):
    """``ds_report``; returns the exit code 0."""
    parser = argparse.ArgumentParser(prog="ds_report", description="Shows what DeepSpeed can do on this machine.")
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out the op table")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out the warnings")
    options = parser.parse_args(args)
    main(options.hide_operator_status, options.hide_errors_and_warnings)
    return 0
