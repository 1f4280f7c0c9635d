"""Memory that the allocator of this process has given out, of all threads."""

import ctypes

from torch.utils._python_dispatch import TorchDispatchMode

HAS_COUNT = hasattr(ctypes.CDLL(None), "mallinfo2")


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def allocated():
    """Bytes that malloc has given out, of all threads."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _MallInfo
    info = ask()
    return info.uordblks + info.hblkhd


class Peak(TorchDispatchMode):
    """Looks after each operation."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, allocated())
        return out
