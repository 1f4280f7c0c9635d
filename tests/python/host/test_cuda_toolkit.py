"""nvcc against torch, TORCH_CUDA_ARCH_LIST, and that CMake asks the same code."""

import os
import subprocess
import sys

import pytest

from deepspeed.host import cuda_toolkit
from deepspeed.host.cuda_toolkit import CUDAMismatchException
from places import PYTHON, ROOT
from processes import write_program
from refusals import refused

FAKE = """#!/bin/sh
case $1 in
  --version) echo "Cuda compilation tools, release {release}, V{release}.12";;
  --list-gpu-arch) printf 'compute_75\\ncompute_80\\ncompute_90\\n';;
  *) {rest};;
esac
"""


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """nvcc(release, rest="exit 1"): a stand-in in $CUDA_HOME/bin."""
    for name in ("CUDACXX", cuda_toolkit.SKIP, cuda_toolkit.ARCHITECTURES):
        monkeypatch.delenv(name, raising=False)

    def make(release, rest="exit 1"):
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
        return write_program(tmp_path / "toolkit" / "bin" / "nvcc", FAKE.format(release=release, rest=rest), "")

    return make


def test_which_nvcc(nvcc, monkeypatch, tmp_path):
    path = nvcc("11.8")
    assert cuda_toolkit.find_nvcc() == path and cuda_toolkit.nvcc_version() == (11, 8)
    other = write_program(tmp_path / "other", FAKE.format(release="12.6", rest=""), "")
    monkeypatch.setenv("CUDACXX", other)
    assert cuda_toolkit.find_nvcc() == other and cuda_toolkit.nvcc_version() == (12, 6)
    assert cuda_toolkit.nvcc_version(str(tmp_path / "none")) is None


def test_versions_against_torch(nvcc, monkeypatch):
    path = nvcc("12.4")
    assert cuda_toolkit.check_versions(path, "12.4") == cuda_toolkit.check_versions(path, None) == ""
    assert cuda_toolkit.check_versions(path, "none") == ""
    warning = cuda_toolkit.check_versions(path, "12.1")
    assert "CUDA 12.4" in warning and "CUDA 12.1" in warning and "Minor versions" in warning
    refused(
        CUDAMismatchException,
        "of CUDA 12.4, but torch was built for CUDA 11.8.*DS_SKIP_CUDA",
        cuda_toolkit.check_versions,
        path,
        "11.8",
    )
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    assert "DS_SKIP_CUDA_CHECK is set, so the build goes on" in cuda_toolkit.check_versions(path, "11.8")
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "0")
    refused(CUDAMismatchException, "", cuda_toolkit.check_versions, path, "11.8")


@pytest.mark.parametrize(
    "text, wanted, cmake",
    [
        ("8.0;9.0+PTX", [("80", False), ("90", True)], "80-real;90"),
        ("8.0 8.6, 9.0a", [("80", False), ("86", False), ("90a", False)], "80-real;86-real;90a-real"),
        ("Ampere;Hopper", [("80", False), ("86", True), ("90", True)], "80-real;86;90"),
        ("8.0;8.0+PTX;10.0", [("80", True), ("100", False)], "80;100-real"),
        ("", [], ""),
    ],
)
def test_architectures(text, wanted, cmake):
    found = cuda_toolkit.parse_architectures(text)
    assert found == wanted and cuda_toolkit.cmake_architectures(found) == cmake
    assert len(cuda_toolkit.gencode_flags(found)) == len(found) + sum(ptx for _, ptx in found)


@pytest.mark.parametrize("text", ["80", "8.0;ninety", "8.0+ptx", "All"])
def test_no_architecture(text):
    refused(ValueError, "TORCH_CUDA_ARCH_LIST is .* not a compute capability", cuda_toolkit.parse_architectures, text)


def test_architecture_that_nvcc_has_dropped(nvcc):
    path = nvcc("13.0")
    cuda_toolkit.check_supported(path, [("80", False), ("90a", False)])
    refused(
        ValueError,
        r"asks for 7.0, which nvcc of CUDA 13.0 .* it knows 7.5, 8.0, 9.0",
        cuda_toolkit.check_supported,
        path,
        [("70", False), ("80", True)],
    )


def test_as_a_program(nvcc, monkeypatch):
    path = nvcc("12.4")

    def configure(torch_cuda):
        command = [sys.executable, "-I", cuda_toolkit.__file__, "configure", path, torch_cuda]
        return subprocess.run(command, capture_output=True, text=True)

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    assert (configure("12.4").stdout, configure("none").returncode) == ("80-real;90\n", 0)
    assert "Minor versions" in configure("12.1").stderr
    wrong = configure("13.0")
    assert wrong.returncode == 1 and "CUDA 12.4" in wrong.stderr and "CUDA 13.0" in wrong.stderr


PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(probe LANGUAGES CXX)
find_package(Python COMPONENTS Interpreter REQUIRED)
set(DS_BUILD_CUDA ON)
set(TORCH_CUDA $ENV{PROBE_TORCH_CUDA})
include(%s/cmake/Cuda.cmake)
message(STATUS "architectures: ${CMAKE_CUDA_ARCHITECTURES}")
"""


@pytest.mark.slow
def test_cmake_refuses_another_major_version(nvcc, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    real = cuda_toolkit.find_nvcc()
    if real is None:
        pytest.skip("there is no nvcc")
    fake = nvcc("12.4", rest=f'exec {real} "$@"')
    (tmp_path / "CMakeLists.txt").write_text(PROJECT % ROOT)
    os.symlink(PYTHON, tmp_path / "python")
    monkeypatch.setenv("CUDACXX", fake)

    def configure(torch_cuda, **env):
        return subprocess.run(
            ["cmake", "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={sys.executable}"],
            env={**os.environ, "PROBE_TORCH_CUDA": torch_cuda, **env}, capture_output=True, text=True,
        )  # fmt: skip

    wrong = configure("11.8")
    text = " ".join(wrong.stderr.split())
    assert wrong.returncode != 0 and "of CUDA 12.4, but torch was built for CUDA 11.8" in text, wrong.stderr
    skipped = configure("11.8", DS_SKIP_CUDA_CHECK="1", TORCH_CUDA_ARCH_LIST="8.0;9.0a")
    assert skipped.returncode == 0 and "architectures: 80-real;90a-real" in skipped.stdout, skipped.stdout
    assert "the build goes on" in " ".join(skipped.stderr.split())
    minor = configure("12.1")
    assert minor.returncode == 0 and "Minor versions" in " ".join(minor.stderr.split())
    assert "architectures: 80-real;90\n" in minor.stdout
