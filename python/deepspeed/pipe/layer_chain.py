"""All layers of a pipeline, of which a rank builds some, without storage."""

from torch import nn

from deepspeed.pipe.layers import LayerSpec, TiedLayerSpec, built_on_meta, call_of


def all_layers(module):
    """``{name: (module or None, callable)}`` of every layer of the ``PipelineModule``, in order, by the names that
    their modules have on the rank that owns them. Tied layers and those of specs have no values."""
    found, tied = {}, {}
    for number, layer in enumerate(module._layer_specs):
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in tied:
                tied[layer.key] = built_on_meta(layer)
            made = tied[layer.key]
        else:
            made = built_on_meta(layer) if isinstance(layer, LayerSpec) else layer
        is_module = isinstance(made, nn.Module)
        found[str(number)] = (made if is_module else None, call_of(layer, made if is_module else None))
    return found
