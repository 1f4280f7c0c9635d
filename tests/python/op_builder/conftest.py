"""A tiny op of a third party, a cache folder of its own, and a compiler that counts its calls."""

import os
import shutil

import pytest

from deepspeed.ops.op_builder import OpBuilder, jit
from processes import write_program

# No torch headers: they take 13 seconds, and it is not torch that is tested.
OP = """
#include <Python.h>
#include "answer.h"
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "toy", nullptr, -1, methods};
#define INIT_(name) PyInit_##name
#define INIT(name) INIT_(name)
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


class ToyBuilder(OpBuilder):
    """The builder that another package writes."""

    BUILD_VAR = "DS_BUILD_TOY"
    NAME = "toy"

    def __init__(self, folder, args=(), ldflags=()):
        super().__init__(self.NAME)
        self.folder, self.args, self.ldflags = folder, args, ldflags

    def absolute_name(self):
        return "somebody.else.toy_op"

    def sources(self):
        return [os.path.join(self.folder, "toy.cpp")]

    def include_paths(self):
        return ["", os.path.join(self.folder, "include")]

    def cxx_args(self):
        return ["", *self.args]

    def extra_ldflags(self):
        return list(self.ldflags)


class Toy:
    """The op's folder, and how often its compiler was called."""

    def __init__(self, folder):
        self.folder = str(folder)
        (folder / "include").mkdir(parents=True)
        self.source, self.header = folder / "toy.cpp", folder / "include" / "answer.h"
        self.source.write_text(OP)
        self.header.write_text("#define ANSWER 42\n")
        self.calls_file = folder / "calls"
        self.compiler = folder / "count c++"  # with a space: commands must be quoted
        counts = f"echo call >>'{self.calls_file}'\nexec {shutil.which('c++')} \"$@\"\n"
        write_program(self.compiler, counts, "#!/bin/bash\n")

    def calls(self):
        return len(self.calls_file.read_text().splitlines()) if self.calls_file.exists() else 0

    def builder(self, **more):
        return ToyBuilder(self.folder, **more)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    made = Toy(tmp_path / "toy op")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", f"'{made.compiler}'")
    for name in ("CFLAGS", "CXXFLAGS", "LDFLAGS", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jit, "_loaded", {})
    return made
