"""ZeRO for scripts (``Init``, ``GatheredParameters``, ...) and the Python side of the engine core.

Names are imported on first use.
"""

import importlib

_WHERE = {
    "Init": "deepspeed.zero.init_context",
    "MiCS_Init": "deepspeed.zero.mics",
    "GatheredParameters": "deepspeed.zero.gathered",
    "register_external_parameter": "deepspeed.zero.gathered",
    "unregister_external_parameter": "deepspeed.zero.gathered",
    "ZeroParamType": "deepspeed.zero.sharded_parameter",
    "ZeroParamStatus": "deepspeed.zero.sharded_parameter",
    "DeepSpeedZeRoOffload": "deepspeed.zero.stage3",
    "DeepSpeedZeroOptimizer_Stage3": "deepspeed.zero.stage3",
    "DeepSpeedTensorOverride": "deepspeed.zero.init_context",
    "TiledLinear": "deepspeed.zero.tiling",
    "TiledLinearReturnBias": "deepspeed.zero.tiling",
    "unwrap_model_for_generation": "deepspeed.zero.generation",
}

__all__ = [name for name in _WHERE]


def __getattr__(name):
    if name not in _WHERE:
        raise AttributeError(f"module 'deepspeed.zero' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(set(globals()) | set(_WHERE))
