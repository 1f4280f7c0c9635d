"""Import path of existing scripts."""

from deepspeed.data.layer_drop import ProgressiveLayerDrop, convert_to_pld  # noqa: F401
