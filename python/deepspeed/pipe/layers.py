"""Layers of a pipeline before they are built: each rank builds its own ones only."""

import functools

import torch
from torch import nn

from deepspeed.log import logger
from deepspeed.pipe.instructions import call_to_str
from deepspeed.utils.init_on_device import OnDevice
from deepspeed.utils.random_state import RandomState


class LayerSpec:
    """``LayerSpec(nn.Linear, 4, 4, bias=False)``: a module that is built later, on the ranks that need it."""

    def __init__(self, typename, *module_args, **module_kwargs):
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(
                f"LayerSpec builds torch.nn.Module classes, not {typename!r}; pass functions as they are"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self):
        return call_to_str(self.typename.__name__, *self.module_args, **self.module_kwargs)

    def build(self, log=False):
        """The module."""
        if log:
            logger.info(f"building {self!r}")
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that appears several times, under one ``key``: its weights are one set.

    forward_fn: ``forward_fn(module, inputs)`` instead of the module's own call, for this appearance.
    tied_weight_attr: the weights that are kept equal where stages have copies; dots lead into submodules.
    """

    def __init__(
        self,
        key,
        typename,
        *module_args,
        forward_fn=None,
        tied_weight_attr=["weight"],  # noqa: B006 (published; never changed)
        **module_kwargs,
    ):
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


def as_layers(layers):
    """The list that ``PipelineModule(layers)`` stands for; TypeError for what is no layer."""
    layers = list(layers)  # an nn.Sequential, too
    for number, layer in enumerate(layers):
        if isinstance(layer, type) or not (isinstance(layer, LayerSpec) or callable(layer)):
            raise TypeError(
                f"layer {number} of the pipeline is {layer!r}: layers are modules, LayerSpec(class, ...) or functions"
            )
    return layers


def class_name(layer):
    """The name that ``type:REGEX`` is compared with, and that errors show."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def describe(number, layer):
    """``"layer 3 (Linear)"``."""
    return f"layer {number} ({class_name(layer)})"


def call_of(layer, module):
    """The callable of ``layer``. ``module``: the one built from it, or None for a function."""
    if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
        return functools.partial(layer.forward_fn, module)
    return layer if module is None else module


def built_on_meta(spec):
    """The module without storage; with it, for a moment, where a class cannot be built so. Random numbers go on as if
    nothing had been built."""
    with RandomState().replay():
        try:
            with OnDevice(dtype=torch.float32, device="meta"):
                return spec.build()
        except Exception:
            return spec.build()  # whatever it says now is the user's own error


def count_parameters(layer):
    """Elements of trainable parameters."""
    module = built_on_meta(layer) if isinstance(layer, LayerSpec) else layer
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
