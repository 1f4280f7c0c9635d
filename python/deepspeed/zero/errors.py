"""Errors of ZeRO, and the test for its parameters."""


class ZeRORuntimeException(Exception):
    """A model, optimizer or config that ZeRO cannot train with."""


class UnusedParameterError(RuntimeError, AssertionError):
    """Parameters have no gradient at a step, and ``ignore_unused_parameters`` is false."""


def is_zero_param(parameter):
    """Whether ``parameter`` belongs to ZeRO stage 3; anything may be asked about."""
    return hasattr(parameter, "ds_id")
