"""Import path that existing scripts use; the code is in deepspeed.config."""

from deepspeed.config.model import layout
from deepspeed.config.sections import DeepSpeedZeroLeafModuleConfig  # noqa: F401

_fields = layout("training", "zero_optimization.leaf_module")
DEFAULT_LEAF_MODULE_CLASSES = list(_fields["classes"]["default"])
DEFAULT_LEAF_MODULE_NAMES = list(_fields["names"]["default"])
DEFAULT_LEAF_MODULE_NAME_SUFFIXES = list(_fields["name_suffixes"]["default"])
