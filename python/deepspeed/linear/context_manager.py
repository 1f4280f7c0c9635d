"""Models whose linear layers are made as ``OptimizedLinear``, without changing them."""

import collections
import dataclasses

import torch

from deepspeed.linear.config import TARGET_MODS
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear, OptimizedLinear, QuantizedLinear
from deepspeed.log import logger


class _Makes(type):
    """The type of the class that stands for ``torch.nn.Linear`` inside of ``Init``: it makes other layers, and subclasses
    and ``isinstance`` see the class that it stands for."""

    def __call__(cls, *args, **kwargs):
        return cls.make(*args, **kwargs) if "make" in vars(cls) else super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance):
        return isinstance(instance, cls.__mro__[1]) if "make" in vars(cls) else super().__instancecheck__(instance)

    def __subclasscheck__(cls, other):
        return issubclass(other, cls.__mro__[1]) if "make" in vars(cls) else super().__subclasscheck__(other)


class Init:
    """A context in which ``torch.nn.Linear(...)`` makes layers for LoRA, and with small floats, that are ordinary linear
    layers until ``init_lora(model)``: a model is built in it and its weights are loaded, as by transformers'
    ``from_pretrained``.

    Args:
        lora_config: a ``LoRAConfig``; None: no LoRA. quant_config: a ``QuantizationConfig``; None: base weights stay as
            they are. With neither, the context changes nothing.

    Raises RuntimeError inside of another one.
    """

    def __init__(self, lora_config=None, quant_config=None):
        self.lora_config, self.quant_config = lora_config, quant_config
        self._replaced = None

    def _class(self, linear):
        lora, quantization = self.lora_config, self.quant_config
        if lora is not None:
            lora = dataclasses.replace(lora, delay_lora_init=True)

        def make(in_features, out_features, bias=True, device=None, dtype=None):
            common = {
                "bias": bias,
                "device": torch.empty(0).device if device is None else device,
                "dtype": torch.get_default_dtype() if dtype is None else dtype,
                "linear_cls": linear,
            }
            if lora is None:
                common.update(quantization_config=quantization, delayed=True)
                return QuantizedLinear(in_features, out_features, **common)
            common.update(lora_config=lora, quantization_config=quantization)
            return OptimizedLinear(in_features, out_features, **common)

        return _Makes("Linear", (linear,), {"__module__": linear.__module__, "make": staticmethod(make)})

    def __enter__(self):
        if isinstance(torch.nn.Linear, _Makes):
            raise RuntimeError("deepspeed.linear.Init is open already, and does not nest: leave the outer one first")
        self._replaced = torch.nn.Linear
        if self.lora_config is not None or self.quant_config is not None:
            torch.nn.Linear = self._class(self._replaced)
        return self

    def __exit__(self, *_):
        torch.nn.Linear = self._replaced
        return False


def _targets(model):
    """``[(name, layer)]`` of the layers of ``model`` that are to get LoRA. ValueError where target_mods name none."""
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, LoRAOptimizedLinear) and not module.disabled and not module.initialized
    ]
    wanted = [(name, layer) for name, layer in layers if any(mod in name for mod in layer.lora_config.target_mods)]
    if wanted or not layers:
        return wanted
    mods = layers[0][1].lora_config.target_mods
    if mods != list(TARGET_MODS):
        raise ValueError(
            f"init_lora: no layer of the model has one of target_mods {mods} in its name; there are "
            f"{', '.join(name for name, _ in layers[:5])}{', ...' if len(layers) > 5 else ''}"
        )
    logger.info("init_lora: no layer has a name of transformers' decoders, so that all %d get LoRA", len(layers))
    return layers


def _tied(model):
    """The ids of parameters that several modules of ``model`` have."""
    found = collections.Counter(id(param) for module in model.modules() for param in module.parameters(recurse=False))
    return {key for key, count in found.items() if count > 1}


def init_lora(model):
    """Freezes ``model``, and gives its layers made with ``delay_lora_init`` or in ``Init`` their LoRA and the form in
    which their base weights rest. Only the matrices of LoRA are trained afterwards. Returns ``model``.

    Layers whose names have none of ``LoRAConfig.target_mods`` become ordinary frozen layers. Without a ``LoRAConfig`` all
    are quantized but those whose weight another module has, too, such as an embedding. Where base weights are shared
    every rank calls it. Raises ValueError where ``target_mods`` name no layer, or a weight was not loaded.
    """
    for param in model.parameters():
        param.requires_grad_(False)
    wanted = _targets(model)
    chosen = {id(layer) for _, layer in wanted}
    tied = _tied(model)
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and id(module.weight) not in tied:
            module.init_lora()
        elif isinstance(module, LoRAOptimizedLinear) and not module.initialized and id(module) not in chosen:
            module.disable()
    seen = on_host = 0
    for name, layer in wanted:
        numel, share = layer.input_dim * layer.output_dim, layer.lora_config.host_share()
        seen += numel
        moves = on_host + numel / 2 <= share * seen  # the share so far comes as near as whole weights allow
        on_host += numel if moves else 0
        try:
            layer.init_lora(on_host=moves)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    for module in model.modules():
        if isinstance(module, LoRAOptimizedLinear) and module.initialized:
            for matrix in (module.lora_weight_1, module.lora_weight_2):
                matrix.requires_grad_(True)
    return model
