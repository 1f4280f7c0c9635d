"""Import path of existing scripts."""

from deepspeed.zero.mics_utils import MiCS_CommGroups, create_mics_comm_groups, scale_tensors  # noqa: F401
