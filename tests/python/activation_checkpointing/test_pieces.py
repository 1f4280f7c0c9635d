"""The functions that CheckpointFunction is made of, which scripts can call, too."""

import collections
import types

import torch

from deepspeed import checkpointing as c
from deepspeed.activation_checkpointing.tensors import fill, flatten
from refusals import refused


def test_tensors_and_the_rest():
    a, b = torch.ones(1), torch.zeros(2)
    tensors, others, flags = c.extract_tensors((1, a, None, b, "x"))
    assert tensors == (a, b) and others == (1, None, "x") and flags == (False, True, False, True, False)
    assert c.merge_tensors(tensors, others, flags) == (1, a, None, b, "x")
    tensors, others, flags = c.extract_tensors([a, 2])
    assert (tensors, others, flags) == ([a], [2], [True, False])


def test_detach_variable():
    a = torch.ones(2, requires_grad=True) * 2
    got = c.detach_variable((a, 3, torch.ones(1)), device="cpu")
    assert got[0].is_leaf and got[0].requires_grad and got[1] == 3 and not got[2].requires_grad
    refused(RuntimeError, "tuple", c.detach_variable, a)


def test_what_is_an_activation():
    others = (torch.ones(3, dtype=torch.long), torch.nn.Parameter(torch.ones(3)), "x", torch.ones(0))
    assert [c.is_activation_to_checkpoint(one) for one in (torch.ones(3), *others)] == [True] + [False] * 4


def test_structures():
    Point = collections.namedtuple("Point", "x y")
    a, b = torch.ones(1), torch.zeros(2)
    untouched = {"k": [1, (2,)]}
    table = collections.defaultdict(list, {"a": [a]})
    item = [a, Point(b, 1), table, untouched, torch.Size([2]), torch.ones(2).max(0)]
    template, tensors = flatten(item)
    assert len(tensors) == 4 and tensors[0] is a and tensors[1] is b  # `a` once
    again = fill(template, tensors)
    assert again[0] is a and isinstance(again[1], Point) and again[1].x is b
    assert again[2]["a"][0] is a and again[2]["new"] == [] and "new" not in table
    assert again[3] is untouched and again[4] is item[4]
    assert type(again[5]) is type(item[5]) and again[5].values is item[5].values


# Model-parallel rank 1 of 2, without processes.
MPU = types.SimpleNamespace(
    get_slice_parallel_rank=lambda: 1, get_slice_parallel_world_size=lambda: 2, get_slice_parallel_group=lambda: None
)


def test_sizes_of_shards():
    x = torch.arange(7.0)
    assert (c.get_partition_size(x), c.get_partition_start(x)) == (7, 0)
    c.configure(MPU, partition_activations=True)
    assert (c.get_partition_size(x), c.get_partition_start(x)) == (4, 4)
    assert not c.is_activation_to_checkpoint(torch.ones(1))  # fewer elements than ranks


def test_shards_are_memory_of_their_own(monkeypatch):
    c.configure(MPU, partition_activations=True)
    monkeypatch.setattr("deepspeed.comm.all_gather", lambda out, mine, group: [one.copy_(mine) for one in out])
    x, ids = torch.arange(7.0), torch.arange(3)
    shard, same = c.partition_activations((x, ids), False, False)
    assert same is ids and shard.tolist() == [4.0, 5.0, 6.0, 0.0] and shard.data_ptr() != x[4:].data_ptr()
    entries = c.get_partitioned_activations_for_backward((x, ids), (shard, same), False)
    assert entries[0] is shard and tuple(entries[1].shape) == (7,) and entries[2:] == [ids, None]

    def all_gather_into_tensor(out, mine, group):
        out.copy_(torch.cat([torch.arange(4.0), mine]))

    monkeypatch.setattr("deepspeed.comm.all_gather_into_tensor", all_gather_into_tensor)
    whole, ids_again = c.gather_partitioned_activations(entries)
    assert torch.equal(whole, x) and ids_again is ids
    refused(RuntimeError, "contiguous_checkpointing=True", c.partition_activations, (x,), False, True)


def test_activations_that_differ_between_ranks_are_refused(monkeypatch):
    """Sequence parallelism with partition_activations would silently mix two activations."""
    c.configure(MPU, partition_activations=True)

    def all_gather(out, mine, group):
        out[0].copy_(mine + 1)
        out[1].copy_(mine)

    monkeypatch.setattr("deepspeed.comm.all_gather", all_gather)
    refused(
        RuntimeError,
        "same activation on every model-parallel rank",
        c.partition_activations,
        (torch.arange(8.0),),
        False,
        False,
    )


def test_entries_of_the_host():
    a, ids = torch.arange(3.0), torch.arange(2)
    copy = a.clone()
    entries = c.get_cpu_activations_for_backward((a, ids), (copy, ids))
    assert entries[0] is copy and entries[1].device == a.device and entries[2:] == [ids, None]
    assert c.gather_partitioned_activations(entries)[0].tolist() == a.tolist()
