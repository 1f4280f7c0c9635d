"""Names that scripts import from deepspeed.runtime.utils and .sparse_tensor, on one process."""

import collections
import random

import numpy
import pytest
import torch

from deepspeed.runtime.sparse_tensor import SparseTensor
from deepspeed.runtime.utils import (
    CheckOverflow,
    call_to_str,
    clip_grad_norm_,
    get_global_norm,
    get_grad_norm,
    get_weight_norm,
    is_model_parallel_parameter,
    move_to_device,
    partition_balanced,
    partition_uniform,
    prefix_sum_inc,
    see_memory_usage,
    set_random_seed,
)
from logs import logged
from refusals import refused


def test_call_to_str():
    assert call_to_str("f") == "f()" and call_to_str("f", 1, "a", b=[2], c="x") == "f(1, 'a', b=[2], c='x')"
    assert call_to_str("f", c=None) == "f(c=None)"


def test_set_random_seed():
    def draw():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    set_random_seed(7)
    first = draw()
    assert draw() != first
    set_random_seed(7)
    assert draw() == first


def test_prefix_sum_inc():
    assert prefix_sum_inc([1, 2, 3]) == [1, 3, 6] and prefix_sum_inc([]) == []


def test_partitions():
    assert partition_uniform(10, 4) == [0, 3, 6, 8, 10] and partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert partition_uniform(num_items=8, num_parts=4) == [0, 2, 4, 6, 8]
    assert partition_balanced([0.0, 1.1, 1.9, 30.0], 2) == [0, 3, 4]
    assert partition_balanced(weights=[1, 2, 1], num_parts=3) == [0, 1, 2, 3]
    assert partition_balanced([1, 2], 4) == partition_uniform(2, 4)
    refused(ValueError, "into 0 parts", partition_uniform, 3, 0)


Pair = collections.namedtuple("Pair", "a b")


def test_move_to_device():
    tensor = torch.ones(2)
    item = {"x": [tensor, (1, tensor)], "pair": Pair(tensor, "text"), "none": None}
    here = move_to_device(item, "cpu")  # containers of tensors are made anew even where nothing moves
    assert here is not item and here.keys() == item.keys()
    moved = move_to_device(item, "meta")
    assert moved["x"][0].is_meta and moved["x"][1][1].is_meta and moved["x"][1][0] == 1
    assert type(moved["pair"]) is Pair and moved["pair"].a.is_meta and moved["pair"].b == "text"
    assert not item["x"][0].is_meta, "the original stays"
    kept = move_to_device([tensor, torch.ones(3)], "meta", lambda x: torch.is_tensor(x) and x.numel() == 3)
    assert [x.is_meta for x in kept] == [False, True]


def test_see_memory_usage(capsys):
    with logged() as lines:
        see_memory_usage("quiet")
        assert lines == []
        see_memory_usage("after the step", force=True)
    assert lines[0] == "after the step" and "Max_MA" in lines[1] and "CPU Virtual Memory" in lines[2]


# ---- norms ---------------------------------------------------------------------------------------------------------


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in [(3, 4), (5,), (2, 2), (1,)]]
    for p in made[:3]:
        p.grad = torch.randn_like(p)
    return made  # the last one has no gradient


@pytest.mark.parametrize("norm_type", [1, 2, 3.0, float("inf")])
def test_norms_are_those_of_one_vector(norm_type):
    params = parameters()
    grads = torch.cat([p.grad.flatten() for p in params[:3]])
    weights = torch.cat([p.detach().flatten() for p in params])
    assert get_grad_norm(params, norm_type) == pytest.approx(grads.norm(norm_type).item(), rel=1e-6)
    assert get_weight_norm(params, norm_type) == pytest.approx(weights.norm(norm_type).item(), rel=1e-6)


def test_norm_of_a_sparse_gradient_one_tensor_nothing_and_nan():
    p = torch.nn.Parameter(torch.zeros(4, 2))
    p.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (4, 2))
    assert get_grad_norm(p) == pytest.approx(8**0.5) and get_grad_norm([]) == 0.0
    p.grad = torch.full((4, 2), float("nan"))
    assert get_grad_norm(p) == -1.0 and get_grad_norm(p, float("inf")) == -1.0
    assert get_global_norm([3.0, 4.0]) == 5.0


@pytest.mark.parametrize("norm_type", [2, float("inf")])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
def test_clip_grad_norm_is_torchs(max_norm, norm_type):
    ours, theirs = parameters(), parameters()
    norm = clip_grad_norm_(ours, max_norm, norm_type)
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type).item(), rel=1e-6)
    for a, b in zip(ours[:3], theirs[:3]):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-8)


def test_is_model_parallel_parameter():
    for mark in ("model_parallel", "tensor_model_parallel"):
        p = torch.nn.Parameter(torch.zeros(1))
        assert is_model_parallel_parameter(p) is False
        setattr(p, mark, True)
        assert is_model_parallel_parameter(p) is True


def test_check_overflow_alone():
    params = parameters()
    check = CheckOverflow([params])
    assert not check.check() and not check.has_overflow_serial(params) and not check.check([params[:1]])
    params[1].grad[2] = float("inf")
    assert check.check() and check.has_overflow(params) and not check.check([params[:1]])
    assert check.check_using_norm([1.0, -1]) and not check.check_using_norm([1.0, 2.0])


# ---- sparse tensors ------------------------------------------------------------------------------------------------


def rows():
    dense = torch.zeros(6, 3)
    dense[1] = torch.tensor([1.0, -1.0, 0.0])  # sums to zero, is not zero
    dense[4] = 2.0
    return dense


def test_sparse_tensor_from_dense_and_back():
    sparse = SparseTensor(rows())
    assert sparse.indices.tolist() == [1, 4] and sparse.dense_size == [6, 3]
    assert torch.equal(sparse.to_dense(), rows()) and torch.equal(sparse.to_coo_tensor().to_dense(), rows())
    assert sparse.sparse_size() == (2 + 6, 18) and SparseTensor.type() == "deepspeed.SparseTensor"
    assert "dense_size=[6, 3]" in str(sparse)


def test_sparse_tensor_from_an_embedding_gradient():
    table = torch.nn.Embedding(6, 3, sparse=True)
    table(torch.tensor([1, 4, 1])).sum().backward()
    sparse = SparseTensor(table.weight.grad)
    assert sparse.indices.tolist() == [1, 4] and torch.equal(sparse.to_dense(), table.weight.grad.to_dense())


def test_sparse_tensor_add():
    sparse = SparseTensor(rows())
    sparse.add(sparse)
    assert torch.equal(sparse.to_dense(), rows() * 2)
    other = torch.zeros(6, 3)
    other[0] = 5.0
    sparse.add(SparseTensor(other))
    assert torch.equal(sparse.to_dense(), rows() * 2 + other)
    refused(ValueError, "sizes", sparse.add, SparseTensor(torch.zeros(5, 3)))


def test_sparse_tensor_wrong_input():
    refused(ValueError, "2-D", SparseTensor, torch.zeros(3))
    refused(ValueError, "sparse in 2 dimensions", SparseTensor, torch.eye(3).to_sparse())
    assert SparseTensor().indices is None
