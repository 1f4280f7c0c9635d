"""Modules of a model by their dotted names."""

import torch


def recursive_getattr(model, module_name):
    """The module or value that the dotted ``module_name`` names, such as ``"bert.encoder.layer.0"``."""
    for part in module_name.split("."):
        model = getattr(model, part)
    return model


def recursive_setattr(model, module_name, module):
    """Puts ``module`` where the dotted ``module_name`` is."""
    outer, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, outer) if outer else model, last, module)


def convert_conv1d_to_linear(model, convert_type):
    """Replaces all modules of the class ``convert_type`` (``transformers.pytorch_utils.Conv1D``, whose weight is [inputs,
    outputs]) by ``torch.nn.Linear`` with the same values, and returns ``model`` without a wrapper (``model.module``)."""
    inner = getattr(model, "module", model)
    found = {name: module for name, module in inner.named_modules() if isinstance(module, convert_type)}
    for name, module in found.items():
        inputs, outputs = module.weight.shape
        linear = torch.nn.Linear(
            inputs, outputs, bias=module.bias is not None, device=module.weight.device, dtype=module.weight.dtype
        )
        linear.weight.data = module.weight.data.t().contiguous()
        if module.bias is not None:
            linear.bias.data = module.bias.data
        recursive_setattr(inner, name, linear)
    return inner
