"""``param.ds_tensor``: this rank's slice of a sharded parameter, as users see it.

The slice lies in memory that other ranks read, at an offset all of them know, so it cannot move. What users get is a
tensor over that memory; whatever they do to the tensor itself (``.data = ``, ``set_``, ``resize_``), the slice stays.
"""

import torch

from deepspeed.zero.parameters.released_data import run_plainly

# Every access makes a new method-wrapper: compare with ==.
_data_getter, _data_setter = torch.Tensor.data.__get__, torch.Tensor.data.__set__


def _writes(func):
    """Whether the operation writes into its first argument."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", *_IN_PLACE)


_VIEWS = ("__getitem__", "narrow", "view", "view_as", "reshape", "detach", "flatten", "unsqueeze", "select")
_IN_PLACE = tuple(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"))


class OwnSlice(torch.Tensor):
    """A view of the slice. ``tensor.data = values`` and ``tensor.set_(values)`` copy into it, at once; what has another
    shape, or cannot be copied, is a ValueError. Results of operations are plain tensors, apart from views of it."""

    _keep = _before = None

    @classmethod
    def of(cls, shard, name, keep=None, before=None, **attributes):
        """``keep(values)`` writes a slice of which ``shard`` is a copy. ``before()``: called before each write, it waits
        until other ranks do not read. The view gets the ``attributes``."""
        view = shard.detach().as_subclass(cls)
        view.__dict__.update(_slice=shard, _slice_name=name, _keep=keep, _before=before, **attributes)
        return view

    def shows(self, shard):
        """Whether this is still a view of ``shard``, all of it."""
        with torch._C.DisableTorchFunction():
            same_memory = self.data_ptr() == shard.data_ptr() and self.device == shard.device
            return same_memory and self.dtype == shard.dtype and self.shape == shard.shape

    @torch.no_grad()
    def take(self, values):
        """The slice takes ``values``, converted to its dtype."""
        shard = self._slice
        if not torch.is_tensor(values) or values.shape != shard.shape:
            given = tuple(values.shape) if torch.is_tensor(values) else type(values).__name__
            raise ValueError(
                f"parameter '{self._slice_name}': this rank's slice has shape {tuple(shard.shape)}, padding included, "
                f"and cannot take {given}. For the whole parameter use deepspeed.zero.GatheredParameters"
            )
        if self._before is not None:
            self._before()
        shard.copy_(values)
        if self._keep is not None:
            self._keep(shard)

    def set_(self, source=None, *args, **kwargs):
        """A tensor instead of a storage is copied into the slice, too."""
        if torch.is_tensor(source) and not args and not kwargs:
            self.take(source)
            return self
        return super().set_(*(() if source is None else (source,)), *args, **kwargs)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == _data_setter:
            return args[0].take(args[1])
        if func == _data_getter:  # torch would not count writes to .data, and the next forward asks for these
            view = run_plainly(torch.Tensor.detach, args, {})
            return cls.of(view, args[0]._slice_name, args[0]._keep, args[0]._before)
        written = [one for one in (args[0] if args else None, kwargs.get("out")) if isinstance(one, OwnSlice)]
        if written and (_writes(func) or "out" in kwargs) and written[-1]._before is not None:
            written[-1]._before()
        result = run_plainly(func, args, kwargs)
        if written and type(result) is torch.Tensor and getattr(func, "__name__", "") in _VIEWS:
            return cls.of(result, written[0]._slice_name, before=written[0]._before)
        return result

    def _plain(self):
        return self._slice.detach().clone()

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self._plain())

    def __reduce_ex__(self, protocol):
        return self._plain().__reduce_ex__(protocol)
