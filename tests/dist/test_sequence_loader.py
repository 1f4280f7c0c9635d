"""Loaders of ranks that share sequences: each rank's batch in turn, a part for each rank, labels shifted before."""

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
from deepspeed.sequence import weighted_loss
from harness import on_ranks
from refusals import refused
from runs import together
from sequence_models import mean_loss, part, tiny


def batch_of(rank, step, length=4, rows=2, **more):
    tokens = torch.arange(rows * length).view(rows, length) + 100 * rank + 10 * step
    return {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "position_ids": torch.arange(length).expand(rows, length),
        **more,
    }


def adapter(batches, rank, world, **more):
    return UlyssesSPDataLoaderAdapter(
        batches, sp_rank=rank, sp_group=dist.get_world_group(), sp_world_size=world, device="cpu", **more
    )


@on_ranks(2, init=True)
def test_each_rank_in_turn(rank, world):
    lengths = [4, 8]
    batches = [batch_of(rank, step, lengths[(step + rank) % 2]) for step in range(2)]
    for index, one in enumerate(batches):
        length = lengths[(index + rank) % 2]
        one["pixels"] = torch.randn(2, 3, 5)
        one["features"] = torch.arange(2.0 * length * 3).view(2, length, 3)
        one["mask"] = torch.ones(2, 1, length, length, dtype=torch.bool)
        one["places"] = torch.zeros(3, length)
        one["inputs_embeds"] = torch.arange(2.0 * length * length).view(2, length, length)  # as many features as tokens
        one["names"] = ["a", "b"]
        one["attention_mask"] = torch.ones(2, length, dtype=torch.int64)
    loader = adapter(batches, rank, world)
    assert len(loader) == 4
    for _ in range(2):  # epochs
        found = list(loader)
        assert len(found) == 4
        for turn, one in enumerate(found):
            owner, step = turn % world, turn // world
            length = lengths[(step + owner) % 2]
            whole = batch_of(owner, step, length)
            cut = slice(rank * length // world, (rank + 1) * length // world)
            assert torch.equal(one["input_ids"], whole["input_ids"][:, cut])
            assert torch.equal(one["position_ids"], whole["position_ids"][:, cut])
            shifted = torch.nn.functional.pad(whole["labels"], (0, 1), value=-100)[:, 1:]
            assert torch.equal(one["shift_labels"], shifted[:, cut]) and "labels" not in one
            assert one["features"].shape == (2, length // world, 3) and one["pixels"].shape == (2, 3, 5)
            assert one["mask"].shape == (2, 1, length, length) and one["names"] == ["a", "b"]
            embeds = torch.arange(2.0 * length * length).view(2, length, length)
            assert torch.equal(one["inputs_embeds"], embeds[:, cut])
            assert one["places"].shape == (3, length // world)
            assert one["attention_mask"].shape == (2, length // world)


@pytest.mark.parametrize("world", [2, 4])
@on_ranks(init=True)
def test_padding_changes_no_loss(rank, world):
    """Any length: the loss and the gradients of the model are those without padding."""
    tokens = torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(7))
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(5).expand(2, 5)}
    (mine, *others) = adapter([batch], rank, world, pad=True)
    assert len(others) == world - 1
    size = -(-5 // world)
    assert mine["input_ids"].shape == (2, size)
    every = together(mine["shift_labels"])
    assert torch.equal(torch.cat(every, 1)[:, 5:], torch.full((2, world * size - 5), -100))
    model = tiny()
    plain = mean_loss(model(tokens, batch["position_ids"])[:, :-1], tokens[:, 1:])
    logits = model(torch.cat(together(mine["input_ids"]), 1), torch.cat(together(mine["position_ids"]), 1))
    weighted_loss(mean_loss(part(logits, rank, world, 1), mine["shift_labels"]), mine["shift_labels"], None)
    one_rank = mean_loss(logits, torch.cat(every, 1))
    assert abs(float(one_rank - plain)) < 1e-6


def wrong_loader(rank, world, what):
    batches = [batch_of(rank, 0, 5 if what == "length" else 4)]
    if what == "end":
        batches = batches * (1 + rank)
    if what == "positions" and rank == 1:
        del batches[0]["position_ids"]
    if what == "no dict" and rank == 0:
        batches = [[1, 2]]

    def gone():
        yield batches[0]
        raise OSError("the disk is gone")

    return [len(one) for one in adapter(gone() if what == "fails" and rank == 0 else batches * 2, rank, world)]


BAD = {
    "length": (ValueError, "(?s)rank 1: .*2 sequences of 5 tokens cannot be cut into 2 equal parts.*pad=True"),
    "end": (RuntimeError, r"do not end together: those of ranks \[0\] of 2 have ended"),
    "positions": (ValueError, "rank 1: ValueError: a batch without position_ids"),
    "no dict": (ValueError, "rank 0: TypeError: a batch is a list"),
    "fails": (ValueError, "rank 0: OSError: the disk is gone"),
}


@on_ranks(2, init=True, timeout=60)
def test_every_rank_raises(rank, world):
    for what, (error, words) in BAD.items():
        refused(error, words, wrong_loader, rank, world, what)
