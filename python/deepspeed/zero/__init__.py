"""ZeRO for scripts (``Init``, ``GatheredParameters``, ...) and the Python side of the engine core.

Names are imported on first use.
"""

from deepspeed.registry import lazy_package

_WHERE = {
    "Init": "deepspeed.zero.init.init_context",
    "MiCS_Init": "deepspeed.zero.init.mics",
    "GatheredParameters": "deepspeed.zero.gathers.gathered",
    "register_external_parameter": "deepspeed.zero.gathers.gathered",
    "unregister_external_parameter": "deepspeed.zero.gathers.gathered",
    "ZeroParamType": "deepspeed.zero.parameters.sharded_parameter",
    "ZeroParamStatus": "deepspeed.zero.parameters.sharded_parameter",
    "DeepSpeedZeRoOffload": "deepspeed.published.stage3",
    "DeepSpeedZeroOptimizer_Stage3": "deepspeed.published.stage3",
    "DeepSpeedTensorOverride": "deepspeed.zero.init.init_context",
    "TiledLinear": "deepspeed.zero.gathers.tiling",
    "TiledLinearReturnBias": "deepspeed.zero.gathers.tiling",
    "unwrap_model_for_generation": "deepspeed.zero.gathers.generation",
}

__all__ = [name for name in _WHERE]

__getattr__, __dir__ = lazy_package(__name__, _WHERE)
