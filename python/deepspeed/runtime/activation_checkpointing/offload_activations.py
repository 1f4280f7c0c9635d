"""Import path of existing scripts; the code is in deepspeed.activation_checkpointing."""

from deepspeed.activation_checkpointing.hidden_states import (  # noqa: F401
    CheckpointHiddenStatesOffload,
    get_checkpoint_hidden_states_offloading_ctx_manager,
)
from deepspeed.activation_checkpointing.offload import _ActivationOffloadEngine  # noqa: F401
