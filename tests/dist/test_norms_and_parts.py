"""Norms, overflow checks, partitioned tensors and loader shares over several ranks."""

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.utils import CheckOverflow, PartitionedTensor, clip_grad_norm_, get_grad_norm, get_weight_norm
from harness import on_ranks
from refusals import refused
from runs import together


class ModelParallel:
    """An mpu whose model-parallel group is all ranks."""

    def get_model_parallel_group(self):
        return dist.group.WORLD

    def get_model_parallel_rank(self):
        return dist.get_rank()


@pytest.mark.parametrize("norm_type", [1, 2, float("inf")])
@on_ranks(2, init=True)
def test_norms_of_a_split_model(rank, world_size, norm_type):
    torch.manual_seed(0)
    whole, shared = torch.randn(world_size * 3, 2), torch.randn(5)
    piece = torch.nn.Parameter(whole[rank * 3 : rank * 3 + 3].clone())
    piece.model_parallel = True
    replica = torch.nn.Parameter(shared.clone())
    for p in (piece, replica):
        p.grad = p.detach() * 2
    params = [piece, replica]
    expected = torch.cat([whole.flatten(), shared]).norm(norm_type).item()
    weight = get_weight_norm(params, norm_type, ModelParallel())
    grad = get_grad_norm(params, norm_type, ModelParallel())
    clipped = clip_grad_norm_(params, 0.5, norm_type, ModelParallel())
    after = get_grad_norm(params, norm_type, ModelParallel())
    assert weight == pytest.approx(expected, rel=1e-6)
    assert grad == clipped == pytest.approx(2 * expected, rel=1e-6)
    assert after == pytest.approx(0.5, rel=1e-5)


@on_ranks(2, init=True)
def test_experts_clip_by_one_norm(rank, world_size):
    shared, expert = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    shared.grad, expert.grad = torch.ones(1), torch.ones(1) * (rank + 1)
    expert.allreduce = False
    (first, shared_a), (second, shared_b) = together(clip_grad_norm_([shared, expert], 0.1), shared.grad.item())
    assert first == second == pytest.approx((2**0.5 + 5**0.5) / 2)
    assert shared_a == shared_b


@pytest.mark.parametrize("with_mpu", [False, True])
@on_ranks(2, init=True)
def test_overflow_on_one_rank_is_everybodys(rank, world_size, with_mpu):
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1.0, float("nan") if rank == 1 else 0.0])
    check = CheckOverflow([[p]], mpu=ModelParallel() if with_mpu else None)
    found = check.check(), check.has_overflow_serial([p]), check.check_using_norm([-1 if rank == 1 else 1.0])
    assert found == (True, rank == 1, True)


@pytest.mark.parametrize("rows", [4, 5, 1])
@on_ranks(2, init=True)
def test_partitioned_tensor(rank, world_size, rows):
    torch.manual_seed(0)
    full = torch.rand(rows, 3)
    part = PartitionedTensor(full, group=dist.group.WORLD)
    again = PartitionedTensor.from_meta(part.to_meta(), part.data(), group=dist.group.WORLD, device="cpu")
    assert torch.equal(part.full(), full) and torch.equal(again.full(), full)
    assert part.full_size() == [rows, 3] and len(part.local_size()) == 1
    assert sum(together(part.local_size()[0])) == rows * 3
    wrong = part.to_meta()
    wrong[4] = (rank + 1) % world_size
    refused(ValueError, "but the group has", PartitionedTensor.from_meta, wrong, part.data(), group=dist.group.WORLD)


@on_ranks(2, init=True)
def test_loader_finds_its_rank(rank, world_size):
    loader = DeepSpeedDataLoader(list(range(20)), 2, True, rank, None)
    first, second = together([sample for batch in loader for sample in batch.tolist()])
    assert sorted(first + second) == list(range(20)) and len(first) == 10
