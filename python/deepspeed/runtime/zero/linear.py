"""Import path of existing scripts; the code is in deepspeed.zero."""

from deepspeed._compat import autocast_decorators
from deepspeed.accelerator import get_accelerator
from deepspeed.zero.gathers.linear import (  # noqa: F401
    LinearFunctionForZeroStage3,
    LinearModuleForZeroStage3,
    noop_decorator,
    zero3_linear_wrap,
)

autocast_custom_fwd, autocast_custom_bwd = autocast_decorators(get_accelerator().device_name())
