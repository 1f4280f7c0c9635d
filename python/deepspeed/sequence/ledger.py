"""What a training step holds in memory, found with meta tensors: each operation runs, and allocates nothing."""

import re
import weakref

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed._compat import TORCH2

PARTS = ("kept for backward", "attention", "mlp", "head and loss", "other")
KEPT, OTHER = 0, len(PARTS) - 1
_KINDS = [(1, re.compile("attn|attention")), (2, re.compile("mlp|ffn|feed_?forward|expert")), (3, re.compile("head"))]


def memory_of(tensor):
    """What tells tensors apart that share nothing: meta tensors have no address."""
    return (tensor.untyped_storage() if TORCH2 else tensor.storage())._cdata


class _Block:
    """The memory behind some tensors."""

    __slots__ = ("bytes", "holders", "keepers", "part")

    def __init__(self, size, part):
        self.bytes, self.part, self.holders, self.keepers = size, part, 0, 0


class _Kept:
    """What autograd has saved."""

    __slots__ = ("__weakref__", "gone", "moment", "tensor")

    def __init__(self, tensor, moment, gone=None):
        self.tensor, self.moment, self.gone = tensor, moment, gone


class Ledger(TorchDispatchMode):
    """A context that counts the bytes of tensors made in it, as long as somebody has them.

    A *moment* is where the step is: forward, backward or recomputation of the module of some name, numbers left out.
    ``peaks``: for each the bytes by part when they were most. ``elsewhere``: shapes of what waits for backward in
    another memory.
    """

    def __init__(self, model):
        super().__init__()
        self.blocks, self.watched, self.peaks = {}, {}, {}
        self.bytes = [0] * len(PARTS)
        self.inside, self.backward, self.moment, self.part = [], False, "forward", OTHER
        self.elsewhere = set()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._save, self._load)
        self.known = {memory_of(one) for one in (*model.parameters(), *model.buffers())}
        self.handles = []
        for name, module in model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self._entering(re.sub(r"\d+", "*", name))))
            self.handles.append(module.register_forward_hook(self._leaving))

    # ---- where the step is -------------------------------------------------------------------------------------------
    def _entering(self, name):
        def hook(module, inputs):
            self.inside.append(name)
            self._be_at("recomputation" if self.backward else "forward", name)

        return hook

    def _leaving(self, module, inputs, output):
        self.inside.pop()
        self._be_at("recomputation" if self.backward else "forward", self.inside[-1] if self.inside else "")

    def _be_at(self, what, name):
        self.moment = f"{what} of {name}" if name else what
        self.part = next((part for part, kind in _KINDS if kind.search(name)), 3 if not name else OTHER)

    def begin_backward(self):
        self.backward = True
        self._be_at("backward", "")

    # ---- what is there -----------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "_local_scalar_dense" and args[0].is_meta and args[0].dtype == torch.bool:
            # Models ask whether positions go on by one, and whether nothing is padded, to leave a mask out.
            return True
        out = func(*args, **(kwargs or {}))
        if isinstance(out, (int, float)) and func.overloadpacket.__name__ == "detach":
            return torch.tensor(out)  # torch 1.13: a number that autograd has saved as a tensor
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor)
        return out

    def _hold(self, tensor):
        key = memory_of(tensor)
        if key in self.known or id(tensor) in self.watched:
            return
        block = self.blocks.get(key)
        if block is None:
            storage = tensor.untyped_storage() if TORCH2 else tensor.storage()
            block = self.blocks[key] = _Block(storage.nbytes(), self.part)
            self._add(block, 1)
        block.holders += 1
        number = id(tensor)
        self.watched[number] = weakref.ref(tensor, lambda _: self._let_go(number, key))

    def _let_go(self, number, key):
        self.watched.pop(number, None)
        block = self.blocks[key]
        block.holders -= 1
        self._maybe_free(key, block)

    def _maybe_free(self, key, block):
        if block.holders == 0 and block.keepers == 0:
            self._add(block, -1)
            del self.blocks[key]

    def _add(self, block, sign):
        self.bytes[KEPT if block.keepers else block.part] += sign * block.bytes
        if sign > 0:
            self._note()

    def _note(self):
        if sum(self.bytes) > sum(self.peaks.get(self.moment, ())):
            self.peaks[self.moment] = list(self.bytes)

    # ---- what autograd keeps -----------------------------------------------------------------------------------------
    def _save(self, tensor):
        key = memory_of(tensor)
        if tensor.is_floating_point() and tensor.shape in self.elsewhere and key not in self.known:
            return _Kept(None, self.moment, (tensor.shape, tensor.dtype))
        kept = _Kept(tensor, self.moment)
        block = self.blocks.get(key)
        if block is not None:
            self._count_keeper(block, 1)
            number = -id(kept)
            self.watched[number] = weakref.ref(kept, lambda _: self._not_kept(number, key))
        return kept

    def _not_kept(self, number, key):
        self.watched.pop(number, None)
        block = self.blocks[key]
        self._count_keeper(block, -1)
        self._maybe_free(key, block)

    def _count_keeper(self, block, change):
        self.bytes[KEPT if block.keepers else block.part] -= block.bytes
        block.keepers += change
        self.bytes[KEPT if block.keepers else block.part] += block.bytes

    def _load(self, kept):
        if self.backward and not self.inside:
            self._be_at("backward", kept.moment.partition(" of ")[2])
        if kept.tensor is None:
            shape, dtype = kept.gone
            return torch.empty(shape, dtype=dtype, device="meta")
        return kept.tensor

    def __enter__(self):
        self.hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()
        found = super().__exit__(*error)
        self.hooks.__exit__(*error)
        return found


# ---- attention that keeps no scores ----------------------------------------------------------------------------------
class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors[:3])


class FusedAttention(TorchFunctionMode):
    """torch's ``scaled_dot_product_attention`` as its fused kernels compute it: meta tensors would take the slow way,
    with all scores."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            names = ("query", "key", "value")
            return _Fused.apply(*(args[at] if at < len(args) else kwargs[name] for at, name in enumerate(names)))
        return func(*args, **kwargs)
