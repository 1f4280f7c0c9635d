"""Import path that existing scripts use: the names of ``deepspeed.zero``."""

from deepspeed.published.stage3 import DeepSpeedZeRoOffload, DeepSpeedZeroOptimizer_Stage3  # noqa: F401
from deepspeed.registry import lazy_package
from deepspeed.zero.gathers.gathered import (  # noqa: F401
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.zero.gathers.generation import unwrap_model_for_generation  # noqa: F401
from deepspeed.zero.gathers.tiling import TiledLinear, TiledLinearReturnBias  # noqa: F401
from deepspeed.zero.init.init_context import DeepSpeedTensorOverride, Init  # noqa: F401
from deepspeed.zero.init.mics import MiCS_Init  # noqa: F401
from deepspeed.zero.parameters.sharded_parameter import ZeroParamStatus, ZeroParamType  # noqa: F401

__getattr__, __dir__ = lazy_package(__name__)
