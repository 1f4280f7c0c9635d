"""Import path that existing scripts use: all of ``deepspeed.comm`` in one module."""

from deepspeed import comm as _comm
from deepspeed.comm import process_group
from deepspeed.comm.comms_log import comms_logger

__all__ = ["comms_logger"]
__all__ += _comm.__all__


def __getattr__(name):
    # cdb: the current backend
    return process_group.cdb if name == "cdb" else getattr(_comm, name)
