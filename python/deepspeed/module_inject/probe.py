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


def kind_of(block):
    """What two blocks have in common of which one tells about the other: class, names and shapes of its parts."""
    shapes = tuple((name, tuple(getattr(one, "ds_shape", one.shape))) for name, one in block.named_parameters())
    return type(block), tuple((name, type(one)) for name, one in block.named_modules()), shapes


def calls_of(model, blocks):
    """``{kind: (args, kwargs)}`` of one block of each kind, from one run of a copy of the model. Other blocks of the
    kind give what the first one gave. NotAnalysed with the cause where the model does not run on the probe."""
    calls, results, twin = {}, {}, twin_of(model)
    for name, block in blocks.items():
        own = twin.get_submodule(name)
        own.forward = functools.partial(_record, own.forward, kind_of(block), calls, results)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            args, kwargs = sample_of(model)
            WholeRun(twin, (args, kwargs))
    except Exception as error:
        if not calls or any(kind_of(block) not in calls for block in blocks.values()):
            raise NotAnalysed(
                f"{type(model).__name__} does not run on a probe ({type(error).__name__}: {error}): give the model a "
                "property dummy_inputs, a dict of arguments that it runs with"
            ) from error
    return calls


def _record(forward, kind, calls, results, *args, **kwargs):
    if kind not in calls:
        calls[kind] = with_tensors((args, kwargs), lambda _, tensor: tensor.detach().clone())
        results[kind] = forward(*args, **kwargs)
    return results[kind]


def sample_of(model):
    """``(args, kwargs)`` of a small call: the model's ``dummy_inputs``, else tokens for a model with embeddings or with
    an argument ``input_ids``, else features for its first linear layer."""
    given = getattr(model, "dummy_inputs", None)
    accepted = inspect.signature(model.forward).parameters
    more = {"use_cache": False} if "use_cache" in accepted else {}
    if isinstance(given, dict):
        known = {name: one for name, one in given.items() if name in accepted}
        return (), {**with_tensors(known or given, lambda _, tensor: tensor.cpu()), **more}
    words = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
    generator = torch.Generator().manual_seed(0)
    if words or "input_ids" in accepted:
        tokens = torch.randint(0, min(words or [2]), (_SAMPLES, _TOKENS), generator=generator)
        return ((), {"input_ids": tokens, **more}) if "input_ids" in accepted else ((tokens,), more)
    linear = next((one for one in model.modules() if is_linear(one)), None)
    if linear is None:
        raise ValueError("it has no linear layer")
    return (torch.randn(_SAMPLES, _TOKENS, features(linear)[0], generator=generator),), more
