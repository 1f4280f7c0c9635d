"""ZeRO for scripts (``Init``, ``GatheredParameters``, ...) and the Python side of the engine core.

Names are imported on first use.
"""

from deepspeed.registry import lazy_package

_WHERE = {
    "Init": "deepspeed.zero.init_context",
    "MiCS_Init": "deepspeed.zero.mics",
    "GatheredParameters": "deepspeed.zero.gathered",
    "register_external_parameter": "deepspeed.zero.gathered",
    "unregister_external_parameter": "deepspeed.zero.gathered",
    "ZeroParamType": "deepspeed.zero.sharded_parameter",
    "ZeroParamStatus": "deepspeed.zero.sharded_parameter",
    "DeepSpeedZeRoOffload": "deepspeed.published.stage3",
    "DeepSpeedZeroOptimizer_Stage3": "deepspeed.published.stage3",
    "DeepSpeedTensorOverride": "deepspeed.zero.init_context",
    "TiledLinear": "deepspeed.zero.tiling",
    "TiledLinearReturnBias": "deepspeed.zero.tiling",
    "unwrap_model_for_generation": "deepspeed.zero.generation",
}

__all__ = [name for name in _WHERE]

__getattr__, __dir__ = lazy_package(__name__, _WHERE)
