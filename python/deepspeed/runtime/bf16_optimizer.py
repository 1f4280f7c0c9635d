"""Import path of existing scripts."""

from deepspeed.published.bf16_optimizer import BF16_Optimizer  # noqa: F401
