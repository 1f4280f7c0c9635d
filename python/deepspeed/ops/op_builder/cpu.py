"""The builders as the CPU accelerator sees them: ops with kernels for the CPU, and a stand-in for all others."""

from deepspeed.ops import op_builder
from deepspeed.ops.op_builder import NotImplementedBuilder
from deepspeed.ops.op_table import OPS

globals().update({row.class_name: getattr(op_builder, row.class_name) for row in OPS if "cpu" in row.devices})


def __getattr__(name):
    # Any other builder: is_compatible() is False and load() raises ValueError.
    if name.endswith("Builder"):
        return NotImplementedBuilder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
