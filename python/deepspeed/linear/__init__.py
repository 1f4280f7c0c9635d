"""Linear layers for LoRA whose base weights are shared by ranks, rest on the host, or are small floats."""

from deepspeed.registry import lazy_package

_NAMES = {
    "Init": "deepspeed.linear.context_manager",
    "init_lora": "deepspeed.linear.context_manager",
    "LoRAConfig": "deepspeed.linear.config",
    "QuantizationConfig": "deepspeed.linear.config",
    "OptimizedLinear": "deepspeed.linear.optimized_linear",
    "LoRAOptimizedLinear": "deepspeed.linear.optimized_linear",
    "QuantizedLinear": "deepspeed.linear.optimized_linear",
    "QuantizedParameter": "deepspeed.linear.quantization",
}

__getattr__, __dir__ = lazy_package(__name__, _NAMES)
