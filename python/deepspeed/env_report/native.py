"""The native libraries of the package, opened and asked without torch."""

import ctypes
import os
from dataclasses import dataclass

LIB_DIR = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_lib")
_HIGHEST_ABI = 64


@dataclass
class OpStatus:
    """``why_not`` is empty when the op is installed and runs here."""

    name: str
    installed: bool
    compatible: bool
    why_not: str


class _TableHead(ctypes.Structure):
    # The first fields of ds::kernels::KernelTable (csrc/kernels/table.h), which never move.
    _fields_ = [
        ("abi", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("device", ctypes.c_char_p),
        ("isa", ctypes.c_char_p),
    ]


def _open_kernels():
    # (library or None, why not)
    path = os.path.join(LIB_DIR, "libds_kernels_cpu.so")
    if not os.path.exists(path):
        return None, "libds_kernels_cpu.so is not built: run `make` in the source tree, or reinstall the package"
    try:
        library = ctypes.CDLL(path)
        library.ds_kernels.restype = ctypes.POINTER(_TableHead)
        library.ds_kernels_error.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        return None, f"libds_kernels_cpu.so cannot be used: {error}"
    return library, ""


def kernel_table(device):
    """``(abi, instruction set, why not)`` of the kernels for ``"cpu"`` or ``"cuda"``; abi 0 when there are none."""
    library, why_not = _open_kernels()
    if library is None:
        return 0, "", why_not
    name = device.encode()
    # The number belongs to the library; nobody but the module that was built with it needs to know it.
    for abi in range(1, _HIGHEST_ABI):
        table = library.ds_kernels(ctypes.c_uint32(abi), name)
        if table:
            return table.contents.abi, (table.contents.isa or b"").decode(), ""
    error = library.ds_kernels_error(ctypes.c_uint32(_HIGHEST_ABI - 1), name)
    return 0, "", (error or b"the library offers no kernels").decode()


def op_status(row, device_problem):
    """The ``OpStatus`` of a row of deepspeed.ops.op_table; ``device_problem(device)`` says why a device is not here."""
    name, library, device, _ = row
    abi, _, why_not = kernel_table(device)
    problem = device_problem(device)
    if not os.path.exists(os.path.join(LIB_DIR, library)) and device != "cpu":
        why_not = f"{library} is not built (needs nvcc, the CUDA toolkit, when deepspeed is built)"
        abi = 0
    return OpStatus(name, abi > 0, not problem, "; ".join(text for text in (why_not, problem) if text))


def modules():
    """Names of the (Python, torch) pairs that a native module was built for."""
    if not os.path.isdir(LIB_DIR):
        return []
    return sorted(name for name in os.listdir(LIB_DIR) if name.startswith("cp"))
