"""Errors of a mixture of experts."""


class MoEError(ValueError, AssertionError):
    """Sizes that contradict each other. It has two base classes, because scripts catch either of them."""


def fail(where, text):
    """Raises a ``MoEError`` whose text begins with the layer's name, if it has one."""
    raise MoEError(f"MoE layer '{where}': {text}" if where else text)
