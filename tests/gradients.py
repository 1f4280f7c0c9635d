"""Gradients of a result, to compare two ways of computing it."""


def gradients(result, leaves, upper=None):
    """The gradients that ``result`` alone, with ``upper`` from above, gives to each of the leaves; their ``grad``
    stays."""
    for leaf in leaves:
        leaf.grad = None
    result.backward(upper)
    return [leaf.grad for leaf in leaves]
