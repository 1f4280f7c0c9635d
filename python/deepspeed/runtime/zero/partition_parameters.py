"""Import path that existing scripts use."""

from deepspeed.accelerator import get_accelerator  # noqa: F401
from deepspeed.zero.gathered import (  # noqa: F401
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.zero.init_context import (  # noqa: F401
    DEFAULT_TENSOR_OVERRIDES,
    DeepSpeedTensorOverride,
    Init,
    InsertPostInitMethodToModuleSubClasses,
    is_zero_init_enabled,
)
from deepspeed.zero.sharded_parameter import ZeroParamStatus, ZeroParamType  # noqa: F401
