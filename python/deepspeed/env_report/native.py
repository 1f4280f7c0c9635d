"""The native libraries of the package, opened and asked without torch."""

import ctypes
import os

LIB_DIR = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_lib")
_HIGHEST_ABI = 64
_ISAS = ("scalar", "neon", "sse4", "avx2", "avx512")


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
    text = lambda abi: (library.ds_kernels_error(ctypes.c_uint32(abi), name) or b"").decode()  # noqa: E731
    other_version = text(_HIGHEST_ABI)
    for abi in range(1, _HIGHEST_ABI):
        table = library.ds_kernels(ctypes.c_uint32(abi), name)
        if table:
            return table.contents.abi, (table.contents.isa or b"").decode(), ""
        if text(abi) != other_version:
            return 0, "", text(abi)
    return 0, "", other_version or "the library offers no kernels"


def isa_paths():
    """Names of the instruction sets that the CPU kernels are compiled for and that this CPU has, narrowest first."""
    library, _ = _open_kernels()
    abi = kernel_table("cpu")[0]
    if library is None or abi == 0:
        return []
    library.ds_cpu_kernels_isa.restype = ctypes.POINTER(_TableHead)
    return [name for name in _ISAS if library.ds_cpu_kernels_isa(ctypes.c_uint32(abi), name.encode())]


def op_rows(rows, facts):
    """[name, installed, compatible, why not] per row of the op table: what the builders said, or without torch what
    the libraries' files tell."""
    if "ops" in facts:
        return facts["ops"]
    why_not = "torch is not usable" if "error" in facts else facts.get("native_error") or facts.get("ops_error", "")
    cpu_abi, _, problem = kernel_table("cpu")
    return [
        [row.name, bool(row.api) and (row.rule is None or cpu_abi > 0) and (not row.native or bool(modules())), False,
         "; ".join(filter(None, ["" if row.api else "not in this build yet", why_not, problem if row.rule else ""]))]
        for row in rows
    ]  # fmt: skip


def modules():
    """Names of the (Python, torch) pairs that a native module was built for."""
    names = os.listdir(LIB_DIR) if os.path.isdir(LIB_DIR) else ()
    return sorted(name for name in names if name.startswith("cp"))
