"""Results of operators on meta tensors that an earlier call has told."""

import torch

from deepspeed._compat import memory_of, storage_of
from deepspeed.zero.nested import tensors_in


def _metadata(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype


def _key(values):
    """A form of arguments that is equal for tensors of equal metadata. TypeError if there is none."""
    made = []
    for one in values:
        if isinstance(one, torch.Tensor):
            if not one.is_meta:
                raise TypeError
            made += (torch.Tensor, *_metadata(one))
        elif isinstance(one, (tuple, list)):
            made.append(_key(one))
        else:
            made += (type(one), one)
    return tuple(made)


def _is_plain(tensor):
    """Whether ``torch.empty_strided`` makes the same tensor from its metadata."""
    held = storage_of(tensor).nbytes()
    extent = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    return tensor.is_meta and held == extent * tensor.element_size() and tensor.storage_offset() == 0


class KnownResults:
    """Runs operations of meta tensors. An operation whose results have memory of their own runs once for each metadata
    of its arguments: torch 2 computes many shapes in Python, which takes 5 ms for the loss of a tile. ``small``: names
    of operators that torch cannot run on meta (``small_runs``). ``flag``: the value of flags that the host asks for;
    ``asked``: whether it has asked."""

    def __init__(self, flag=True):
        self.results, self.pure, self.key, self.small = {}, {}, None, set()
        self.flag, self.asked = flag, False

    def run(self, func, args, kwargs, compute=lambda func, args, kwargs: func(*args, **kwargs)):
        """``compute``: runs what is not known. ``key``: stands for this operation and its metadata afterwards; None:
        it has to run every time."""
        self.key = None
        if func not in self.pure:
            schema = func._schema
            self.pure[func] = all(one.alias_info is None for one in (*schema.arguments, *schema.returns))
        if not self.pure[func]:
            return compute(func, args, kwargs)
        try:
            key = func, _key(args), _key(kwargs.items())
            found = self.results.get(key)
        except TypeError:  # of a tensor with values, or an argument without a hash
            return compute(func, args, kwargs)
        if found is not None:
            self.key = key
            return self._made(found)
        out = compute(func, args, kwargs)
        given = set(map(memory_of, tensors_in((args, kwargs))))
        made = tensors_in(out)
        own = set(map(memory_of, made)) - given
        if len(own) == len(made) == (len(out) if isinstance(out, tuple) else 1) and all(map(_is_plain, made)):
            found = tuple(map(_metadata, made))
            self.results[key] = found if isinstance(out, tuple) else found[0]
            self.key = key
        return out

    def _made(self, found):
        if isinstance(found[0], torch.Size):
            size, stride, dtype = found
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return tuple(map(self._made, found))
