"""Import path of existing scripts."""

from deepspeed.published.dataloader import DeepSpeedDataLoader  # noqa: F401
from deepspeed.utils.repeating_loader import RepeatingLoader  # noqa: F401
