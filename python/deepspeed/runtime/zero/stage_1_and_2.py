"""Import path that existing scripts use."""

from deepspeed.published.handles import IPGBucket  # noqa: F401
from deepspeed.published.stage_1_and_2 import DeepSpeedZeroOptimizer  # noqa: F401
from deepspeed.zero.offload.memory_estimators import (  # noqa: F401
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
