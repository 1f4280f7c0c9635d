"""Options of a build from the environment."""

import importlib.util
import os
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest

from deepspeed.ops.op_table import OPS
from places import ROOT
from processes import succeeded, write_program
from refusals import refused

options = SimpleNamespace(**runpy.run_path(os.path.join(ROOT, "tools", "build_options.py")))
NVCC = "/usr/local/cuda/bin/nvcc"


@pytest.mark.parametrize(
    "commit, env, wanted",
    [
        ("8cd046f", {}, "0.3.13+8cd046f"),
        ("0123456", {}, "0.3.13+g0123456"),
        ("[none]", {}, "0.3.13"),
        ("8cd046f", {"DS_BUILD_STRING": ""}, "0.3.13"),
        ("8cd046f", {"DS_BUILD_STRING": "+cluster7.b"}, "0.3.13+cluster7.b"),
        ("8cd046f", {"DS_BUILD_STRING": ".dev3+x"}, "0.3.13.dev3+x"),
    ],
)
def test_version(commit, env, wanted):
    assert options.full_version("0.3.13", commit, env) == wanted


def test_version_that_is_none():
    words, env = "DS_BUILD_STRING is 'nightly build'.*not a version", {"DS_BUILD_STRING": "nightly build"}
    refused(options.OptionError, words, options.full_version, "0.3.13", "8cd046f", env)


def cuda(nvcc=NVCC, torch_cuda="13.0", **env):
    return options.wants_cuda(OPS, env, nvcc, torch_cuda)


def test_which_kernels():
    assert cuda() and cuda(DS_BUILD_OPS="1") and not cuda(DS_BUILD_OPS="0")
    assert cuda(DS_BUILD_OPS="0", DS_BUILD_FUSED_ADAM="1")
    switches = {row.build_var: "0" for row in OPS if row.api and row.rule and "cuda" in row.devices}
    assert "DS_BUILD_FUSED_ADAM" in switches and not cuda(**switches)
    assert cuda(DS_BUILD_AIO="0", DS_BUILD_SPARSE_ATTN="0", DS_BUILD_UTILS="1", DS_BUILD_CPU_ADAM="1")
    assert cuda(nvcc=None, torch_cuda=None, DS_BUILD_FUSED_ADAM="1")  # its CPU kernels are all that torch can use


@pytest.mark.parametrize(
    "env, text",
    [
        (dict(DS_BUILD_OPS="yes"), "DS_BUILD_OPS is 'yes'; it must be 0 or 1"),
        (dict(DS_BUILD_FUSED_ADAN="1"), "does not exist. Did you mean DS_BUILD_FUSED_ADAM?"),
        (dict(DS_BUILD_FLASH_ATTN="1"), "the op flash_attn, which is not in this build yet"),
        (dict(DS_BUILD_FUSED_ADAM="1", nvcc=None), "fused_adam, whose GPU kernels need nvcc.*of version 13.0"),
    ],
)
def test_what_cannot_be_had(env, text):
    refused(options.OptionError, text, cuda, **env)


def test_flags():
    assert options.cmake_flags({"CFLAGS": "-I/opt/aio ", "CXXFLAGS": "-g", "LDFLAGS": "-L/opt/aio"}) == [
        "-DCMAKE_CXX_FLAGS=-I/opt/aio -g", "-DCMAKE_SHARED_LINKER_FLAGS=-L/opt/aio",
        "-DCMAKE_MODULE_LINKER_FLAGS=-L/opt/aio",
    ]  # fmt: skip
    assert options.cmake_flags({})[0] == "-DCMAKE_CXX_FLAGS="
    assert options.job_flags(None, {"MAX_JOBS": "3"}) == ["-j", "3"] and options.job_flags(8, {}) == ["-j", "8"]
    assert options.job_flags(None, {}) == []
    refused(options.OptionError, "MAX_JOBS is 'all'", options.job_flags, None, {"MAX_JOBS": "all"})


def setup_py(*words, cwd=ROOT, **env):
    return subprocess.run(
        [sys.executable, os.path.join(ROOT, "setup.py"), *words], cwd=cwd, env={**os.environ, **env},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


needs_setuptools = pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="there is no setuptools")


@needs_setuptools
def test_setup_py_uses_them():
    assert setup_py("--version", DS_BUILD_STRING="+x1").stdout.split()[-1].endswith("+x1")
    asked = setup_py("--version", DS_BUILD_STRING="?")
    assert asked.returncode != 0 and "deepspeed is not built: DS_BUILD_STRING is '?'" in asked.stderr


HIDE_TORCH = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
"""


@needs_setuptools
def test_setup_py_hands_them_to_cmake(tmp_path):
    """With stand-ins for cmake and ninja: what they are called with, what goes into the wheel's folder."""
    tools = tmp_path / "bin"
    for name in ("cmake", "ninja"):
        write_program(tools / name, f'for word; do echo "{name}: $word" >>{tmp_path}/calls; done\n')
    path = f"{tools}:{os.environ['PATH']}"
    where = ["build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    (tmp_path / "lib" / "deepspeed").mkdir(parents=True)
    env = dict(PATH=path, DS_BUILD_OPS="0", MAX_JOBS="7", CFLAGS="-DX", DS_BUILD_STRING="+s", DS_ACCELERATOR="cpu")
    succeeded(setup_py(*where, **env))
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "cmake: -DDS_BUILD_CUDA=OFF" in calls and "cmake: -DCMAKE_CXX_FLAGS=-DX" in calls
    assert "ninja: 7" in calls and "ninja: native" in calls
    info = runpy.run_path(str(tmp_path / "lib" / "deepspeed" / "_build_info.py"))
    assert info["version"].endswith("+s") and info["accelerator_name"] == "cpu" and len(info["git_hash"]) >= 6
    assert set(info["torch_info"]) == {"version", "cuda_version", "hip_version", "nccl_version"}
    libraries = os.listdir(tmp_path / "lib" / "deepspeed" / "_lib")
    assert "libds_kernels_cpu.so" in libraries and "libds_kernels_cuda.so" not in libraries
    (tmp_path / "calls").unlink()
    assert setup_py(*where, "-j", "5", PATH=path).returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "cmake: -DDS_BUILD_CUDA=ON" in calls and "ninja: 5" in calls
    # As in pip's isolation: what this Python sees is replaced, and torch is not in it.
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDE_TORCH)
    assert setup_py(*where, PATH=path, PYTHONPATH=str(tmp_path / "hidden")).returncode == 0
    assert info["torch_info"] == runpy.run_path(str(tmp_path / "lib/deepspeed/_build_info.py"))["torch_info"]
    asked = setup_py(*where, PATH=path, DS_BUILD_SPATIAL_INFERENCE="1")
    assert asked.returncode != 0 and "deepspeed is not built: DS_BUILD_SPATIAL_INFERENCE=1" in asked.stderr


@pytest.mark.parametrize("version", ["1.12.1", "1.9.0+cu111", "0.4"])
def test_an_older_torch_is_refused(version):
    refused(options.OptionError, rf"torch 1.13 or newer.*has {version[:3]}", options.check_torch, version)


@pytest.mark.parametrize("version", ["1.13.0a0", "1.13.1", "2.0.1+cu117", "2.3.1", "2.11.0+cpu", "3.0"])
def test_torch_from_1_13_on_is_taken(version):
    options.check_torch(version)


def test_cmake_refuses_an_older_torch(tmp_path):
    python = write_program(tmp_path / "python", 'echo "/torch;1.12.1;none;_GLIBCXX_USE_CXX11_ABI=1"\n')
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.20)\nproject(x LANGUAGES NONE)\nset(Python_EXECUTABLE {python})\n"
        f"include({ROOT}/cmake/Torch.cmake)\n"
    )
    done = subprocess.run(["cmake", "-B", tmp_path / "b", "-S", tmp_path], capture_output=True, text=True)
    text = " ".join(done.stderr.split())
    assert done.returncode != 0 and "deepspeed needs torch 1.13 or newer" in text and "1.12.1" in text, done.stderr
