"""Compiles an extension module once and imports it.

[Note: JIT cache] The folder of a build is ``$TORCH_EXTENSIONS_DIR/<Python and torch>/<op>/<key>/<compiler>``. The key
is a hash of the sources' contents, all flags and torch's version; the compiler's folder name is a hash of its file.
Headers are found by compiling, so they cannot be in the key: ``built.json`` lists those that belong to the op (not to
the system, Python or torch) with their hashes, and a changed one means a new build. A second use therefore reads and
hashes a few files and runs no program. ``~/.cache/torch_extensions`` is the default folder.

[Note: JIT lock] A process that builds holds an flock on ``lock`` in that folder; the kernel releases it when the
process ends. Everything is made in a folder of the builder's own and moved there at the end, ``built.json`` last: a
killed build leaves unused files, but no incomplete module.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Optional

import torch

from deepspeed.host import cuda_toolkit
from deepspeed.host.cpu import cpu_info
from deepspeed.host.owned_folders import why_foreign
from deepspeed.host.recorded_names import path_below
from deepspeed.log import logger
from deepspeed.ops.op_builder import toolchain
from deepspeed.ops.op_builder.toolchain import BuildError

_FORMAT = 1  # changes when the flags or files below change their meaning
_loaded = {}
_loaded_lock = threading.Lock()


@dataclass
class Plan:
    """A compiler job. ``sources`` and ``include_paths`` are absolute; ``nvcc`` is needed for .cu files only."""

    name: str
    sources: list
    include_paths: list = field(default_factory=list)
    cxx_args: list = field(default_factory=list)
    ldflags: list = field(default_factory=list)
    nvcc: Optional[str] = None
    nvcc_args: list = field(default_factory=list)


def _extensions():
    return os.path.expanduser(os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join("~", ".cache", "torch_extensions"))


def cache_root():
    """The folder of all builds for this Python and torch."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}"
    return os.path.join(_extensions(), tag)


def _need_own(path, name):
    """BuildError where another user may have put a file of the cache there."""
    problem = why_foreign(path, _extensions())
    if problem is not None:
        raise BuildError(
            f"the op {name} is not loaded from the cache of compiled ops, because {problem}. Modules run as part of "
            "this program: remove that folder, or set TORCH_EXTENSIONS_DIR to a folder of your own"
        )


def build_and_load(plan, verbose=False):
    """Imports the module of ``plan``, compiled now if it is not in the cache.

    Raises:
        BuildError: a source, the compiler, ninja or a header is missing, or the compiler refused the code.
    """
    path = _find_or_build(plan, verbose)
    _need_own(path, plan.name)
    with _loaded_lock:
        module = _loaded.get(path)
        if module is None:
            module = _loaded[path] = _import(plan.name, path)
    return module


def _import(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"the op {name} was compiled, but cannot be imported: {error}. An undefined symbol usually means that a "
            f"library is missing in libraries_args() or extra_ldflags(). The module is {path}."
        ) from error
    return module


# ---- the key -----------------------------------------------------------------------------------------------------
def _hash_file(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]


def _flags(plan):
    # (compiler flags, nvcc flags, linker flags), all that reaches the command lines
    cuda = plan.nvcc is not None
    includes = [f"-I{path}" for path in plan.include_paths]
    system = [flag for path in toolchain.torch_includes() for flag in ("-isystem", path)]
    defines = [f"-DTORCH_EXTENSION_NAME={plan.name}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    defines += [f"-D{text}" for text in toolchain.torch_definitions()]
    ldflags = [*plan.ldflags, *toolchain.torch_link_flags(cuda), *shlex.split(os.environ.get("LDFLAGS", ""))]
    if cuda:
        toolkit_include, folders = toolchain.cuda_folders(plan.nvcc)
        system += ["-isystem", toolkit_include]
        ldflags += [f"-L{folder}" for folder in folders] + ["-lcudart"]
        if torch.version.cuda is None:  # else torch has loaded the runtime
            ldflags += [f"-Wl,-rpath,{folder}" for folder in folders]
    user = shlex.split(os.environ.get("CFLAGS", "")) + shlex.split(os.environ.get("CXXFLAGS", ""))
    optimize = [] if any(flag.startswith("-O") for flag in [*plan.cxx_args, *user]) else ["-O2"]
    cxx = ["-fPIC", *optimize, *defines, *plan.cxx_args, *includes, *system, *user]
    device = ["--compiler-options", "-fPIC", "--expt-relaxed-constexpr", *defines, *plan.nvcc_args, *includes, *system]
    return toolchain.with_standard(cxx), toolchain.with_standard(device), ldflags


def _key(plan, flags):
    missing = [path for path in plan.sources if not os.path.isfile(path)]
    if missing or not plan.sources:
        what = f"a source that is not there: {missing[0]}" if missing else "no sources"
        raise BuildError(
            f"the op {plan.name} names {what}. Relative names are looked for in the installed package; give absolute "
            f"ones from another package."
        )
    native = [cpu_info()] if any("native" in flag for flag in flags[0]) else []
    facts = [
        _FORMAT, plan.name, [(os.path.basename(path), _hash_file(path)) for path in plan.sources], flags,
        str(torch.__version__), torch.version.cuda, sysconfig.get_config_var("SOABI"), platform.machine(),
        [(model, sorted(features)) for model, features in native],
        toolchain.compiler_identity([plan.nvcc]) if plan.nvcc else None,
    ]  # fmt: skip
    return _digest(facts)


# ---- the cache ---------------------------------------------------------------------------------------------------
def _valid(folder):
    """The module in ``folder`` if it is whole and its headers are what they were, else None."""
    try:
        with open(os.path.join(folder, "built.json"), encoding="utf-8") as file:
            built = json.load(file)
        if any(_hash_file(path) != digest for path, digest in built["headers"].items()):
            return None
        path = path_below(folder, built["module"], os.path.join(folder, "built.json"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return path if os.path.exists(path) else None


def _find_or_build(plan, verbose):
    flags = _flags(plan)
    base = os.path.join(cache_root(), plan.name, _key(plan, flags))
    compiler = toolchain.find_compiler()
    if compiler is None:
        # A machine without a compiler may use what another one built (an image, a shared home).
        for other in sorted(os.listdir(base)) if os.path.isdir(base) else ():
            path = _valid(os.path.join(base, other))
            if path:
                return path
        raise BuildError(
            f"the op {plan.name} must be compiled, and there is no C++ compiler on PATH (looked for "
            f"{os.environ.get('CXX') or 'c++, g++, clang++'}). On Debian or Ubuntu: `apt-get install g++`; or set CXX "
            f"to yours. Once compiled, the op is found again in {base} without a compiler."
        )
    folder = os.path.join(base, _digest(toolchain.compiler_identity(compiler)))
    path = _valid(folder)
    if path:
        return path
    ninja = toolchain.find_ninja()
    if ninja is None:
        raise BuildError(
            f"the op {plan.name} must be compiled, and there is no ninja. Install it with `pip install ninja` or, on "
            f"Debian or Ubuntu, `apt-get install ninja-build`."
        )
    toolchain.check_headers(plan.name)
    try:
        os.makedirs(folder, exist_ok=True)
        _need_own(folder, plan.name)
    except OSError as error:
        raise BuildError(
            f"the op {plan.name} must be compiled, but {folder} cannot be made ({error.strerror}). Set "
            f"TORCH_EXTENSIONS_DIR to a folder that you may write to."
        ) from error
    with _locked(folder, plan.name):
        path = _valid(folder)  # another process may have built it while we waited
        return path or _build(plan, flags, folder, compiler, ninja, verbose)


@contextmanager
def _locked(folder, name):
    with open(os.path.join(folder, "lock"), "a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            logger.info("Waiting for process %s, which compiles the op %s.", lock.read().strip() or "?", name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems have no locks. Two builds at once are then wasteful, not wrong.
            logger.warning("%s cannot be locked (%s): processes that come now compile as well.", folder, error.strerror)
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()} on {platform.node()}")
        lock.flush()
        yield


# ---- the build ---------------------------------------------------------------------------------------------------
def _quote(words):
    # For the shell, and then for ninja, to which $ is special.
    return " ".join(shlex.quote(word) for word in words).replace("$", "$$")


def _ninja_path(path):
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _ninja_file(plan, flags, compiler, module):
    cxx, device, ldflags = flags
    command = _quote(compiler)
    lines = [
        "ninja_required_version = 1.3",
        "rule cxx",
        f"  command = {command} -MMD -MF $out.d {_quote(cxx)} -c $in -o $out",
        "  depfile = $out.d",
        "rule link",
        f"  command = {command} -shared $in -o $out {_quote(ldflags)}",
    ]
    if plan.nvcc:
        lines += [
            "rule cuda",
            f"  command = {_quote([plan.nvcc])} -MD -MF $out.d {_quote(device)} -c $in -o $out",
            "  depfile = $out.d",
        ]
    objects = []
    for number, source in enumerate(plan.sources):
        rule = "cuda" if source.endswith(".cu") else "cxx"
        objects.append(f"{number}-{os.path.basename(source)}.o".replace(" ", "_"))
        lines.append(f"build {_ninja_path(objects[-1])}: {rule} {_ninja_path(source)}")
    lines.append(f"build {module}: link {' '.join(map(_ninja_path, objects))}")
    return "\n".join(lines) + "\n"


def _own_headers(plan, scratch):
    """{path: hash} of the headers below the op's own folders, from the compiler's dependency files."""
    own = {os.path.realpath(os.path.dirname(path)) for path in plan.sources}
    own |= {os.path.realpath(path) for path in plan.include_paths}
    headers = {}
    for name in os.listdir(scratch):
        if not name.endswith(".d"):
            continue
        with open(os.path.join(scratch, name), encoding="utf-8") as file:
            text = file.read().partition(": ")[2].replace("\\\n", " ")
        for word in re.findall(r"(?:\\.|[^\s\\])+", text):
            path = os.path.realpath(os.path.join(scratch, re.sub(r"\\(.)", r"\1", word)))
            if any(path.startswith(folder + os.sep) for folder in own):
                headers[path] = _hash_file(path)
    return headers


def _jobs():
    text = os.environ.get("MAX_JOBS")
    if not text:
        return []
    if not text.isdigit() or int(text) == 0:
        raise BuildError(f"the environment variable MAX_JOBS is {text!r}; it must be a number of at least 1.")
    return ["-j", text]


def _build(plan, flags, folder, compiler, ninja, verbose):
    if plan.nvcc:
        warning = cuda_toolkit.check_versions(plan.nvcc, torch.version.cuda)
        if warning:
            logger.warning("%s", warning)
    for name in os.listdir(folder):
        if name.startswith("build-"):  # of a killed process: no other one builds while we hold the lock
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    scratch = os.path.join(folder, f"build-{os.getpid()}")
    os.makedirs(scratch)
    module = plan.name + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")
    with open(os.path.join(scratch, "build.ninja"), "w", encoding="utf-8") as file:
        file.write(_ninja_file(plan, flags, compiler, module))
    logger.info("Compiling the op %s (once) in %s.", plan.name, folder)
    done = subprocess.run(
        [ninja, "-C", scratch, *_jobs(), *(["-v"] if verbose else [])],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip
    if verbose:
        print(done.stdout)
    log = os.path.join(folder, "build.log")
    with open(log, "w", encoding="utf-8") as file:
        file.write(done.stdout)
    if done.returncode != 0:
        shutil.rmtree(scratch, ignore_errors=True)
        raise BuildError(
            f"the op {plan.name} does not compile: {_first_error(done.stdout)}. The compiler's whole output is in "
            f"{log}."
        )
    headers = _own_headers(plan, scratch)
    # By the headers' hashes, because a process that has the module of other headers keeps that file mapped.
    relative = os.path.join(_digest(headers), module)
    target = os.path.join(folder, relative)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.replace(os.path.join(scratch, module), target)
    with open(os.path.join(scratch, "built.json"), "w", encoding="utf-8") as file:
        json.dump({"module": relative, "headers": headers}, file)
    os.replace(os.path.join(scratch, "built.json"), os.path.join(folder, "built.json"))
    shutil.rmtree(scratch, ignore_errors=True)
    return target


def _first_error(output):
    lines = [line for line in output.splitlines() if not line.startswith("collect2:")]  # "ld returned 1", never why
    for pattern in (r": (fatal )?error: |\(\d+\): error", r"undefined reference|cannot find -l", r"\berror\b"):
        for line in lines:
            if re.search(pattern, line):
                return line.strip().rstrip(".")
    return (lines or ["the compiler said nothing"])[-1].strip()
