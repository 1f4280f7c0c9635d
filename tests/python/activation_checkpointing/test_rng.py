"""The tracker of random number generators."""

import types

import pytest
import torch

from deepspeed import checkpointing
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.random_state import CudaRNGStatesTracker, get_cuda_rng_tracker
from refusals import refused
from segments import assert_same, both, plainly

device = get_accelerator().device_name() if get_accelerator().is_available() else "cpu"


@pytest.fixture
def tracker():
    return CudaRNGStatesTracker()


def draw(count=3):
    return torch.rand(count, device=device)


def test_a_generator_goes_on_where_it_stopped_and_leaves_the_default_alone(tracker):
    get_accelerator().manual_seed(5)
    expected_default = draw(6)
    get_accelerator().manual_seed(7)
    expected_own = draw(6)

    get_accelerator().manual_seed(5)
    tracker.add("own", 7)
    first = draw()
    with tracker.fork("own"):
        own_first = draw()
    second = draw()
    with pytest.raises(KeyError, match="x"), tracker.fork("own"):
        own_second = draw()
        raise KeyError("x")
    assert torch.equal(torch.cat([first, second]), expected_default)
    assert torch.equal(torch.cat([own_first, own_second]), expected_own)


def test_names_and_seeds_are_used_once(tracker):
    tracker.add("one", 1)
    refused(ValueError, "seed 1", tracker.add, "two", 1)
    refused(ValueError, "one", tracker.add, "one", 2)
    refused(KeyError, "two is not added", tracker.fork("two").__enter__)
    refused(KeyError, "model-parallel-rng", tracker.fork().__enter__)
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.add("one", 1)


def test_states_are_copies(tracker):
    tracker.add("one", 1)
    states = tracker.get_states()
    with tracker.fork("one"):
        first = draw()
    assert not torch.equal(states["one"], tracker.get_states()["one"])
    tracker.set_states(states)
    tracker.add("two", 2)
    assert set(states) == {"one"}
    with tracker.fork("one"):
        assert torch.equal(draw(), first)


def mpu(rank):
    return types.SimpleNamespace(get_model_parallel_rank=lambda: rank, get_model_parallel_world_size=lambda: 4)


def forked():
    with get_cuda_rng_tracker().fork():
        return draw()


def seeded(seed):
    get_accelerator().manual_seed(seed)
    return draw()


def test_seeds_of_the_ranks():
    seen = []
    for rank in range(3):
        checkpointing.configure(mpu(rank))
        checkpointing.model_parallel_cuda_manual_seed(1234)
        default, split = draw(), forked()
        assert torch.equal(default, seeded(1234))
        assert torch.equal(split, seeded(1234 + 2718 + rank))  # Megatron's
        seen.append(split)
        checkpointing.model_parallel_reconfigure_tp_seed(99)
        assert torch.equal(forked(), seeded(99 + 2718 + rank))
    assert not torch.equal(seen[0], seen[1])


@both
def test_tracked_generators_are_restored_for_the_recomputation(run):
    def body(x):
        with get_cuda_rng_tracker().fork():
            kept = torch.nn.functional.dropout(x, 0.5)
        return kept * torch.nn.functional.dropout(x, 0.5)

    def grad(call):
        checkpointing.model_parallel_cuda_manual_seed(3)
        x = torch.ones(64, device=device, requires_grad=True)
        out = call(body, x)
        between = forked()
        out.sum().backward()
        return x.grad, between, forked()

    assert_same(grad(run), grad(plainly))
