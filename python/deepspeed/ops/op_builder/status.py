"""The state of all ops in this process, for the report and for ``deepspeed.ops.__compatible_ops__``."""

from deepspeed.ops.op_builder import ALL_OPS
from deepspeed.ops.op_table import NOT_IMPLEMENTED


def installed_ops():
    """{name: whether the op lies in this installation}."""
    return {name: op.is_installed() for name, op in ALL_OPS.items()}


def compatible_ops():
    """{name: whether the op works in this process}; also for the stand-in of ops that a device does not have."""
    return {**{name: op.is_compatible() for name, op in ALL_OPS.items()}, NOT_IMPLEMENTED.name: False}


def report():
    """A list of [name, installed, compatible, why not], one per op."""
    return [[name, op.is_installed(), op.is_compatible(), op.why_not()] for name, op in ALL_OPS.items()]
