"""Runs a model once on a few tokens, and keeps what its blocks were called with."""

import functools
import inspect

import torch
from torch import nn

from deepspeed.module_inject.block_twin import NotAnalysed, WholeRun, features, is_linear, twin_of, with_tensors

_SAMPLES, _TOKENS = 2, 5


def blocks_of(model):
    """``{name: block}`` of the parts of a model that are cut one by one: the elements of its outermost lists of modules
    that have linear layers inside. The model itself, called "", where it has no such list."""
    if isinstance(model, LayerChain):
        return {
            name: one
            for name, one in model.named_children()
            if not is_linear(one) and any(map(is_linear, one.modules()))
        }
    found = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{one}.") for one in found):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) and not _is_leaf_list(module):
            found.update({f"{name}.{index}".lstrip("."): one for index, one in module.named_children()})
    found = {name: one for name, one in found.items() if any(map(is_linear, one.modules()))}
    return found or {"": model}


def _is_leaf_list(module):
    """Whether elements are layers rather than blocks: some element is a linear layer, or they differ in kind."""
    children = [one for one in module.children() if any(map(is_linear, one.modules()))]
    return not children or any(map(is_linear, children)) or len({type(one) for one in children}) > 1


class LayerChain(nn.Module):
    """The layers of a pipeline one behind the other, of which a rank has some. They need no values. ``layers``:
    ``{name: (module, or None for a function; what is called)}``; ``sample``: inputs of the first one, None: tokens or
    features."""

    advice = "pass profile_input=, inputs of a micro-batch, to PipelineModule"

    def __init__(self, layers, sample=None):
        super().__init__()
        self.calls, self.sample = [call for _, call in layers.values()], sample
        for name, (module, _) in layers.items():
            if module is not None:
                self.add_module(name, module)

    def forward(self, x):
        for call in self.calls:
            x = call(x)
        return x


def kind_of(block):
    """The class of a block, and the names and shapes of its parts: blocks that have these in common are cut alike."""
    shapes = tuple((name, tuple(getattr(one, "ds_shape", one.shape))) for name, one in block.named_parameters())
    return type(block), tuple((name, type(one)) for name, one in block.named_modules()), shapes


def calls_of(model, blocks):
    """``{kind: (args, kwargs)}`` of one block of each kind, from one run of a copy of the model. Other blocks of the
    kind give what the first one gave. NotAnalysed with the cause where the model does not run on the probe."""
    calls, results, twin, problem = {}, {}, twin_of(model), "there is nothing that it could be called with"
    for name, block in blocks.items():
        own = twin.get_submodule(name)
        own.forward = functools.partial(_record, own.forward, kind_of(block), calls, results)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for sample in samples_of(model):
            try:
                WholeRun(twin, sample)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if all(kind_of(block) in calls for block in blocks.values()):  # what comes behind the blocks may fail
                return calls
    if calls:
        return calls
    advice = "give the model a property dummy_inputs, a dict of arguments that it runs with"
    raise NotAnalysed(f"{type(model).__name__} does not run on a probe ({problem}): {getattr(model, 'advice', advice)}")


def _record(forward, kind, calls, results, *args, **kwargs):
    if kind not in calls:
        calls[kind] = with_tensors((args, kwargs), lambda _, tensor: tensor.detach().clone())
        results[kind] = forward(*args, **kwargs)
    return results[kind]


def samples_of(model):
    """``(args, kwargs)`` of small calls, of which a model takes one: its ``dummy_inputs``; images for a model whose
    ``main_input_name`` they are; tokens; features for its first linear layer."""
    accepted = inspect.signature(model.forward).parameters
    more = {"use_cache": False} if "use_cache" in accepted else {}
    generator = torch.Generator().manual_seed(0)
    if getattr(model, "sample", None) is not None and isinstance(model, LayerChain):
        yield (with_tensors(model.sample, lambda _, tensor: tensor.cpu()),), more
        return
    given = getattr(model, "dummy_inputs", None)
    if isinstance(given, dict):
        known = {name: one for name, one in given.items() if name in accepted}
        yield (), {**with_tensors(known or given, lambda _, tensor: tensor.cpu()), **more}
    size = getattr(getattr(model, "config", None), "image_size", None)
    if getattr(model, "main_input_name", None) == "pixel_values" and size is not None:
        sides = (size, size) if isinstance(size, int) else tuple(size)
        shape = _SAMPLES, getattr(model.config, "num_channels", 3), *sides
        yield (), {"pixel_values": torch.randn(shape, generator=generator), **more}
    words = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
    tokens = torch.randint(0, min(words or [2]), (_SAMPLES, _TOKENS), generator=generator)
    if "input_ids" in accepted:
        yield (), {"input_ids": tokens, **more}
    if words:
        yield (tokens,), more
    for module in model.modules():
        if is_linear(module):
            yield (torch.randn(_SAMPLES, _TOKENS, features(module)[0], generator=generator),), more
            return
