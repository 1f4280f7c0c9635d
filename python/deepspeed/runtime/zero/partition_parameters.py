"""Import path that existing scripts use."""

from deepspeed.accelerator import get_accelerator  # noqa: F401
from deepspeed.published.handles import CUDAQuantizer, MultipleAllGatherHandles, print_rank_0  # noqa: F401
from deepspeed.zero.gathers.gathered import (  # noqa: F401
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.zero.gathers.linear import zero3_linear_wrap  # noqa: F401
from deepspeed.zero.init.init_context import (  # noqa: F401
    DEFAULT_TENSOR_OVERRIDES,
    DeepSpeedTensorOverride,
    Init,
    InsertPostInitMethodToModuleSubClasses,
    _contradicting_single_rank_pg_error,
    is_zero_init_enabled,
)
from deepspeed.zero.parameters.sharded_parameter import (  # noqa: F401
    ZeroParamStatus,
    ZeroParamType,
    get_allgather_dtype,
    partitioned_param_data_shape,
)
from deepspeed.zero.parameters.tensor_constructors import (  # noqa: F401
    _orig_torch_arange,
    _orig_torch_empty,
    _orig_torch_eye,
    _orig_torch_full,
    _orig_torch_ones,
    _orig_torch_randn,
    _orig_torch_tensor,
    _orig_torch_zeros,
    zero_wrapper_for_fp_tensor_constructor,
)
