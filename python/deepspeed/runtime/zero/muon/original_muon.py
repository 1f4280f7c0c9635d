"""Import path that existing scripts use."""

from deepspeed.ops.muon import MuonWithAuxAdam, muon_update  # noqa: F401
