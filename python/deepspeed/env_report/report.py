"""The text of ``ds_report``."""

import argparse
import os
import platform
import shutil
import sys

from deepspeed import git_version_info as build
from deepspeed.env_report import native
from deepspeed.env_report.op_report import WIDTH, op_lines, op_warnings, title
from deepspeed.env_report.torch_facts import torch_facts
from deepspeed.host import cpu, cuda_toolkit, devices, numa
from deepspeed.host.command_line import program
from deepspeed.host.programs import output_of

_LABEL_WIDTH = 33
# Below this, data loader workers and collectives between processes of one host run out of room.
_SMALL_SHM_BYTES = 1 << 30
# Facts that are there where something does not work; the first one of them is why the others are there.
_BROKEN = {
    "error": "torch cannot be imported ({}): training needs it. Install it with `apt install python3-torch` or "
    "`pip install torch`.",
    "native_error": "the native module cannot be loaded: {}",
    "ops_error": "the op builders cannot be asked: {}",
}


def _first_line(command):
    return (output_of(*command).strip().splitlines() or [None])[0]


def _gib(count):
    return f"{count / (1 << 30):.1f} GiB"


def _lines(heading, rows):
    return title(heading) + [f"{label} {'.' * (_LABEL_WIDTH - len(label))} {value}" for label, value in rows.items()]


def software_lines(facts):
    """Versions of the software that deepspeed stands on."""
    usable, of_torch = "error" not in facts, {}
    if usable:
        name, path = facts["blas"]
        of_torch = {
            **({"NCCL": facts["nccl"]} if facts.get("nccl") else {}),
            "torch.distributed": ", ".join(facts["backends"]) or "none",
            "BLAS in use": f"{name} ({path or 'inside torch'})",
            "oneDNN": "yes" if facts["mkldnn"] else "no",
            "bf16 products on the CPU": facts["bf16_products"],
        }
    rows = {
        "torch install path": [facts["folder"]] if usable else f"not usable: {facts['error']}",
        "torch version": facts["version"] if usable else None,
        "deepspeed install path": [os.path.dirname(native.LIB_DIR)],
        "deepspeed info": f"{build.version}, {build.git_hash}, {build.git_branch}",
        "torch cuda version": facts.get("cuda"),
        "torch hip version": facts.get("hip"),
        "nvcc version": ".".join(map(str, cuda_toolkit.nvcc_version() or ())) or None,
        "deepspeed wheel compiled w.": _compiled_with(),
        "shared memory (/dev/shm) size": _shm_text(),
        "Python": f"{platform.python_version()} ({sys.executable})",
        **of_torch,
        "native module": facts.get("native") or "not usable",
        "built modules": ", ".join(native.modules()) or "none",
        "compiler": _first_line(["c++", "--version"]) or "none",
        "MPI": _first_line(["mpirun", "--version"]) or "none",
    }
    return _lines("DeepSpeed general environment info:", rows)


def _compiled_with():
    info = build.torch_info
    rows = ("torch", info["version"]), ("cuda", info["cuda_version"]), ("hip", info["hip_version"])
    return ", ".join(f"{label} {version}" for label, version in rows if label == "torch" or version != "0.0")


def machine_lines(facts):
    """Cores, instruction sets, memory and devices."""
    cores, unused = cpu.usable_cores(), devices.nvidia_device_count()
    total, available = cpu.memory_bytes()
    physical = len(cpu.physical_cores(cores))
    cuda_abi, cuda_isa, why_not = native.kernel_table("cuda")
    rows = {
        "CPU": cpu.cpu_info()[0] or platform.machine(),
        "cores": f"{len(cores)} usable ({physical} physical), {numa.numa_node_count()} NUMA node(s)",
        "instruction set": ", ".join([cpu.widest_isa(), *cpu.product_units()]),
        "CPU kernels use": _isa_text(),
        "memory": f"{_gib(total)}, {_gib(available)} available",
        "GPUs": ", ".join(facts.get("gpus") or []) or (f"{unused} (not usable by torch)" if unused else "none"),
        "CUDA kernels": cuda_isa if cuda_abi else f"none: {why_not}",
        "accelerator": _chosen_text(facts),
        **{f"not {name}": why for name, why in facts.get("accelerators", {}).items() if why},
    }
    return _lines("Machine", rows)


def _chosen_text(facts):
    asked = os.environ.get("DS_ACCELERATOR")
    return f"{facts.get('accelerator', 'none')}{f' (DS_ACCELERATOR={asked})' if asked else ''}"


def _isa_text():
    _, isa, why_not = native.kernel_table("cpu")
    if not isa:
        return f"nothing: {why_not}"
    forced = os.environ.get("DS_FORCE_ISA")
    paths = ", ".join(native.isa_paths())
    return f"{isa}{f' (DS_FORCE_ISA={forced})' if forced else ''}, of {paths}"


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
    found = [text.format(facts[fact]) for fact, text in _BROKEN.items() if fact in facts][:1]
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


@program("ds_report")
def cli_main(args=None):
    """``ds_report``; returns the exit code 0."""
    parser = argparse.ArgumentParser(prog="ds_report", description="Shows what DeepSpeed can do on this machine.")
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out the op table")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out the warnings")
    options = parser.parse_args(args)
    main(options.hide_operator_status, options.hide_errors_and_warnings)
    return 0
