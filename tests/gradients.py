"""Gradients of a result, to compare two ways of computing it."""


def gradients(result, leaves, upper=None):
    """What ``result`` alone, with ``upper`` from above, gives to each of the leaves; it stays their ``grad``."""
    for leaf in leaves:
        leaf.grad = None
    result.backward(upper)
    return [leaf.grad for leaf in leaves]
