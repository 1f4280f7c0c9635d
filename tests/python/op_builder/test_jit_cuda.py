"""Ops with CUDA sources: found toolkit, matching versions, compute capabilities. None of this needs a GPU."""

import os
import pathlib

import pytest
import torch

from deepspeed.host import cuda_toolkit
from deepspeed.ops.op_builder.builder import CUDAMismatchException, CUDAOpBuilder, MissingCUDAException
from processes import write_program
from refusals import refused

KERNEL = """
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }
int launch() { twice<<<1, 1>>>(nullptr); return static_cast<int>(cudaGetLastError()); }
"""


class CudaToy(CUDAOpBuilder):
    """C++ and CUDA in one op."""

    def __init__(self, toy, kernels=True):
        super().__init__("toy")
        self.folder, self.kernels = toy.folder, kernels

    def absolute_name(self):
        return "somebody.else.toy_op"

    def sources(self):
        return [os.path.join(self.folder, name) for name in (["toy.cpp", "toy.cu"] if self.kernels else ["toy.cpp"])]

    def include_paths(self):
        return [os.path.join(self.folder, "include")]


@pytest.fixture
def cuda_toy(toy, monkeypatch):
    toy.header.write_text("int launch();\n#define ANSWER (launch() >= 0 ? 42 : 0)\n")
    pathlib.Path(toy.folder, "toy.cu").write_text(KERNEL)
    monkeypatch.delenv(cuda_toolkit.SKIP, raising=False)
    monkeypatch.setenv(cuda_toolkit.ARCHITECTURES, "9.0+PTX")
    return toy


def fake_nvcc(folder, release):
    says = f'echo "Cuda compilation tools, release {release}, V{release}.1"\nexit 1\n'
    return write_program(os.path.join(folder, "nvcc"), says)


def test_another_major_version_is_refused(cuda_toy, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    monkeypatch.setenv("CUDACXX", fake_nvcc(cuda_toy.folder, "12.4"))
    refused(CUDAMismatchException, r"CUDA 12.4, but torch was built for CUDA 11.8", CudaToy(cuda_toy).load)
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    with pytest.raises(RuntimeError, match="toy does not compile"):  # the stand-in compiles nothing
        CudaToy(cuda_toy).load()


def test_without_nvcc(cuda_toy, monkeypatch):
    monkeypatch.setattr(cuda_toolkit, "find_nvcc", lambda: None)
    refused(MissingCUDAException, "the op toy has CUDA sources, and there is no nvcc", CudaToy(cuda_toy).load)
    cuda_toy.header.write_text("#define ANSWER 42\n")
    assert CudaToy(cuda_toy, kernels=False).load().answer() == 42


def test_bad_architecture(cuda_toy, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(cuda_toolkit.ARCHITECTURES, "nine")
    monkeypatch.setenv("CUDACXX", fake_nvcc(cuda_toy.folder, "13.0"))
    refused(ValueError, "TORCH_CUDA_ARCH_LIST is 'nine'", CudaToy(cuda_toy).load)


@pytest.mark.skipif(cuda_toolkit.find_nvcc() is None, reason="there is no nvcc")
def test_a_kernel_is_compiled_and_imported(cuda_toy, monkeypatch):
    monkeypatch.delenv("CUDACXX", raising=False)
    op = CudaToy(cuda_toy).load()
    assert op.answer() == 42
    calls = cuda_toy.calls()
    assert CudaToy(cuda_toy).load() is op and cuda_toy.calls() == calls
