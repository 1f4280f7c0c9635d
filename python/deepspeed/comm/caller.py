"""The caller of a communication function, for the debug names in logs."""

import sys


def get_caller_func(frame=3):
    """Name of the function ``frame`` levels up the stack; ``"unknown"`` when the stack is not that deep."""
    try:
        return sys._getframe(frame).f_code.co_name
    except ValueError:
        return "unknown"
