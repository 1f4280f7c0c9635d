"""Errors of a mixture of experts."""


class MoEError(ValueError, AssertionError):
    """Sizes that do not fit each other. Both kinds, because scripts wait for either."""


def fail(where, text):
    """Raises ``MoEError`` that begins with the layer's name, where it has one."""
    raise MoEError(f"MoE layer '{where}': {text}" if where else text)
