"""Import path that existing scripts use; the code is in deepspeed.config and deepspeed.module_inject."""

from deepspeed.config.getters import load_ds_config  # noqa: F401
from deepspeed.module_inject.tp_init import (  # noqa: F401
    merge_tp_model_init_into_config,
    record_tp_model_init_args,
)
