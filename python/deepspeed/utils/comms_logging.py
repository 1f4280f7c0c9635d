"""Import path of existing scripts; the code is in deepspeed.comm."""

from deepspeed.comm.bandwidth import readable_size as convert_size  # noqa: F401
from deepspeed.comm.caller import get_caller_func  # noqa: F401
from deepspeed.comm.comms_logger import CommsLogger  # noqa: F401
