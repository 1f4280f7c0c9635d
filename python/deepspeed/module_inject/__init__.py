"""Layers of a model that is not changed by its user, replaced by layers of this library: experts spread over ranks,
weights cut among ranks."""

from deepspeed.registry import lazy_package

_NAMES = {
    "explain": "deepspeed.module_inject.cut_report",
    "AutoTP": "deepspeed.module_inject.auto_tp",
    "AutoTPConfig": "deepspeed.module_inject.autotp_config",
    "AutoTPPresets": "deepspeed.module_inject.autotp_config",
    "PartitionType": "deepspeed.module_inject.autotp_config",
    "TPLayerSpec": "deepspeed.module_inject.autotp_config",
    "merge_autotp_configs": "deepspeed.module_inject.autotp_config",
    "ReplaceWithTensorSlicing": "deepspeed.module_inject.tensor_slicing",
    **dict.fromkeys(
        (
            "LinearAllreduce",
            "LinearLayer",
            "SubParamLinearAllreduce",
            "SubParamLinearLayer",
            "is_autotp_training_mode",
            "set_autotp_mode",
        ),
        "deepspeed.module_inject.layers",
    ),
}

__getattr__, __dir__ = lazy_package(__name__, _NAMES)
