"""Import path that existing scripts use."""

from deepspeed.ops.muon import MuonWithAuxAdam  # noqa: F401
