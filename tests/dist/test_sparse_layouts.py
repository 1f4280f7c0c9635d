"""Layouts of sparse attention are the same on all ranks, also those that a user's code draws at random."""

import pytest
import torch

from deepspeed.ops import sparse_attention as sparse
from deepspeed.ops.sparse_attention.layouts import layout_of
from harness import run_ranks


class Drawn(sparse.SparsityConfig):
    """A pattern of a user, which draws from torch's generator."""

    def make_layout(self, seq_len):
        return (torch.rand_like(self.setup_layout(seq_len).float()) < 0.5).long()


def drawn(rank, world):
    torch.manual_seed(100 + rank)
    users, ours = Drawn(2, 8, True), sparse.BigBirdSparsityConfig(2, 8, True)
    attend, found = sparse.SparseSelfAttention(users), []
    for length in (32, 64, 32):
        attend(*[torch.ones(1, 2, length, 4)] * 3)
        found += [layout_of(users, length).layout, layout_of(ours, length).layout]
    own = users.make_layout(64)
    return found, own


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_agree(world):
    results = run_ranks(world, drawn, init=True)
    for found, _ in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, results[0][0], strict=True))
    assert world == 1 or not torch.equal(results[0][1], results[1][1])  # what each would have drawn
