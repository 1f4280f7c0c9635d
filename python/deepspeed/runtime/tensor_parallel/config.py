"""Import path that existing scripts use; the code is in deepspeed.config and deepspeed.module_inject."""

from deepspeed.config.sections import TPTrainingConfig  # noqa: F401
from deepspeed.module_inject.tp_plan_converter import _get_hf_tp_plan  # noqa: F401
