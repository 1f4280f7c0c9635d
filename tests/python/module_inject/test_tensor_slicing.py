"""Slices of whole weights and biases in the parameters of one rank."""

import pytest
import torch

from deepspeed.module_inject import ReplaceWithTensorSlicing, tensor_slicing
from refusals import refused


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """A group of these tests is this rank's number; without a group the process is rank 5 of all."""
    monkeypatch.setattr(tensor_slicing.dist, "get_rank", lambda group=None: 5 if group is None else group)


def source(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def of_ranks(ranks, dst_shape, call, **dims):
    """Results of ``call(slicing, dst)``, one for each rank; each is in the memory of its destination."""
    results = []
    for rank in range(ranks):
        dst = torch.full(dst_shape, -1.0)
        result = call(ReplaceWithTensorSlicing(rank, ranks, **dims), dst)
        assert isinstance(result, torch.nn.Parameter) and not result.requires_grad
        assert result.data_ptr() == dst.data_ptr()
        results.append(result.data)
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("out_first", [False, True])
@pytest.mark.parametrize("cut", ["outputs", "inputs"])
def test_ranks_have_runs_of_a_weight(ranks, int8, out_first, cut):
    inputs, outputs = 6, 12
    src = source(outputs, inputs) if int8 else source(inputs, outputs)
    mine = {"inputs": inputs, "outputs": outputs}
    mine[cut] //= ranks
    shape = (mine["outputs"], mine["inputs"]) if out_first else (mine["inputs"], mine["outputs"])
    dims = {"out_dim": 0, "in_dim": 1} if out_first else {}
    results = of_ranks(ranks, shape, lambda slicing, dst: slicing.copy(dst, src, int8=int8), **dims)
    assert torch.equal(torch.cat(results, dim=int((cut == "outputs") != int8)), src)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("int8", [False, True])
def test_parts_are_sliced_by_themselves(ranks, splits, int8):
    width = 4 * splits
    src = source(width, 5) if int8 else source(5, width)
    shape = (width // ranks, 5) if int8 else (5, width // ranks)
    dims = {"out_dim": 0, "in_dim": 1} if int8 else {}
    results = of_ranks(ranks, shape, lambda slicing, dst: slicing.strided_copy(dst, src, splits, int8), **dims)
    dim = 0 if int8 else 1
    for rank, result in enumerate(results):
        wanted = [part.chunk(ranks, dim)[rank] for part in src.chunk(splits, dim)]
        assert torch.equal(result, torch.cat(wanted, dim))


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_biases_are_sliced(ranks, splits):
    src = source(12)

    def call(slicing, dst):
        return slicing.copy(dst, src) if splits is None else slicing.strided_copy(dst, src, splits)

    for rank, result in enumerate(of_ranks(ranks, (12 // ranks,), call)):
        wanted = torch.cat([part.chunk(ranks)[rank] for part in src.chunk(splits or 1)])
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("method,more", [("copy", ()), ("strided_copy", (2,))])
def test_memory_scale_and_absent_tensors(method, more):
    slicing = ReplaceWithTensorSlicing(1, 2)
    dst, src = torch.zeros(4, 4), torch.nn.Parameter(source(4, 8))
    src.scale = torch.tensor([2.0])
    result = getattr(slicing, method)(dst, src, *more, allocate_tensor=True)
    assert not dst.any() and torch.equal(result, getattr(slicing, method)(dst, src, *more)) and torch.equal(dst, result)
    assert result.scale is src.scale
    assert getattr(slicing, method)(dst, None, *more) is None


@pytest.mark.parametrize("group,size,index", [(None, 1, 0), (None, 2, 1), (None, 4, 1), (3, 4, 3)])
def test_a_process_knows_its_slice(group, size, index):
    assert ReplaceWithTensorSlicing(group, size).gpu_index == index


def test_sources_that_cannot_be_sliced_are_refused():
    slicing = ReplaceWithTensorSlicing(0, 2)
    slicing.merge_assert(2, 1)
    refused(AssertionError, "size 4 cannot be sliced for a destination of size 4", slicing.merge_assert, 4, 4)
    refused(AssertionError, "size 4 cannot", slicing.copy, torch.zeros(4, 8), source(4, 4))
    refused(ValueError, "mp_size=2 destinations of size 3", slicing.copy, torch.zeros(4, 3), source(4, 8))
    refused(ValueError, "in 3 parts", slicing.strided_copy, torch.zeros(4, 4), source(4, 8), 3)
    refused(ValueError, "does not fit a destination", slicing.copy, torch.zeros(4, 4), source(8, 8))
