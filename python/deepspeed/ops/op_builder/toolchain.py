"""The compiler of this machine and the flags that make an extension fit the torch of this process."""

import glob
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile

import torch

from deepspeed._compat import CXX_STANDARD
from deepspeed.host.programs import find_program

TORCH = os.path.dirname(os.path.abspath(torch.__file__))


class BuildError(RuntimeError):
    """An op could not be compiled; the text is one paragraph with the way out."""


def _words(variable):
    return shlex.split(os.environ.get(variable, ""))


def find_compiler():
    """The command of the C++ compiler as a list: ``CXX``, or c++, g++, clang++ on PATH; None where there is none."""
    named = _words("CXX")
    if named:
        path = find_program(named[0])
        return [path, *named[1:]] if path else None
    return next(([path] for path in map(find_program, ("c++", "g++", "clang++")) if path), None)


def find_ninja():
    """The path of ninja, on PATH or beside this Python (``pip install ninja``); None where there is none."""
    return find_program("ninja") or find_program(os.path.join(os.path.dirname(sys.executable), "ninja"))


def compiler_identity(command):
    """Tells compilers apart without running them: paths, sizes and times of change of the command's files."""
    parts = []
    for word in command:
        path = os.path.realpath(word)
        if os.path.isfile(path):
            stat = os.stat(path)
            parts.append([path, stat.st_size, stat.st_mtime_ns])
        else:
            parts.append([word])
    return parts


def torch_definitions():
    """Macros without which a compiled module and torch disagree about C++ types."""
    found = [f"_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    for key in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        value = getattr(torch._C, f"_PYBIND11_{key}", None)
        if value:
            found.append(f'PYBIND11_{key}="{value}"')
    return found


def with_standard(flags):
    """``flags`` with a C++ standard that torch's headers can be read with: an older one is replaced, a missing one added."""
    wanted, found = f"-std=c++{CXX_STANDARD}", False
    result = []
    for flag in flags:
        if flag.startswith("-std="):
            found = True
            number = re.fullmatch(r"-std=(?:c|gnu)\+\+(\d+)", flag)
            flag = wanted if number and int(number[1]) < CXX_STANDARD else flag
        result.append(flag)
    return result if found else [*result, wanted]


def torch_includes():
    """Folders of torch's and Python's headers."""
    include = os.path.join(TORCH, "include")
    return [include, os.path.join(include, "torch", "csrc", "api", "include"), sysconfig.get_paths()["include"]]


def torch_link_flags(cuda):
    """Options that link torch's libraries, wherever the process that imported torch has found them."""
    libraries = ["c10", "torch_cpu", "torch", "torch_python"]
    if cuda:
        libraries += ["c10_cuda", "torch_cuda"]
    lib = os.path.join(TORCH, "lib")
    present = [name for name in libraries if os.path.exists(os.path.join(lib, f"lib{name}.so"))]
    return [f"-L{lib}", *(f"-l{name}" for name in present)]


def cuda_folders(nvcc):
    """``(include folder, library folders)`` of nvcc's toolkit."""
    root = os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))
    folders = [os.path.join(root, "lib64"), *glob.glob(os.path.join(root, "targets", "*", "lib"))]
    return os.path.join(root, "include"), [folder for folder in folders if os.path.isdir(folder)]


def check_headers(op):
    """BuildError where headers that every extension includes are missing, naming the package that has them."""
    headers = torch_includes()
    wanted = (
        (os.path.join(headers[0], "torch", "extension.h"), "torch's headers",
         "on Debian `apt-get install libtorch-dev`, else reinstall torch with pip"),
        (os.path.join(headers[2], "Python.h"), "Python's headers",
         "on Debian `apt-get install python3-dev`, else use a Python with headers"),
    )  # fmt: skip
    for path, what, fix in wanted:
        if not os.path.exists(path):
            raise BuildError(f"the op {op} must be compiled, but {what} are missing ({path} is not there): {fix}.")
    bundled = os.path.join(headers[0], "pybind11", "pybind11.h")
    if not os.path.exists(bundled) and not os.path.exists("/usr/include/pybind11/pybind11.h"):
        raise BuildError(
            f"the op {op} must be compiled, but the headers of pybind11 are missing: on Debian `apt-get install "
            f"pybind11-dev` (torch from PyPI brings its own)."
        )


def links(function, libraries, folders, verbose=False):
    """Whether a program that calls the C function links against the libraries; CFLAGS and LDFLAGS count."""
    compiler = find_compiler()
    if compiler is None:
        return False
    with tempfile.TemporaryDirectory() as scratch:
        source = os.path.join(scratch, "probe.cpp")
        with open(source, "w", encoding="utf-8") as file:
            file.write(f'extern "C" void {function}();\nint main() {{ {function}(); }}\n')
        command = [
            *compiler, *_words("CFLAGS"), source, "-o", os.path.join(scratch, "probe"),
            *(f"-L{folder}" for folder in folders), *_words("LDFLAGS"), *(f"-l{name}" for name in libraries),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if verbose and done.returncode != 0:
            print(done.stderr)
        return done.returncode == 0
