"""Import path that existing scripts use."""

from deepspeed.published.stage3 import DeepSpeedZeRoOffload  # noqa: F401
from deepspeed.zero.gathers.ordered_dict import ZeROOrderedDict, ensure_zero_ordered_dict  # noqa: F401
