"""Logits of the words that a rank has, where ranks share the vocabulary (``tensor_parallel.vocab_parallel_lm_head``).

A model treats them as any tensor. Its loss, ``torch.nn.functional.cross_entropy``, is computed from the ranks' slices,
and so is the sum of all logits. Functions that treat each logit alone and those that choose tokens give slices, too.
Every other function gets the logits of all words, for which all ranks of the group have to call it.
"""

import torch
from torch.nn import functional as F

from deepspeed._compat import as_subclass
from deepspeed._native import _C
from deepspeed.log import warning_once
from deepspeed.sequence.cross_entropy import losses_of, reduced
from deepspeed.utils.param_cut import join_over

_EACH_ALONE = frozenset(
    "float double half bfloat16 to type type_as contiguous clone detach detach_ cpu cuda requires_grad_ tanh neg mul "
    "mul_ div div_ true_divide __mul__ __rmul__ __truediv__ __imul__ __itruediv__ __neg__ retain_grad".split()
)
_TOKENS = frozenset("__getitem__ view reshape flatten transpose squeeze unsqueeze".split())
_TOLD = frozenset(
    "dim size stride numel nelement element_size is_floating_point is_complex is_contiguous data_ptr ndimension "
    "register_hook __repr__ __str__ __format__ __len__ __hash__ get_device storage untyped_storage is_shared "
    "has_names _is_view backward".split()
)
_INDICES = (int, slice, torch.Tensor)
_TURNED = ("T", "mT", "H", "mH")  # attributes


class VocabLogits(torch.Tensor):
    """A tensor ``[..., words of this rank]``, which is also what its ``shape`` says. ``words``: the ``VocabSlice``;
    ``cut``: the ``TensorCut`` of the vocabulary; ``overwrite``: backward of the loss writes the gradient over the
    logits."""

    @classmethod
    def of(cls, tensor, words, cut, overwrite=False):
        """``tensor`` as logits of ``words``."""
        made = as_subclass(tensor, cls)
        made.words, made.cut, made.overwrite = words, cut, overwrite
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunction():
            first = args[0] if args else kwargs.get("input")
            if (name in _TOLD or name == "__get__" and func.__self__.__name__ not in _TURNED) and isinstance(
                first, cls
            ):
                return _alike(func(*args, **kwargs), first)
            if func is F.cross_entropy and isinstance(first, cls):
                made = _loss(*args, **kwargs)
                if made is not None:
                    return made
            if name == "sum" and isinstance(first, cls) and len(args) == 1 and not kwargs:
                return _C.reduce_over_ranks(first.words.ranks, as_subclass(first, torch.Tensor).sum())
            if isinstance(first, cls) and _keeps(name, first, args[1:], kwargs):
                if name in ("view", "reshape"):
                    args = (first, *_local_shape(first, args[1:]))
                return _alike(func(*args, **kwargs), first)
            warning_once(
                f"logits of a cut vocabulary: {name or func} gets the logits of all words, which every rank gathers. "
                "torch.nn.functional.cross_entropy(logits, targets) and deepspeed.sequence.vocab_parallel_ops do not "
                "need them"
            )
            return func(*_with_all_words(args), **_with_all_words(kwargs))

    def whole(self):
        """The logits of all words, on every rank of the group, with gradients. All of them call it."""
        with torch._C.DisableTorchFunction():
            return _whole(self)


def _whole(logits):
    return join_over(logits.words.group, logits.cut, as_subclass(logits, torch.Tensor), -1)


def _alike(made, first):
    """Tensors as wide as ``first`` are logits of the same words."""
    is_logits = (
        isinstance(made, torch.Tensor) and made.dim() > 0 and made.shape[-1] == first.words.stop - first.words.start
    )
    return VocabLogits.of(made, first.words, first.cut, first.overwrite) if is_logits else made


def _with_all_words(given):
    if isinstance(given, VocabLogits):
        return _whole(given)
    if isinstance(given, dict):
        return {key: _with_all_words(value) for key, value in given.items()}
    if isinstance(given, (tuple, list)):
        return type(given)(map(_with_all_words, given)) if type(given) in (tuple, list) else given
    return given


def _keeps(name, logits, others, kwargs):
    """Whether a function gives this rank's part of what it would give for the logits of all words."""
    tensors = [one for one in (*others, *kwargs.values()) if isinstance(one, torch.Tensor)]
    if name in _EACH_ALONE:
        return all(one.dim() == 0 for one in tensors)
    if name not in _TOKENS or kwargs:
        return False
    last = logits.dim() - 1
    if name == "__getitem__":
        return _leaves_words(others[0] if isinstance(others[0], tuple) else (others[0],), last)
    if name in ("view", "reshape"):
        return _local_shape(logits, others) is not None
    if name == "flatten":
        return len(others) == 2 and others[1] % logits.dim() != last
    if name == "transpose":
        return last not in (others[0] % logits.dim(), others[1] % logits.dim())
    return bool(others) and (others[0] % (logits.dim() + (name == "unsqueeze"))) < last + (name == "unsqueeze")


def _leaves_words(index, last):
    """Whether an index takes tokens, of which it takes all words."""
    if any(isinstance(one, bool) or not (one is None or one is Ellipsis or isinstance(one, _INDICES)) for one in index):
        return False
    taken = sum(0 if one is None or one is Ellipsis else one.dim() if _is_mask(one) else 1 for one in index)
    if isinstance(index[-1], slice) and index[-1] == slice(None):
        return taken <= last + 1
    return taken <= last and not any(one is Ellipsis for one in index[:-1])


def _is_mask(one):
    return isinstance(one, torch.Tensor) and one.dtype is torch.bool


def _local_shape(logits, shape):
    """The shape for this rank's logits where a script asks for ``shape`` of those of all words; None: the words are not
    the last dimension of it."""
    shape = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else list(shape)
    width = logits.words.stop - logits.words.start
    if not shape or not all(isinstance(one, int) for one in shape) or shape[-1] not in (width, logits.words.words, -1):
        return None
    if shape[-1] == -1:
        others = 1
        for one in shape[:-1]:
            others *= one
        if others * width != logits.numel():
            return None
    return [*shape[:-1], width]


def _loss(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    """``torch.nn.functional.cross_entropy`` of logits in slices; None where it needs those of all words: for class
    weights, for targets that are probabilities, and where the words are not the last dimension."""
    plain = weight is None and size_average is None and reduce is None and not target.is_floating_point()
    if not plain or isinstance(target, VocabLogits) or input.dim() > 2:
        return None
    logits = as_subclass(input, torch.Tensor)
    losses = losses_of(input.words, logits, target, ignore_index, label_smoothing, input.overwrite)
    return reduced(losses, target.ne(ignore_index), reduction).to(input.dtype)
