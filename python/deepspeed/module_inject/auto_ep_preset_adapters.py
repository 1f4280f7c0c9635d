"""Adapters of presets under the path that scripts import."""

from deepspeed.module_inject.auto_ep_presets.registry import get_preset_adapter  # noqa: F401
