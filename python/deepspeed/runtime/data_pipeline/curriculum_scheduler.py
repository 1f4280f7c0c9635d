"""Import path of existing scripts."""

from deepspeed.data.curriculum import CurriculumScheduler  # noqa: F401
