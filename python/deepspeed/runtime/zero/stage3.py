"""Import path that existing scripts use."""

from deepspeed.published.stage3 import DeepSpeedZeroOptimizer_Stage3  # noqa: F401
from deepspeed.zero.gathers.generation import unwrap_model_for_generation  # noqa: F401
from deepspeed.zero.offload.memory_estimators import (  # noqa: F401
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
