"""``sequence.tile``: a model's MLPs and its loss, tile by tile, without a change of its code."""

import contextlib
import functools
import importlib
import re

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.sequence.loss import IGNORED
from deepspeed.sequence.tiled import TiledFusedLogitsLoss, TiledMLP
from deepspeed.zero.gathers.gathered import GatheredParameters
from deepspeed.zero.parameters.sharded_parameter import is_sharded

_MLP = re.compile(r"(^|[._])(mlp|ffn|feed_?forward)$|(MLP|FFN|FeedForward)$", re.IGNORECASE)
_PROBE = (2, 5)  # batch, tokens
# Keys of configurations that change logits or losses.
_BETWEEN = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_router_logits")


def tile(model, mlp="auto", loss="auto"):
    """Makes parts of ``model`` work tile by tile along the sequence, in place; returns the names of those parts.

    ``mlp``: "auto" for modules that are called like one and are proven to treat every token alone; a list of names; or
    None. A tile has as many tokens as tokens have features. ``loss``: "auto" for the head and the cross entropy of a
    transformers model for causal language modelling, which then returns no logits when it is given labels; or None.
    Call it before ``deepspeed.initialize``. ValueError for a module that is named and does not treat every token alone.
    """
    if mlp not in ("auto", None) and not isinstance(mlp, (list, tuple)):
        raise ValueError(f'mlp is {mlp!r}: it must be "auto", a list of names of modules, or None')
    if loss not in ("auto", None):
        raise ValueError(f'loss is {loss!r}: it must be "auto" or None')
    return cut(model, proven(model, mlp), loss == "auto" and has_known_loss(model))


def proven(model, mlp, believe=False):
    """``{name: features of a token}`` of modules that treat every token alone. ``believe``: without a proof."""
    found = {}
    for name, module in _candidates(model, mlp):
        width = _width(module)
        problem = "it has no linear layer" if width is None else None if believe else _not_tokenwise(module, width)
        if problem is None:
            found[name] = width
        elif mlp != "auto":
            raise ValueError(f"'{name}' ({type(module).__name__}) cannot be cut along the sequence: {problem}")
    return found


def cut(model, widths, loss):
    """``widths``: of modules by name; ``loss``: whether the loss is cut, too. Returns the names of what is cut."""
    for name, width in widths.items():
        module = model.get_submodule(name)
        module.forward = functools.partial(_tiled_mlp, module, module.forward, width)
    if loss:
        model.forward = functools.partial(_tiled_loss, model, model.forward)
    return [*widths, *(["loss"] if loss else [])]


def _candidates(model, mlp):
    if mlp is None:
        return []
    if mlp != "auto":
        return [(name, model.get_submodule(name)) for name in mlp]
    found, inside = [], None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if name and (_MLP.search(name) or _MLP.search(type(module).__name__)):
            found.append((name, module))
            inside = f"{name}."
    return found


def _width(module):
    """Features of a token: the input width of the first linear layer."""
    return next((one.in_features for one in module.modules() if isinstance(one, torch.nn.Linear)), None)


@contextlib.contextmanager
def _evaluating(module):
    before = {one: one.training for one in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for one, training in before.items():
            one.training = training


def _not_tokenwise(module, width):
    """None where ``module`` treats every token of ``[batch, tokens, width]`` alone, as far as random tokens show; else
    what is wrong."""
    params = list(module.parameters())
    if any(map(is_sharded, params)):  # every rank asks for the same modules in the same order
        with GatheredParameters(params):
            return _probed(module, width)
    if params[0].is_meta:  # a step is planned, or the model has no values yet
        return None if get_accelerator()._name == "meta" else "it has no values yet (device meta)"
    return _probed(module, width)


def _probed(module, width):
    param = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*_PROBE, width, generator=generator).to(param.device, param.dtype)
    with torch.no_grad(), _evaluating(module):
        try:
            whole = module(x)
            alone = [[module(x[row : row + 1, at : at + 1]) for at in range(_PROBE[1])] for row in range(_PROBE[0])]
        except Exception as error:  # modules with another kind of input may raise anything
            return f"called with a tensor of shape {tuple(x.shape)} it raises {type(error).__name__}: {error}"
    if not torch.is_tensor(whole) or whole.shape[:2] != x.shape[:2]:
        return "it does not return a tensor with an entry for each token"
    alone = torch.cat([torch.cat(row, dim=1) for row in alone])
    bound = 1e-4 if param.dtype in (torch.float32, torch.float64) else 5e-2
    if not torch.allclose(whole.float(), alone.float(), rtol=bound, atol=bound * float(whole.abs().max())):
        return "tokens change the results of others"
    return None


def _tiles(length, width):
    return max(1, -(-length // width))


def _tiled_mlp(module, forward, width, x, *args, **kwargs):
    if args or kwargs or not torch.is_tensor(x) or x.dim() < 2:
        return forward(x, *args, **kwargs)
    shards = _tiles(x.shape[-2], width)
    if shards == 1:
        return forward(x)
    return TiledMLP.apply(lambda _, part: forward(part), module, x, shards, list(module.parameters()))


# ---- losses ----------------------------------------------------------------------------------------------------------
def has_known_loss(model):
    """A model for causal language modelling whose head is one linear layer, and nothing is between it and the loss."""
    config = getattr(model, "config", None)
    known = type(model).__name__.endswith("ForCausalLM") and callable(getattr(model, "get_decoder", None))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    plain = not any(getattr(config, key, None) for key in _BETWEEN)
    return known and isinstance(head, torch.nn.Linear) and plain


def _cross_entropy(reduction):
    def loss(head, x, labels):
        logits = head(x).float()
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction=reduction
        )

    return loss


def _tiled_loss(model, forward, *args, **kwargs):
    labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
    if labels is None and shifted is None:
        return forward(*args, **kwargs)
    count = kwargs.get("num_items_in_batch")
    own = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")
    kwargs = {name: value for name, value in kwargs.items() if name not in own}
    if shifted is None:
        shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    hidden = model.get_decoder()(*args, **kwargs)[0]
    head, reduction = model.get_output_embeddings(), "mean" if count is None else "sum"
    # A tile's logits are about as many as the hidden states of the whole.
    tokens = max(1, hidden.shape[1] * hidden.shape[2] // head.out_features)
    loss = TiledFusedLogitsLoss.apply(
        _cross_entropy(reduction), head, hidden, shifted, None, _tiles(hidden.shape[1], tokens),
        list(head.parameters()), reduction,
    )  # fmt: skip
    outputs = importlib.import_module("transformers.modeling_outputs")
    return outputs.CausalLMOutputWithPast(loss=loss if count is None else loss / count)
