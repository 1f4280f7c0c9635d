"""Import path that existing scripts use."""

from deepspeed.data.dynamic_batches import (  # noqa: F401
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
)
