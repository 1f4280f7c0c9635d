"""Attention chunk by chunk in one process: values and gradients of the whole, wherever chunks wait."""

import gc
import os

import pytest
import torch

from deepspeed._native import _C
from deepspeed.comm.mesh import made_here
from deepspeed.sequence.chunked import chunked_attention
from deepspeed.utils.waiting_tensors import Waiting, store_of
from gradients import gradients
from refusals import refused

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_store_is_left():
    """Each has threads that write and read."""
    yield
    made_here().stores.clear()


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def plain(query, key, value, causal):
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    scores = torch.matmul(query, key.transpose(-1, -2)) * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.matmul(scores.softmax(-1), value)


@pytest.mark.parametrize("place", ["here", "file"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 11, 50])
def test_equals_the_whole(chunk, causal, place, tmp_path):
    leaves = [normal(2, heads, 11, 3, seed=heads + at) for at, heads in enumerate((4, 2, 2))]
    expected = plain(*leaves, causal)
    upper = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    wanted = [expected, *gradients(expected, leaves, upper)]
    found = chunked_attention(*leaves, chunk, causal, 0.3, str(tmp_path) if place == "file" else False)
    torch.testing.assert_close([found, *gradients(found, leaves, upper)], wanted, rtol=0, atol=1e-12)
    if place == "file":
        assert store_of(CPU, str(tmp_path)).waiting == 0


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 11])
def test_masks_of_blocks(chunk, causal):
    """Some queries see nothing of a block, and one nothing at all: its output is 0, and it gives no gradient."""
    leaves = [normal(2, heads, 11, 3, seed=heads + at) for at, heads in enumerate((4, 2, 2))]
    mask = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(1)) > 0.4
    mask |= torch.eye(11, dtype=torch.bool)
    mask[1, :, 6] = False
    key, value = (one.repeat_interleave(2, 1) for one in leaves[1:])
    scores = torch.matmul(leaves[0], key.transpose(-1, -2)) * 0.3
    seen = mask & torch.ones(11, 11, dtype=torch.bool).tril() if causal else mask
    expected = torch.matmul(scores.masked_fill(~seen, -1e30).softmax(-1) * seen, value)
    upper = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    wanted = torch.autograd.grad(expected, leaves, upper)
    calls = []

    def looks(queries, keys):
        calls.append((queries, keys))
        return mask[:, :, slice(*queries), slice(*keys)]

    found = chunked_attention(*leaves, chunk, causal, 0.3, looks=looks)
    grads = torch.autograd.grad(found, leaves, upper)
    torch.testing.assert_close([found, *grads], [expected, *wanted], rtol=0, atol=1e-12)
    assert ((0, min(chunk, 11)), (0, min(chunk, 11))) in calls


def test_a_graph_without_backward_gives_its_chunks_back(tmp_path):
    query, key, value = (normal(1, 2, 8, 3, seed=at) for at in range(3))
    out = chunked_attention(query, key, value, 2, offload=str(tmp_path))
    store = store_of(CPU, str(tmp_path))
    assert store.waiting == 4 * 4  # queries, keys, values, sums of rows
    del out
    gc.collect()
    assert store.waiting == 0
    refused(ValueError, "chunk is 0", chunked_attention, query, key, value, 0)


def test_what_waits(tmp_path):
    """On the CPU host memory is no other place; files go with the last one who knows them."""
    folder = str(tmp_path / "new")
    assert store_of(CPU, False) is None and store_of(CPU, True) is None
    store = store_of(CPU, folder)
    assert store is store_of(CPU, folder)
    tensor = torch.arange(5000.0)
    first, second = Waiting(store, tensor), Waiting(store, tensor.half())
    tensor.zero_()
    second.prefetch()
    assert torch.equal(second.get(), torch.arange(5000.0).half()) and torch.equal(first.get(), torch.arange(5000.0))
    assert store.waiting == 2 and store.bytes["file"] == 30000 and len(os.listdir(folder)) == 2
    del first, second
    assert store.waiting == 0
    refused(ValueError, "No tensor 77 waits here", store.get, 77)
    made_here().stores.clear()
    del store
    gc.collect()
    assert os.listdir(folder) == []


def test_on_meta_shapes_wait():
    tensor = torch.empty(3, 4, device="meta", dtype=torch.half)
    waiting = Waiting(store_of(tensor.device, "a folder"), tensor)
    waiting.prefetch()
    assert waiting.get().shape == (3, 4) and waiting.get().dtype == torch.half and waiting.get().is_meta
    assert not os.path.exists("a folder")
    assert store_of(tensor.device, True) is None  # host memory is no other place for what would be on the CPU


def test_planned_copies_are_those_of_a_store_that_writes_slowly(tmp_path):
    """As many bytes of the device as the native one may have, the oldest first to go."""
    planned, native = (store_of(device, str(tmp_path)) for device in (torch.device("meta"), CPU))
    waiting, room = [], _C.TensorStore.room(4 * 70000)
    for length in (100, 5000, 70000, 70000, 20000, 20000, 70000, 20000):
        waiting.append([Waiting(store, torch.empty(length, device=store.device)) for store in (planned, native)])
        assert native.bytes["device"] <= room >= planned.bytes["device"]
    assert planned.bytes["device"] > 4 * 70000
    for one, other in reversed(waiting):
        assert one.get().shape == other.get().shape
        assert native.bytes["device"] <= room >= planned.bytes["device"]
