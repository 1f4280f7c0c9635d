"""The CUDA toolkit of this machine: where nvcc is, whether it fits a torch, which GPUs to compile for.

Imports nothing of the package, because CMake runs this file as a program:
``cuda_toolkit.py configure NVCC TORCH_CUDA`` prints the value for CMAKE_CUDA_ARCHITECTURES (an empty line: no wish).
"""

import os
import re
import subprocess
import sys

SKIP = "DS_SKIP_CUDA_CHECK"
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
_FAMILIES = {
    "Pascal": "6.0;6.1+PTX",
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;12.0+PTX",
}


class MissingCUDAException(Exception):
    """There is no nvcc where one is needed."""


class CUDAMismatchException(Exception):
    """nvcc and torch belong to different major versions of CUDA."""


def find_nvcc():
    """The path of nvcc: ``CUDACXX``, ``$CUDA_HOME/bin``, PATH, then /usr/local/cuda; None where there is none."""
    named = os.environ.get("CUDACXX")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [named] if named else []
    candidates += [os.path.join(home, "bin", "nvcc")] if home else []
    candidates += [os.path.join(folder, "nvcc") for folder in os.get_exec_path()]
    candidates.append("/usr/local/cuda/bin/nvcc")
    return next((path for path in candidates if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def _ask(nvcc, option):
    try:
        return subprocess.run([nvcc, option], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def nvcc_version(nvcc=None):
    """``(major, minor)`` of nvcc, or None where there is none or it does not say."""
    nvcc = nvcc or find_nvcc()
    found = re.search(r"\brelease (\d+)\.(\d+)", _ask(nvcc, "--version")) if nvcc else None
    return (int(found.group(1)), int(found.group(2))) if found else None


def check_versions(nvcc, torch_cuda):
    """Compares nvcc with the CUDA version that torch was built for ("12.4"; None or "none": torch has none).

    Returns:
        "" or the text of a warning (the minor versions differ, or the check was skipped).

    Raises:
        CUDAMismatchException: the major versions differ and DS_SKIP_CUDA_CHECK is not set.
    """
    theirs = re.match(r"(\d+)\.(\d+)", torch_cuda or "")
    ours = nvcc_version(nvcc)
    if theirs is None or ours is None:
        return ""
    theirs = (int(theirs.group(1)), int(theirs.group(2)))
    if ours == theirs:
        return ""
    text = f"nvcc ({nvcc}) is of CUDA {ours[0]}.{ours[1]}, but torch was built for CUDA {theirs[0]}.{theirs[1]}"
    if ours[0] == theirs[0]:
        return f"{text}. Minor versions usually work together; if something fails, install matching ones."
    if os.environ.get(SKIP, "0") not in ("", "0"):
        return f"{text}. {SKIP} is set, so the build goes on."
    raise CUDAMismatchException(
        f"{text}. Code of two major versions in one process fails in surprising ways. Install the toolkit of CUDA "
        f"{theirs[0]} (CUDA_HOME tells where it is) or a torch for CUDA {ours[0]}; {SKIP}=1 builds nevertheless."
    )


def parse_architectures(text):
    """TORCH_CUDA_ARCH_LIST as torch reads it, ``"8.0;9.0+PTX"`` or ``"Ampere Hopper"``, in order and without repeats.

    Returns:
        list of (number, ptx): ("80", False), ("90", True), ("90a", False).

    Raises:
        ValueError: a part is neither a compute capability nor a name of a family.
    """
    parts = []
    for part in re.split(r"[;,\s]+", text.strip()):
        parts += _FAMILIES.get(part, part).split(";")
    found = {}
    for part in filter(None, parts):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", part)
        if not match:
            raise ValueError(
                f"{ARCHITECTURES} is {text!r}, and {part!r} in it is not a compute capability. Write, for example, "
                f"{ARCHITECTURES}='8.0;9.0+PTX', or names: {', '.join(_FAMILIES)}."
            )
        number = "".join(match.group(1, 2, 3))
        found[number] = found.get(number, False) or bool(match.group(4))
    return list(found.items())


def check_supported(nvcc, architectures):
    """ValueError where nvcc cannot compile for one of them (each major version of CUDA drops the oldest GPUs)."""
    known = set(re.findall(r"compute_(\d+)", _ask(nvcc, "--list-gpu-arch")))
    refused = [number for number, _ in architectures if known and number.rstrip("af") not in known]
    if refused:
        major, minor = nvcc_version(nvcc) or ("?", "?")
        dotted = lambda number: re.sub(r"(\d+)(\d)([af]?)$", r"\1.\2\3", number)  # noqa: E731
        raise ValueError(
            f"{ARCHITECTURES} asks for {', '.join(map(dotted, refused))}, which nvcc of CUDA {major}.{minor} ({nvcc}) "
            f"does not compile for; it knows {', '.join(dotted(n) for n in sorted(known, key=int))}. Take these out, "
            f"or use another CUDA toolkit."
        )


def gencode_flags(architectures):
    """nvcc's options for what ``parse_architectures`` returned."""
    flags = []
    for number, ptx in architectures:
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if ptx:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def cmake_architectures(architectures):
    """The same as a CMake list: ``80-real;90``."""
    return ";".join(number if ptx else f"{number}-real" for number, ptx in architectures)


def main(arguments):
    """``configure NVCC TORCH_CUDA``; returns the exit code."""
    _, nvcc, torch_cuda = arguments
    try:
        warning = check_versions(nvcc, torch_cuda)
        architectures = parse_architectures(os.environ.get(ARCHITECTURES, ""))
        check_supported(nvcc, architectures)
    except (CUDAMismatchException, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if warning:
        print(warning, file=sys.stderr)
    print(cmake_architectures(architectures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
