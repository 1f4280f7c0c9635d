"""One device path: which files may know one kind of device by name. Each check returns a list of sentences."""

import ast
import re

from sentences import listed

SEE = 'See "Memory" in docs/core.md, and CUDA_FILES and CUDA_MODULES in tests/house/house_devices.py.'

# What may ask for CUDA in csrc, a folder or a file: why.
CUDA_FILES = {
    "kernels/cuda/": "the kernels of that device",
    "comm/nccl/": "NCCL moves memory of CUDA devices alone; native_stream.cpp finds their streams in torch",
    "comm/transports/nccl_communicator.cpp": "as above",
    "bindings/comm/nccl.cpp": "as above",
    "io/async/cufile.cpp": "cuFile reads into memory of CUDA devices alone",
}
# The same in the Python package.
CUDA_MODULES = {
    "accelerator/": "a class for each kind of device",
    "comm/nccl": "NCCL moves memory of CUDA devices alone",
    "host/": "finds what this machine has",
    "launcher/": "binds ranks to the devices of a machine, without torch",
    "env_report/": "reports what this machine has",
    "ops/op_table.py": "the libraries of kernels that are built",
    "_compat.py": "torch 1.13 has the decorators of autocast for all devices in torch.cuda.amp",
}
_NAMES = re.compile(r'\bis_cuda\b|\bkCUDA\b|"cuda"|\bcuda_stream\b')
_COMMENTS = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.S)


def _without_comments(text):
    return _COMMENTS.sub(lambda found: found.group(1) or "\n" * found.group().count("\n"), text)


@listed
def check_devices_cpp(files):
    for path, text in files.items():
        if path.startswith(tuple(CUDA_FILES)):
            continue
        for number, line in enumerate(_without_comments(text).splitlines(), 1):
            for name in _NAMES.findall(line):
                yield (
                    f"csrc/{path}:{number} asks for {name}: what is right for CUDA alone is not run by any other "
                    f"device, nor by the tests. Ask is_cpu() (host memory, work is done on return), the device's guard "
                    f"(VirtualGuardImpl) or zero::kernels_of(). {SEE}"
                )


def _asks_for_cuda(node):
    if isinstance(node, ast.Compare):
        return any(
            getattr(part, "value", None) == "cuda" for one in (node.left, *node.comparators) for part in _parts(one)
        )
    if isinstance(node, ast.ImportFrom):
        return node.module == "torch.cuda" or (node.module or "").startswith("torch.cuda.")
    if isinstance(node, ast.Import):
        return any(name.name.split(".")[:2] == ["torch", "cuda"] for name in node.names)
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "cuda"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    )


def _parts(node):
    return node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]


@listed
def check_devices_python(modules):
    for module in modules.values():
        if module.path.startswith(tuple(CUDA_MODULES)):
            continue
        for node in ast.walk(module.tree):
            if _asks_for_cuda(node):
                yield (
                    f"python/deepspeed/{module.path}:{node.lineno} asks for CUDA. Ask the accelerator "
                    f"(deepspeed.accelerator.get_accelerator), so that every device takes the same path. {SEE}"
                )
