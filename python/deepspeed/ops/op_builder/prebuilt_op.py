"""Builders for the ops that this package contains. The libraries of the package hold them; nothing is compiled."""

import importlib
import os

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.host.devices import nvidia_device_count
from deepspeed.host.libraries import find_header, find_library, missing_libraries
from deepspeed.log import logger
from deepspeed.ops.op_builder import builder as interface
from deepspeed.ops.op_table import LIBRARIES, NOT_IMPLEMENTED, SOURCES
from deepspeed.registry import load_target

_HERE = os.path.dirname(os.path.abspath(__file__))
_LIB_DIR = os.path.join(interface.PACKAGE, "_lib")


def native_module():
    """``(the extension module or None, why not)``."""
    try:
        return load_target("deepspeed._native:_C"), ""
    except ImportError as error:
        return None, str(error)


class PrebuiltOp:
    """The behaviour of a builder for a row of the table, ``ROW``. It is a base before a class of builder.py."""

    ROW = NOT_IMPLEMENTED
    NAME = NOT_IMPLEMENTED.name
    BUILD_VAR = NOT_IMPLEMENTED.build_var

    def __init__(self, name=None):
        super().__init__(name=name or self.NAME)

    # ---- can it work here ----------------------------------------------------------------------------------------
    def device(self):
        """The kind of device it would run on in this process: the accelerator's where it has kernels for that."""
        accelerator = get_accelerator()._name
        return accelerator if accelerator in self.ROW.devices else self.ROW.devices[0]

    def why_not(self):
        """An empty text when ``load`` gives something that works here, else the reason in a few words."""
        missing = self.missing()
        if missing:
            return missing
        device = self.device()
        if device not in ("cpu", get_accelerator()._name):
            return "needs an NVIDIA GPU" + ("" if nvidia_device_count() else ", and there is none on this machine")
        if self.ROW.rule is None:
            return ""
        native, _ = native_module()
        return native.kernel_info(device)["error"] or ""

    def missing(self):
        """An empty text when the op is in this installation, else what is not there."""
        if self.ROW is NOT_IMPLEMENTED:
            return f"there is no such op for {get_accelerator().device_name()}"
        if self.ROW.api is None:
            return "not in this build yet"
        if self.ROW.rule is None and not self.ROW.native:
            return ""
        native, why_not = native_module()
        if native is None:
            return why_not
        has_rule = load_target("deepspeed.ops.op_builder.prebuilt.stepper:has_rule")
        if self.ROW.rule is not None and not has_rule(self.ROW.rule):
            return f"not in this build yet (the native module has no optimizer {self.ROW.rule!r})"
        return ""

    def is_installed(self):
        """Whether the op lies in this installation, for at least one kind of device."""
        return not self.missing()

    def is_compatible(self, verbose=False):
        reason = self.why_not()
        if reason and verbose:
            self.warning(f"{self.name}: {reason}")
        return not reason

    # ---- getting it ----------------------------------------------------------------------------------------------
    def load(self, verbose=False):
        """The module with the op's functions.

        Raises:
            ValueError: it is not in this installation, or does not work on this machine; the text says why.
        """
        reason = self.why_not()
        if reason:
            raise ValueError(f"the op {self.name} cannot be used here: {reason}. `ds_report` lists all ops.")
        self.jit_mode = False
        module = importlib.import_module(self.absolute_name())
        if verbose:
            logger.info("The op %s is prebuilt: %s.", self.name, ", ".join(self.libraries()) or "part of torch")
        return module

    def jit_load(self, verbose=True):
        """``load``: there is nothing to compile, and what is not here cannot be compiled here either."""
        return self.load(verbose)

    def builder(self):
        """The setuptools extension that holds the op: the one of the whole package, which setup.py builds."""
        return load_target("setuptools:Extension")("deepspeed._C", sources=[])

    # ---- where it is ---------------------------------------------------------------------------------------------
    def absolute_name(self):
        """The module that ``load`` returns."""
        return f"deepspeed.ops.op_builder.prebuilt.{self.ROW.api or self.ROW.name}"

    def libraries(self):
        """Names of the libraries in ``deepspeed/_lib`` that hold the op's kernels here."""
        found = [LIBRARIES[device] for device in self.ROW.devices] if self.ROW.rule else []
        return [name for name in found if os.path.exists(os.path.join(_LIB_DIR, name))]

    def sources(self):
        """The kernels' files in the source tree of deepspeed, relative to its top (they are not in a wheel)."""
        endings = {"ref": "cpp", **{kind: SOURCES[kind] for kind in ("cpu", *self.ROW.devices)}}
        return [f"csrc/kernels/{kind}/{name}.{end}" for name in self.ROW.kernels for kind, end in endings.items()]

    def include_paths(self):
        """The folder of the kernels' headers in the source tree."""
        return ["csrc"] if self.ROW.kernels else []

    def cxx_args(self):
        """None: the libraries are compiled by CMakeLists.txt, with its flags."""
        return []

    nvcc_args = libraries_args = extra_ldflags = cxx_args


class SystemLibraries:
    """For ops on libraries of the system: says what to install. ``lib_sources`` and ``check_for_libaio_pkg`` are
    names that scripts know."""

    def lib_sources(self):
        return self.sources()

    def check_for_libaio_pkg(self):
        """Whether libaio's header and library are found, by CFLAGS and LDFLAGS or in the usual folders."""
        return bool(find_header("libaio.h") and find_library("aio"))

    def is_compatible(self, verbose=False):
        if verbose:
            for text in missing_libraries(self.NAME, self.ROW.system):
                self.warning(text)
        return super().is_compatible(verbose)


class GPUDirect:
    """For the op on NVIDIA's cuFile, which is opened at run time."""

    def why_not(self):
        return super().why_not() or native_module()[0].aio.gds_error()


class EvoformerSwitches:
    """Names of environment variables about CUTLASS, which the op is built on; CUTLASS_PATH says where it is."""

    CUTLASS_IGNORE = "DS_IGNORE_CUTLASS_DETECTION"
    CUTLASS_PYTHON_BINDINGS = "DS_USE_CUTLASS_PYTHON_BINDINGS"

    def include_paths(self):
        path = os.environ.get("CUTLASS_PATH")
        folders = [os.path.join(path, "include"), os.path.join(path, "tools", "util", "include")] if path else []
        return [*super().include_paths(), *folders]


class FloatFormats:
    """Facts about the small floats of the fp_quantizer."""

    # bits -> (exponent bits, mantissa bits); every code is a number, none stands for inf or nan
    _FORMATS = {4: (2, 1), 6: (3, 2), 8: (4, 3), 12: (4, 7)}

    @staticmethod
    def get_default_quant_dtype():
        """dtype of the tensors that hold quantized values."""
        return torch.uint8

    @staticmethod
    def get_quant_range(q_bits=None):
        """The largest number of ``q_bits`` bits: 6 for 4, 28 for 6, 480 for 8, 510 for 12; ValueError for others."""
        if q_bits not in FloatFormats._FORMATS:
            raise ValueError(f"q_bits is {q_bits}; small floats have 4, 6, 8 or 12 bits.")
        exponent, mantissa = FloatFormats._FORMATS[q_bits]
        return 2.0 ** (2 ** (exponent - 1)) * (2 - 2.0**-mantissa)


class RaggedPrefix:
    """The folder in which sources of ragged ops would be."""

    def get_prefix(self):
        return "deepspeed" if os.path.isdir(self.deepspeed_src_path("deepspeed")) else ".."


_EXTRAS = {
    "AsyncIOBuilder": (SystemLibraries,),
    "EvoformerAttnBuilder": (EvoformerSwitches,),
    "GDSBuilder": (GPUDirect,),
    "FPQuantizerBuilder": (FloatFormats,),
    "RaggedUtilsBuilder": (RaggedPrefix,),
}


def make_builders(rows):
    """{class name: builder class} for rows of the table; a row's parent may be a row before it."""
    made = {}
    for row in rows:
        parent = made.get(row.base) or getattr(interface, row.base)
        mixins = () if row.base in made else (PrebuiltOp,)
        members = {
            "ROW": row,
            "NAME": row.name,
            "BUILD_VAR": row.build_var,
            "__doc__": f"The op ``{row.name}``: {row.what}.",
            "__module__": __package__,
        }
        if not row.takes_name:
            members["__init__"] = _init_without_name
        made[row.class_name] = type(row.class_name, (*_EXTRAS.get(row.class_name, ()), *mixins, parent), members)
    return made


def _init_without_name(self):
    PrebuiltOp.__init__(self)
