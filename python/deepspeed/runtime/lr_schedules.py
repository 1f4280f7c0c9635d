"""Import path of existing scripts; the code is in deepspeed.optim."""

from deepspeed.optim.lr_arguments import *  # noqa: F401,F403
from deepspeed.optim.lr_schedules import get_torch_optimizer  # noqa: F401
