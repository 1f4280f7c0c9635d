"""Import path of existing scripts; the code is in deepspeed.zero."""

from deepspeed.zero.offload.offload_states import get_state_devices  # noqa: F401
