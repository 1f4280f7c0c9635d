"""Import path of existing scripts."""

from deepspeed.zero.bf16_optimizer import BF16_Optimizer  # noqa: F401
