"""``OnDevice``: build a module directly on a device and in a dtype, without a first copy elsewhere; and copies of
modules without values."""

import collections
import copy
import importlib

import torch

from deepspeed._compat import VERSION

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "rand", "randn", "arange", "eye", "linspace")


class OnDevice:
    """Context: new floating tensors get ``dtype``, and all new tensors go to ``device`` (``"meta"``: no storage).

    >>> with OnDevice(dtype=torch.bfloat16, device="meta"):
    ...     model = torch.nn.Linear(1 << 20, 1 << 20)   # costs no memory

    Factory calls that name a device or a dtype themselves keep theirs. Not for several threads at once: torch's
    factories are replaced while the context is open.
    """

    def __init__(self, dtype, device="meta", enabled=True):
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._saved = None

    def fp_tensor_constructor(self, fn, target_fp_dtype):
        """A factory that calls ``fn`` on our device and turns its floating results into ``target_fp_dtype``."""

        def construct(*args, **kwargs):
            if kwargs.get("device") is None:
                kwargs["device"] = self.device
            made = fn(*args, **kwargs)
            if made.is_floating_point() and kwargs.get("dtype") is None:
                made = made.to(target_fp_dtype)
            return made

        return construct

    def get_new_tensor_fn_for_dtype(self, dtype):
        """``torch.Tensor.__new__`` for our device: what ``torch.Tensor(2, 3)`` calls."""

        def new_tensor(cls, *args, **kwargs):
            if cls is not torch.Tensor:
                return self._saved["__new__"](cls, *args, **kwargs)
            sizes = args or (0,)
            if all(isinstance(one, (int, torch.Size)) for one in sizes):
                return self._saved["empty"](*sizes, dtype=dtype, device=self.device)
            return self._saved["__new__"](cls, *args, **kwargs).to(self.device, dtype)  # made from data

        return new_tensor

    def __enter__(self):
        if not self.enabled:
            return self
        if self._saved is not None:
            raise RuntimeError("this OnDevice context is open already; use one object per `with` statement.")
        if VERSION >= (2, 12):
            # Initializers of meta tensors import it, and while it is imported it looks at the functions replaced here.
            importlib.import_module("torch._dynamo")
        self._saved = {name: getattr(torch, name) for name in _FACTORIES}
        self._saved["__new__"] = torch.Tensor.__new__
        for name in _FACTORIES:
            setattr(torch, name, self.fp_tensor_constructor(self._saved[name], self.dtype))
        torch.Tensor.__new__ = self.get_new_tensor_fn_for_dtype(self.dtype)
        return self

    def __exit__(self, exc_type, exc_value, traceback):
        if self._saved is None:
            return False
        saved, self._saved = self._saved, None
        torch.Tensor.__new__ = saved.pop("__new__")
        for name, function in saved.items():
            setattr(torch, name, function)
        return False


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copy_on_meta(model, dtype=None, hooks=True, shared=()):
    """A copy of ``model`` without values, its floating parameters of ``dtype`` where that is one; with ``hooks=False``
    without the hooks of its modules, which may refer to an engine. Objects that are ``shared`` are not copied."""
    memo = {id(one): one for one in shared}
    for module in model.modules() if not hooks else ():
        for name in _HOOKS:
            if name in vars(module):
                memo[id(vars(module)[name])] = collections.OrderedDict()
    for tensor in (*model.parameters(), *model.buffers()):
        shape = getattr(tensor, "ds_shape", tensor.shape)  # a sharded one looks empty
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        wanted = dtype if is_parameter and dtype is not None and tensor.is_floating_point() else tensor.dtype
        bare = torch.empty(shape, dtype=wanted, device="meta")
        memo[id(tensor)] = torch.nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
        for name, value in vars(tensor).items():  # marks, such as those of experts; not what an engine keeps there
            if isinstance(value, (bool, int, float, str)) and not name.lstrip("_").startswith("ds_"):
                setattr(memo[id(tensor)], name, value)
    return copy.deepcopy(model, memo)
