"""Cutting a row of items into contiguous parts. A partition into p parts is a list of p + 1 offsets."""

from itertools import accumulate

from deepspeed import _native


def prefix_sum_inc(weights):
    """Inclusive running sums: [1, 2, 3] gives [1, 3, 6]."""
    return list(accumulate(weights))


def partition_uniform(num_items, num_parts):
    """Equal parts; the first ones hold one more where `num_parts` does not divide `num_items`."""
    return _native._C.partition_uniform(num_items, num_parts)


def partition_balanced(weights, num_parts):
    """The partition whose heaviest part is lightest; among those, the most even one (see csrc/plan/partition.h)."""
    return _native._C.partition_balanced([float(weight) for weight in weights], num_parts)
