"""The builders' interface: what a third party's op derives from, and what scripts ask any op.

A builder answers three questions: can the op work here (``is_compatible``), give it to me (``load``), and how would it
be compiled (``sources`` and the argument lists). An op that lies prebuilt at ``absolute_name()`` is imported; only
where there is none is it compiled, once (jit.py).
"""

import importlib
import os
import platform
import re
import subprocess
from abc import ABC, abstractmethod

import torch

from deepspeed._compat import CXX_STANDARD
from deepspeed.host import cuda_toolkit
from deepspeed.host.cpu import widest_isa
from deepspeed.host.cuda_toolkit import CUDAMismatchException, MissingCUDAException
from deepspeed.host.devices import nvidia_compute_capabilities
from deepspeed.host.packages import is_installed
from deepspeed.host.programs import find_program
from deepspeed.log import logger
from deepspeed.ops.op_builder import jit, toolchain
from deepspeed.registry import load_target

__all__ = [
    "CUDAMismatchException",
    "CUDAOpBuilder",
    "MissingCUDAException",
    "OpBuilder",
    "TorchCPUOpBuilder",
    "assert_no_cuda_mismatch",
    "assert_torch_info",
    "get_default_compute_capabilities",
    "installed_cuda_version",
]

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_DEFAULT_ARCHITECTURES = "8.0;9.0+PTX"


def get_default_compute_capabilities():
    """The compute capabilities to compile for where neither TORCH_CUDA_ARCH_LIST nor a GPU says otherwise."""
    return _DEFAULT_ARCHITECTURES


def installed_cuda_version(name=""):
    """``(major, minor)`` of this machine's nvcc; MissingCUDAException, for the op ``name``, where there is none."""
    version = cuda_toolkit.nvcc_version()
    if version is None:
        raise MissingCUDAException(
            f"{f'the op {name} needs' if name else 'this needs'} nvcc, and there is none on this machine. Install the "
            f"CUDA toolkit and set CUDA_HOME to it."
        )
    return version


def assert_no_cuda_mismatch(name=""):
    """True when nvcc fits this torch; a warning for another minor version.

    Raises:
        MissingCUDAException: there is no nvcc.
        CUDAMismatchException: the major versions differ, and DS_SKIP_CUDA_CHECK is not set.
    """
    installed_cuda_version(name)
    warning = cuda_toolkit.check_versions(cuda_toolkit.find_nvcc(), torch.version.cuda)
    if warning:
        logger.warning("%s", warning)
    return True


def assert_torch_info(torch_info):
    """RuntimeError unless the running torch has the version, CUDA and ROCm of the ``torch_info`` of a build."""
    OpBuilder.validate_torch_version(torch_info)
    OpBuilder.validate_torch_op_version(torch_info)


class OpBuilder(ABC):
    """A native op. A subclass gives at least ``absolute_name`` and ``sources``, and usually BUILD_VAR and NAME.

    Attributes: ``name``; ``jit_mode`` (bool: the last ``load`` compiled or took a compiled file from the cache);
    ``error_log`` (text of the last ``warning``, or None).
    """

    BUILD_VAR = None
    NAME = None

    def __init__(self, name):
        self.name = name
        self.jit_mode = False
        self.build_for_cpu = False
        self.enable_bf16 = False
        self.error_log = None

    # ---- what a subclass says ------------------------------------------------------------------------------------
    @abstractmethod
    def absolute_name(self):
        """The dotted name under which a prebuilt op is imported."""

    @abstractmethod
    def sources(self):
        """Source files; relative ones are below the installed package (``deepspeed_src_path``)."""

    def include_paths(self):
        """Folders of headers, relative ones as in ``sources``."""
        return []

    def cxx_args(self):
        """Options of the C++ compiler."""
        return []

    def nvcc_args(self):
        """Options of nvcc."""
        return []

    def libraries_args(self):
        """Names of libraries to link, without ``-l``."""
        return []

    def extra_ldflags(self):
        """Options of the linker."""
        return []

    def is_compatible(self, verbose=False):
        """Whether the op can be used on this machine; with ``verbose`` a warning says why not."""
        return True

    # ---- getting it ----------------------------------------------------------------------------------------------
    def load(self, verbose=False):
        """The op's module: the prebuilt one if there is one for this torch, else compiled or from the cache.

        Raises:
            deepspeed.ops.op_builder.jit.BuildError: it cannot be compiled here; the text says what is missing.
        """
        prebuilt = self._prebuilt()
        if prebuilt is not None:
            self.jit_mode = False
            return prebuilt
        return self.jit_load(verbose)

    def _prebuilt(self):
        name = self.absolute_name()
        if not name or not is_installed(name):
            return None
        try:
            return importlib.import_module(name)
        except ImportError as error:
            logger.warning(
                "The prebuilt op %s (%s) cannot be imported (%s): it is compiled for this torch instead.",
                self.name, name, error,
            )  # fmt: skip
            return None

    def jit_load(self, verbose=True):
        """Compiles the op, or takes it from the cache, and imports it (see jit.py for the rules).

        Raises:
            ValueError: the op cannot work on this machine (``is_compatible``).
            deepspeed.ops.op_builder.jit.BuildError: compiling failed; the text says what is missing.
        """
        if not self.is_compatible(verbose):
            reason = f": {self.error_log}" if self.error_log else ""
            raise ValueError(f"the op {self.name} cannot be compiled on this machine{reason}.")
        self.jit_mode = True
        return jit.build_and_load(self._plan(), verbose=verbose)

    def _plan(self):
        return jit.Plan(
            name=self.name,
            sources=[self.deepspeed_src_path(path) for path in self.sources()],
            include_paths=[self.deepspeed_src_path(path) for path in self.strip_empty_entries(self.include_paths())],
            cxx_args=self.strip_empty_entries(self.cxx_args()),
            ldflags=[
                *self.strip_empty_entries(self.extra_ldflags()),
                *(f"-l{library}" for library in self.libraries_args()),
            ],
        )

    def builder(self):
        """The setuptools extension that a ``setup.py`` of the op's package passes to ``ext_modules``."""
        return self._extension("CppExtension", {"cxx": self.strip_empty_entries(self.cxx_args())})

    def _extension(self, kind, compile_args):
        return load_target(f"torch.utils.cpp_extension:{kind}")(
            name=self.absolute_name(),
            sources=self.strip_empty_entries(self.sources()),
            include_dirs=self.strip_empty_entries(self.include_paths()),
            libraries=self.strip_empty_entries(self.libraries_args()),
            extra_compile_args=compile_args,
            extra_link_args=self.strip_empty_entries(self.extra_ldflags()),
        )

    def hipify_extension(self):  # noqa: B027
        """Translates CUDA sources for ROCm; a hook that does nothing here."""

    def sycl_extension(self):  # noqa: B027
        """Translates CUDA sources for SYCL; a hook that does nothing here."""

    # ---- questions about torch -----------------------------------------------------------------------------------
    @staticmethod
    def validate_torch_version(torch_info):
        """RuntimeError when the running torch is not of the version ``torch_info["version"]`` ("2.1") of a build."""
        here = ".".join(torch.__version__.split(".")[:2])
        if torch_info["version"] != here:
            raise RuntimeError(
                f"these ops were compiled for torch {torch_info['version']}, but this process runs torch {here}. "
                f"Reinstall them in this environment, or install that torch."
            )

    @staticmethod
    def validate_torch_op_version(torch_info):
        """RuntimeError when the running torch has another CUDA or ROCm version than ``torch_info`` of a build."""
        for key, label, have in (
            ("cuda_version", "CUDA", torch.version.cuda),
            ("hip_version", "ROCm", getattr(torch.version, "hip", None)),
        ):
            want = torch_info.get(key, "0.0")
            here = ".".join(have.split(".")[:2]) if have else "0.0"
            if want != "0.0" and want != here:
                raise RuntimeError(
                    f"these ops were compiled with {label} {want}, but this torch has "
                    f"{f'{label} {here}' if have else f'no {label}'}. Reinstall them in this environment."
                )

    @staticmethod
    def is_rocm_pytorch():
        """True for a torch that was built for AMD GPUs."""
        return getattr(torch.version, "hip", None) is not None

    @staticmethod
    def is_sycl_enabled():
        """True for a torch that can use Intel GPUs."""
        return hasattr(torch, "xpu") and torch.xpu.is_available()

    @staticmethod
    def installed_rocm_version():
        """``(major, minor)`` of torch's ROCm; (0, 0) without one."""
        version = getattr(torch.version, "hip", None)
        return tuple(int(part) for part in version.split(".")[:2]) if version else (0, 0)

    @staticmethod
    def get_rocm_gpu_arch():
        """Name of the first AMD GPU (``gfx90a``), "" without one."""
        return _rocminfo(r"(?<!\S)(gfx\S*)")

    @staticmethod
    def get_rocm_wavefront_size():
        """Threads per wavefront of the first AMD GPU as text; "32" without one."""
        return _rocminfo(r"Wavefront Size:\s+(\d+)") or "32"

    # ---- questions about the machine -----------------------------------------------------------------------------
    def has_function(self, funcname, libraries, library_dirs=None, verbose=False):
        """Whether a C program that calls ``funcname`` links against ``libraries`` (names without ``lib``)."""
        return toolchain.links(funcname, libraries, library_dirs or (), verbose)

    def command_exists(self, cmd):
        """Whether a program is on PATH; a list means: any of them."""
        names = cmd if isinstance(cmd, (list, tuple)) else [cmd]
        found = any(find_program(name) for name in names)
        if not found:
            self.warning(f"{self.name} needs the program {' or '.join(names)}, which is not on PATH")
        return found

    def cpu_arch(self):
        """The compiler's option for this CPU."""
        return "-mcpu=native" if platform.machine().startswith(("ppc", "aarch64")) else "-march=native"

    def simd_width(self):
        """The macro that tells sources of the ``-D__AVX512__`` tradition how wide this CPU's vectors are."""
        isa = widest_isa()
        return "-D__AVX512__" if isa.startswith("avx512") else "-D__AVX256__" if isa == "avx2" else "-D__SCALAR__"

    def get_cuda_compile_flag(self):
        """``-D__ENABLE_CUDA__`` where CUDA sources can be compiled for this torch, else ``-D__DISABLE_CUDA__``."""
        usable = torch.version.cuda is not None and cuda_toolkit.find_nvcc() is not None
        return "-D__ENABLE_CUDA__" if usable else "-D__DISABLE_CUDA__"

    # ---- small things --------------------------------------------------------------------------------------------
    def strip_empty_entries(self, args):
        """The list without empty texts, which compilers take for file names."""
        return [arg for arg in args if len(arg) > 0]

    def deepspeed_src_path(self, code_path):
        """``code_path`` itself if absolute, else below the installed package."""
        return code_path if os.path.isabs(code_path) else os.path.join(PACKAGE, code_path)

    def warning(self, msg):
        """Prints ``[WARNING]`` and the text, and keeps it in ``error_log``."""
        self.error_log = f"{msg}"
        print(f"[WARNING] {msg}")


class CUDAOpBuilder(OpBuilder):
    """An op whose sources may hold .cu files. With a torch without CUDA only its C++ files are compiled."""

    def __init__(self, name):
        super().__init__(name)
        self.build_for_cpu = torch.version.cuda is None

    def compute_capability_args(self, cross_compile_archs=None):
        """nvcc's ``-gencode`` options: TORCH_CUDA_ARCH_LIST, else this machine's GPUs, else ``cross_compile_archs``
        (or the defaults), after ``filter_ccs``."""
        text = os.environ.get(cuda_toolkit.ARCHITECTURES) or ";".join(nvidia_compute_capabilities())
        wanted = cuda_toolkit.parse_architectures(text or cross_compile_archs or get_default_compute_capabilities())
        dotted = [[number[:-1], number[-1] + ("+PTX" if ptx else "")] if number[-1].isdigit() else
                  [number[:-2], number[-2:] + ("+PTX" if ptx else "")] for number, ptx in wanted]  # fmt: skip
        kept = self.filter_ccs(dotted)
        if not kept:
            raise RuntimeError(
                f"the op {self.name} has no code for compute capability {text}: it cannot be used on this GPU."
            )
        kept = cuda_toolkit.parse_architectures(";".join(".".join(pair) for pair in kept))
        self.enable_bf16 = all(int(number.rstrip("af")) >= 80 for number, _ in kept)
        return cuda_toolkit.gencode_flags(kept)

    def filter_ccs(self, ccs):
        """Takes out compute capabilities ([["8", "0"], ["9", "0+PTX"]]) that the op has no code for."""
        return ccs

    def cuda_capability_major(self):
        """Major compute capability of the first GPU; 0 without one."""
        found = nvidia_compute_capabilities()
        return int(found[0].split(".")[0]) if found else 0

    def version_dependent_macros(self):
        """Macros that tell sources written for old torches that this one is newer."""
        return ["-DVERSION_GE_1_1", "-DVERSION_GE_1_3", "-DVERSION_GE_1_5"]

    def cxx_args(self):
        return ["-O3", f"-std=c++{CXX_STANDARD}", "-g0", "-Wno-reorder"]

    def nvcc_args(self):
        fast = ["-O3", f"-std=c++{CXX_STANDARD}", "--use_fast_math"]
        return [] if self.build_for_cpu else [*fast, *self.compute_capability_args()]

    def libraries_args(self):
        return [] if self.build_for_cpu else ["cudart"]

    def _plan(self):
        plan = super()._plan()
        has_kernels = any(path.endswith(".cu") for path in plan.sources)
        nvcc = cuda_toolkit.find_nvcc() if has_kernels or not self.build_for_cpu else None
        if nvcc is None and has_kernels:
            raise MissingCUDAException(
                f"the op {self.name} has CUDA sources, and there is no nvcc on this machine. Install the CUDA toolkit "
                f"of torch's version ({torch.version.cuda or 'this torch has none'}) and set CUDA_HOME to it."
            )
        if nvcc is None:
            plan.ldflags = [flag for flag in plan.ldflags if flag != "-lcudart"]
            return plan
        plan.nvcc = nvcc
        plan.nvcc_args = self.strip_empty_entries(self.nvcc_args()) if has_kernels else []
        return plan

    def builder(self):
        if self.build_for_cpu:
            return super().builder()
        flags = {"cxx": self.cxx_args(), "nvcc": self.nvcc_args()}
        return self._extension(
            "CUDAExtension", {name: self.strip_empty_entries(words) for name, words in flags.items()}
        )


class TorchCPUOpBuilder(CUDAOpBuilder):
    """An op for the CPU, compiled for this very CPU and, where torch has CUDA, allowed to use CUDA's headers."""

    def cxx_args(self):
        return ["-O3", f"-std=c++{CXX_STANDARD}", "-g0", "-Wno-reorder", "-fopenmp", self.cpu_arch(), self.simd_width(),
                self.get_cuda_compile_flag()]  # fmt: skip


def _rocminfo(pattern):
    """The first group of ``pattern`` in what rocminfo prints; "" where it is not there."""
    if find_program("rocminfo") is None:
        return ""
    text = subprocess.run(["rocminfo"], capture_output=True, text=True, timeout=30, check=False).stdout
    found = re.search(pattern, text)
    return found.group(1) if found else ""
