"""Compiling another package's op: once, in the right place, and with a clear word when it cannot be."""

import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch

from deepspeed.ops.op_builder import OpBuilder, jit
from deepspeed.ops.op_builder import builder as interface
from deepspeed.ops.op_builder.toolchain import BuildError
from places import PYTHON, ROOT
from refusals import refused
from sampling import every_case


def forget():
    """As a new process would begin."""
    jit._loaded.clear()


def folders():
    """Folders of builds in the cache."""
    return [folder for folder, _, files in os.walk(jit.cache_root()) if "lock" in files]


def test_first_use_compiles_and_second_does_not(toy):
    op = toy.builder().load()
    assert op.answer() == 42 and toy.calls() == 2  # a compilation and a link
    assert toy.builder().load() is op
    forget()
    builder = toy.builder()
    assert builder.load().answer() == 42 and toy.calls() == 2 and builder.jit_mode
    assert op.__file__.startswith(os.environ["TORCH_EXTENSIONS_DIR"]) and torch.__version__ in op.__file__


def test_sources_below_the_installed_package(toy, tmp_path, monkeypatch):
    """A package of an accelerator may copy its sources there; their paths are relative."""
    monkeypatch.setattr(interface, "PACKAGE", str(tmp_path))
    builder = toy.builder()
    builder.sources, builder.include_paths = lambda: ["toy op/toy.cpp"], lambda: ["toy op/include"]
    assert builder.load().answer() == 42


def test_in_another_process_neither(toy):
    toy.builder().load()
    assert answers(toy, 1) == ["42"] and toy.calls() == 2


PROGRAM = "from conftest import ToyBuilder; import sys; print(ToyBuilder(sys.argv[1]).load().answer())"


def start(toy, **env):
    path = os.pathsep.join([PYTHON, os.path.dirname(os.path.abspath(__file__)), os.path.join(ROOT, "tests")])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, toy.folder], env={**os.environ, "PYTHONPATH": path, **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def answers(toy, count):
    running = [start(toy) for _ in range(count)]
    outputs = [process.communicate(timeout=120) for process in running]
    assert all(process.returncode == 0 for process in running), outputs
    return [output[0].split()[-1] for output in outputs]


@pytest.mark.slow
def test_processes_at_once_build_once(toy):
    slow(toy)
    assert answers(toy, 3) == ["42"] * 3 and toy.calls() == 2


def slow(toy):
    """The compiler takes a second, so that the processes meet."""
    toy.compiler.write_text(toy.compiler.read_text().replace("exec", "sleep 1; exec"))


@pytest.mark.slow
def test_a_killed_builder_does_not_block(toy):
    slow(toy)
    killed = start(toy)
    while not toy.calls():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert folders() and not any("built.json" in os.listdir(folder) for folder in folders())
    assert toy.builder().load().answer() == 42
    assert [name for name in os.listdir(folders()[0]) if name.startswith("build-")] == []  # its rubbish is gone


@pytest.mark.slow
def test_a_process_waits_for_the_one_that_builds(toy, capsys):
    toy.builder().load()
    (folder,) = folders()
    os.remove(os.path.join(folder, "built.json"))
    with open(os.path.join(folder, "lock"), "a+", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = start(toy)
        limit = threading.Timer(60, waiting.kill)
        limit.start()
        said = []
        while not said or (said[-1] and "Waiting for process" not in said[-1]):
            said.append(waiting.stdout.readline())
        limit.cancel()
        assert "Waiting for process" in said[-1], said
        refused(subprocess.TimeoutExpired, "", waiting.wait, timeout=0.5)
    out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, (said, out, err)


OTHERS = [pytest.param(name, marks=pytest.mark.every("a compilation as for flags")) for name in ("CXXFLAGS", "LDFLAGS")]


@pytest.mark.parametrize("change", ["source", "header", "flags", *OTHERS, "compiler"])
def test_a_change_compiles_again(toy, change, monkeypatch):
    toy.builder().load()
    more = {}
    if change == "source":
        toy.source.write_text(toy.source.read_text().replace("(ANSWER)", "(ANSWER + 1)"))
    elif change == "header":
        toy.header.write_text("#define ANSWER 43\n")
    elif change == "flags":
        more["args"] = ["-DTWICE"]
    elif change == "compiler":
        os.utime(toy.compiler, (1, 1))
    else:
        monkeypatch.setenv(change, "-g0" if change == "CXXFLAGS" else "-Wl,-z,now")
    forget()
    assert toy.builder(**more).load().answer() == (43 if change in ("source", "header") else 42) and toy.calls() == 4
    forget()
    toy.builder(**more).load()
    assert toy.calls() == 4


def test_the_old_build_is_still_there(toy):
    before = toy.source.read_text()
    for more in ("", "// changed\n", ""):
        toy.source.write_text(before + more)
        forget()
        toy.builder().load()
    assert toy.calls() == 4


def test_half_a_build_is_no_build(toy):
    toy.builder().load()
    pathlib.Path(folders()[0], "built.json").write_text('{"module": ')
    forget()
    assert toy.builder().load().answer() == 42 and toy.calls() == 4


def test_headers_of_the_op_are_remembered_and_no_others(toy):
    toy.builder().load()
    headers = json.loads(pathlib.Path(folders()[0], "built.json").read_text())["headers"]
    assert sorted(map(os.path.basename, headers)) == ["answer.h", "toy.cpp"]


def test_without_a_compiler(toy, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    words = r"no C\+\+ compiler on PATH \(looked for c\+\+, g\+\+, clang\+\+\).*apt-get"
    refused(BuildError, words, toy.builder().load)
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused(BuildError, "looked for no-such-compiler", toy.builder().load)


def test_what_another_machine_compiled_needs_no_compiler(toy, monkeypatch, tmp_path):
    toy.builder().load()
    forget()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toy.builder().load().answer() == 42


def test_without_ninja(toy, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    refused(BuildError, "there is no ninja.*pip install ninja.*apt-get install ninja-build", toy.builder().load)


def test_without_headers(toy, monkeypatch, tmp_path):
    monkeypatch.setattr(jit.toolchain, "TORCH", str(tmp_path))
    refused(BuildError, "torch's headers are missing.*libtorch-dev", toy.builder().load)


def test_compile_error_names_the_first_error_and_the_log(toy):
    toy.source.write_text("int f() { return undeclared; }\nint g() { return second; }\n")
    text = str(refused(BuildError, "", toy.builder().load))
    assert "toy.cpp:1:" in text and "undeclared" in text and "second" not in text and "\n" not in text
    assert "second" in pathlib.Path(text.rsplit(" is in ", 1)[1].rstrip(".")).read_text()
    toy.source.write_text(toy.source.read_text().replace("undeclared", "1").replace("second", "2"))
    refused(BuildError, "cannot be imported.*PyInit_toy", toy.builder().load)


def test_link_error(toy):
    refused(BuildError, "does not compile: .*cannot find -lnosuchthing", toy.builder(ldflags=["-lnosuchthing"]).load)


def test_a_source_that_is_not_there(toy):
    toy.source.unlink()
    refused(BuildError, "a source that is not there: .*toy.cpp", toy.builder().load)


def test_a_folder_that_cannot_be_written(toy, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "below"))
    refused(BuildError, "cannot be made.*TORCH_EXTENSIONS_DIR", toy.builder().load)


def test_a_file_system_without_locks(toy, monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(37, "No locks available")))
    monkeypatch.setattr(jit.logger, "propagate", True)
    assert toy.builder().load().answer() == 42
    assert "cannot be locked (No locks available)" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")
@pytest.mark.parametrize("what", ["folder", "module", "link"])
def test_what_another_user_put_there_is_not_loaded(toy, what):
    module = pathlib.Path(toy.builder().load().__file__)
    forget()
    if what == "link":
        other = module.with_name("other.so")
        module.rename(other)
        module.symlink_to(other)
    os.chown(module if what != "folder" else module.parent.parent, 12345, -1, follow_symlinks=False)
    words = r"not loaded from the cache of compiled ops, because .* belongs to user 12345.*TORCH_EXTENSIONS_DIR"
    refused(BuildError, words, toy.builder().load)


def test_others_may_not_write_into_the_cache(toy):
    module = pathlib.Path(toy.builder().load().__file__)
    forget()
    for path in (module, module.parent, module.parent.parent):
        path.chmod(path.stat().st_mode | 0o022)
    assert toy.builder().load().answer() == 42 and not module.stat().st_mode & 0o022
    assert not module.parent.parent.stat().st_mode & 0o022


def test_max_jobs(toy, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "many")
    refused(BuildError, "MAX_JOBS is 'many'", toy.builder().load)
    monkeypatch.setenv("MAX_JOBS", "1")
    assert toy.builder().load().answer() == 42


def test_default_place(monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}"
    assert jit.cache_root() == f"/home/somebody/.cache/torch_extensions/{tag}"


def test_prebuilt_goes_first(toy, monkeypatch, tmp_path):
    package = tmp_path / "site" / "somebody" / "else"
    package.mkdir(parents=True)
    (package / "toy_op.py").write_text("def answer():\n    return 'prebuilt'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    builder = toy.builder()
    assert builder.load().answer() == "prebuilt" and not builder.jit_mode and toy.calls() == 0
    # One of another torch does not import: compiled instead.
    sys.modules.pop("somebody.else.toy_op")
    (package / "toy_op.py").write_text("raise ImportError('undefined symbol')\n")
    assert toy.builder().load().answer() == 42
    for name in ("somebody.else.toy_op", "somebody.else", "somebody"):
        sys.modules.pop(name, None)


def test_incompatible_op_is_not_compiled(toy):
    class Picky(type(toy.builder())):
        def is_compatible(self, verbose=False):
            if verbose:
                self.warning("toy needs a warp drive")
            return False

    words = "toy cannot be compiled on this machine: toy needs a warp drive"
    refused(ValueError, words, Picky(toy.folder).load, verbose=True)
    assert toy.calls() == 0


# torch/extension.h holds all of torch and takes a compiler 13 seconds; these two are what the op needs of it.
HEADERS = "torch/extension.h" if every_case() else "ATen/core/Tensor.h>\n#include <torch/csrc/utils/pybind.h"
TORCH_OP = f"""
#include <{HEADERS}>
at::Tensor twice(const at::Tensor& t) {{ return t.mul(2); }}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ m.def("twice", &twice); }}
"""


@pytest.mark.slow
def test_an_op_on_torch_tensors(toy):
    """torch's headers, its pybind11 and its ABI: a tensor goes in and comes out."""
    toy.source.write_text(TORCH_OP)
    assert torch.equal(toy.builder(args=["-O0"]).load().twice(torch.arange(3)), torch.tensor([0, 2, 4]))


def test_the_builder_is_abstract():
    refused(TypeError, "", OpBuilder, "nothing")
