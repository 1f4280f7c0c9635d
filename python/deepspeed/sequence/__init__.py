"""Sequence parallelism: ranks that share one sequence, with the results and gradients of one process."""

from deepspeed.registry import lazy_package

_NAMES = {
    "weighted_loss": "deepspeed.sequence.loss",
    "tile": "deepspeed.sequence.tiling",
    "longest": "deepspeed.sequence.lengths",
    "explain": "deepspeed.sequence.lengths",
    "SPModelInfo": "deepspeed.sequence.autosp_detector",
    "detect_model_sp_info": "deepspeed.sequence.autosp_detector",
    "auto_wrap_model_for_sp": "deepspeed.sequence.auto_sp",
    "UlyssesSPViTAttention": "deepspeed.sequence.autosp_vit",
    "ModalityFusionSPAdapter": "deepspeed.sequence.autosp_fusion",
    "LlavaFusionAdapter": "deepspeed.sequence.autosp_fusion",
    "InternVLFusionAdapter": "deepspeed.sequence.autosp_fusion",
    "Qwen2VLFusionAdapter": "deepspeed.sequence.autosp_fusion",
}

__getattr__, __dir__ = lazy_package(__name__, _NAMES)
