"""Import path that existing scripts use; the code is in deepspeed.module_inject."""

from deepspeed.module_inject.domino import DominoModule, DominoTransformer  # noqa: F401
from deepspeed.module_inject.domino_config import AttnMaskType, AttnType, LayerType, ModelType  # noqa: F401
