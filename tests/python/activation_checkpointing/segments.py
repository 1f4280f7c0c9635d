"""Parts that the tests of this folder share: both kinds of checkpointed segments, and a plain call for comparison."""

import pytest
import torch

from deepspeed.activation_checkpointing.checkpointing import checkpoint, non_reentrant_checkpoint

both = pytest.mark.parametrize("run", [checkpoint, non_reentrant_checkpoint], ids=["reentrant", "non_reentrant"])


def plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


def assert_same(got, expected):
    """The tensors are equal bit by bit; None stands where the other list has None."""
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one is other is None or torch.equal(one, other), number
