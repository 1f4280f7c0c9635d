"""Muon over native kernels, with Adam for the parameters that are not matrices."""

from deepspeed.ops.from_config import builder_of
from deepspeed.ops.muon.flags import set_optimizer_flags
from deepspeed.ops.muon.muon import MuonWithAuxAdam
from deepspeed.ops.muon.update import muon_update

__all__ = ["MuonWithAuxAdam", "muon_update", "set_optimizer_flags"]

from_config = builder_of(MuonWithAuxAdam)
