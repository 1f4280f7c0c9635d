"""Options of a build from the environment: the version's suffix, which kernels, flags. setup.py reads this file.

An op is a few functions in a library, so what is chosen is the library: DS_BUILD_OPS and DS_BUILD_<OP> decide whether
the CUDA kernels are compiled, and DS_BUILD_<OP>=1 refuses to build without that op.
"""

import difflib
import re

_OTHER_NAMES = {"DS_BUILD_OPS", "DS_BUILD_STRING"}
_SUFFIX = re.compile(r"((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+([.][a-z0-9]+)*)?", re.I)


class OptionError(ValueError):
    """The environment asks for what cannot be built; the text is one paragraph."""


def full_version(base, commit_hash, environ):
    """``base`` with DS_BUILD_STRING ("+cluster7", ".dev3"), or with the commit: "0.19.6+8cd046f"."""
    suffix = environ.get("DS_BUILD_STRING")
    if suffix is None:
        if not re.fullmatch(r"[0-9a-f]+", commit_hash):
            return base
        # A version's all-digit part is a number and loses its leading zeros.
        suffix = f"+g{commit_hash}" if commit_hash.isdigit() else f"+{commit_hash}"
    if not _SUFFIX.fullmatch(suffix):
        raise OptionError(
            f"DS_BUILD_STRING is {suffix!r}, and {base}{suffix} is not a version. Write, for example, '+cluster7' or "
            f"'.dev3'."
        )
    return base + suffix


def wants_cuda(rows, environ, nvcc, torch_cuda):
    """Whether the CUDA kernels are to be compiled, where there is an nvcc.

    Args:
        rows: the op table. nvcc: its path or None. torch_cuda: the version torch was built for, or None.

    Raises:
        OptionError: a value is not 0 or 1; DS_BUILD_<OP>=1 for an op that cannot be built here.
    """
    values = {name: environ[name] for name in environ if name.startswith("DS_BUILD_") and name != "DS_BUILD_STRING"}
    for name, value in values.items():
        if value not in ("0", "1"):
            raise OptionError(f"the environment variable {name} is {value!r}; it must be 0 or 1.")
    known = {row.build_var: row for row in rows}
    for name, value in values.items():
        if value == "1" and name not in _OTHER_NAMES:
            _require(name, known, nvcc, torch_cuda)
    everything = values.get("DS_BUILD_OPS", "1")
    with_cuda = [row for row in rows if row.api and row.rule and "cuda" in row.devices]
    return any(values.get(row.build_var, everything) == "1" for row in with_cuda)


def _require(name, known, nvcc, torch_cuda):
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise OptionError(
            f"{name}=1 asks for an op that does not exist.{f' Did you mean {near[0]}?' if near else ''} There are: "
            f"{', '.join(sorted(known))}."
        )
    row = known[name]
    if row.api is None:
        raise OptionError(f"{name}=1 asks for the op {row.name}, which is not in this build yet. Unset the variable.")
    if "cuda" in row.devices and row.rule and nvcc is None and (torch_cuda or "cpu" not in row.devices):
        raise OptionError(
            f"{name}=1 asks for the op {row.name}, whose GPU kernels need nvcc, and there is none on this machine. "
            f"Install the CUDA toolkit (of version {torch_cuda or 'your driver supports'}) and set CUDA_HOME, or unset "
            f"the variable."
        )


def cmake_flags(environ):
    """CMake's options for CFLAGS, CXXFLAGS and LDFLAGS. Always all of them: CMake remembers those of the last time."""
    join = lambda *names: " ".join(filter(None, (environ.get(name, "").strip() for name in names)))  # noqa: E731
    return [
        f"-DCMAKE_CXX_FLAGS={join('CFLAGS', 'CXXFLAGS')}",
        f"-DCMAKE_SHARED_LINKER_FLAGS={join('LDFLAGS')}",
        f"-DCMAKE_MODULE_LINKER_FLAGS={join('LDFLAGS')}",
    ]


def job_flags(parallel, environ):
    """ninja's ``-j`` from ``build_ext -j N`` or MAX_JOBS; [] without either."""
    text = str(parallel or environ.get("MAX_JOBS") or "")
    if text and not (text.isdigit() and int(text) > 0):
        raise OptionError(f"the environment variable MAX_JOBS is {text!r}; it must be a number of at least 1.")
    return ["-j", text] if text else []


def check_torch(version):
    """Raises OptionError for a torch that the native module is not compiled against."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < (1, 13):
        raise OptionError(
            f"it needs torch 1.13 or newer, and this environment has {version}: pip install 'torch>=1.13'"
        )
