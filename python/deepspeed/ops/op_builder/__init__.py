"""Builders of native ops: ``CPUAdamBuilder().load()`` gives the module with the op's functions.

One class per row of ``deepspeed.ops.op_table``. Each is also found in a module named after its op
(``deepspeed.ops.op_builder.evoformer_attn``), where scripts written for DeepSpeed look for it.
"""

import sys
import types

from deepspeed.ops.op_builder.builder import (
    CUDAOpBuilder,
    OpBuilder,
    TorchCPUOpBuilder,
    get_default_compute_capabilities,
)
from deepspeed.ops.op_builder.prebuilt_op import make_builders
from deepspeed.ops.op_table import NOT_IMPLEMENTED, OPS

_BUILDERS = make_builders((*OPS, NOT_IMPLEMENTED))
globals().update(_BUILDERS)

# {name of the op: a builder}
ALL_OPS = {row.name: _BUILDERS[row.class_name]() for row in OPS}

# Modules in which scripts look for a builder, where that is not the op's name.
_OTHER_MODULES = {
    "RaggedUtilsBuilder": "ragged_utils",
    "RaggedOpsBuilder": "ragged_ops",
    "CCLCommBuilder": "ccl_comm",
    "ShareMemCommBuilder": "shm_comm",
}


for _row in OPS:
    _name = _OTHER_MODULES.get(_row.class_name, _row.name)
    _module = types.ModuleType(f"{__name__}.{_name}", f"``{_row.class_name}``, see {__name__}.")
    setattr(_module, _row.class_name, _BUILDERS[_row.class_name])
    _BUILDERS[_row.class_name].__module__ = _module.__name__
    sys.modules[_module.__name__] = globals()[_name] = _module
del _row, _name, _module

__all__ = ["ALL_OPS", "CUDAOpBuilder", "OpBuilder", "TorchCPUOpBuilder", "get_default_compute_capabilities"]
__all__ += list(_BUILDERS)
