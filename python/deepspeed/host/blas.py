"""Finds the BLAS of torch's matrix products in this process, and says whether it is the slow one.

Debian's torch calls whatever ``libblas.so.3`` is installed; by default that is the reference implementation, which is
about thirty times slower than OpenBLAS. torch from PyPI carries its own.
"""

import os
import re
import sys

from deepspeed.host.texts import read_text

_PATTERNS = {
    "OpenBLAS": r"openblas",
    "MKL": r"/libmkl_",
    "BLIS": r"/libblis|/blis[^/]*/libblas\.so",
    "ATLAS": r"/atlas[^/]*/libblas\.so|/libatlas",
    "reference": r"/libblas\.so",
}
FIX = "apt install libopenblas0-openmp"


def blas_name(paths):
    """``(name, path)`` of the BLAS among the mapped files ``paths``, or ``(None, None)``.

    Names are "OpenBLAS", "MKL", "BLIS", "ATLAS" and "reference". Copies inside numpy's and scipy's wheels do not
    count: torch does not call them.
    """
    paths = sorted(path for path in paths if not re.search(r"/(numpy|scipy)\.libs/", path))
    found = ((name, path) for name, pattern in _PATTERNS.items() for path in paths if re.search(pattern, path))
    return next(found, (None, None))


def blas_in_use():
    """``(name, path)`` of the BLAS behind the torch of this process; ``(None, None)`` while torch is not imported.

    The path is None for a BLAS that is linked into torch itself.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None, None
    if torch.backends.mkl.is_available():
        return "MKL", None
    name, path = blas_name(set(re.findall(r"(?m)/.*$", read_text("/proc/self/maps"))))
    if name is None:
        built = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
        return (built[1] if built else "unknown"), None
    return name, path


def blas_warning():
    """One paragraph when torch runs on the reference BLAS, else None."""
    name, path = blas_in_use()
    if name != "reference":
        return None
    return (
        f"torch's fp32 matrix products run on the reference BLAS ({os.path.realpath(path)}), which is about thirty "
        f"times slower than an optimised one. Install one with `{FIX}` (as root) and start again; nothing has to be "
        f"rebuilt."
    )
