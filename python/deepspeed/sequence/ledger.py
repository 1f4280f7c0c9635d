"""Memory of a training step, measured with meta tensors: each operation runs, and allocates nothing."""

import collections
import re
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed._compat import memory_of, storage_of
from deepspeed._native import _C
from deepspeed.utils.waiting_tensors import BackwardOrder, Waiting
from deepspeed.zero.nested import tensors_in

PARTS = ("kept for backward", "attention", "mlp", "head and loss", "buffers", "other")
KEPT, BUFFERS, OTHER = 0, 4, 5
_KINDS = [(1, re.compile("attn|attention")), (2, re.compile("mlp|ffn|feed_?forward|expert")), (3, re.compile("head"))]


class _Block:
    """The memory behind some tensors. ``users``: the number of tensors, and of what autograd has saved."""

    __slots__ = ("bytes", "freed", "part", "users")

    def __init__(self, size, part):
        self.bytes, self.part, self.users, self.freed = size, part, [0, 0], None


class _Kept:
    """A tensor that autograd has saved."""

    __slots__ = ("__weakref__", "gone", "key", "moment", "tensor")

    def __init__(self, tensor, key, moment):
        self.tensor, self.key, self.moment, self.gone = tensor, key, moment, None


class Leaving:
    """Inputs of layers that wait for backward in another memory (activation_checkpointing/hidden_states.py): the latest
    one stays, and one comes back ahead of its need. ``shapes``: of the inputs; ``store``: the memory for them."""

    LEAST = 1024  # bytes

    def __init__(self, shapes, store):
        self.shapes, self.store, self.order = shapes, store, BackwardOrder()

    def wants(self, tensor):
        size = tensor.numel() * tensor.element_size()
        return tensor.is_floating_point() and tensor.shape in self.shapes and size >= self.LEAST


def _metadata(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype


def _key(value):
    """A hashable form of an argument, equal for tensors that have equal metadata. Raises TypeError if there is none."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            raise TypeError
        return torch.Tensor, *_metadata(value)
    if isinstance(value, (tuple, list)):
        return tuple, *map(_key, value)
    hash(value)
    return type(value), value


class KnownResults:
    """Runs operations of meta tensors. An operation whose results have memory of their own runs once for each metadata
    of its arguments: torch 2 computes many shapes in Python, which takes 5 ms for the loss of a tile."""

    def __init__(self):
        self.results, self.pure = {}, {}

    def run(self, func, args, kwargs):
        if func not in self.pure:
            schema = func._schema
            self.pure[func] = all(one.alias_info is None for one in (*schema.arguments, *schema.returns))
        if not self.pure[func]:
            return func(*args, **kwargs)
        try:
            key = (func, _key(args), _key(tuple(kwargs.items())))
        except TypeError:
            return func(*args, **kwargs)
        if key in self.results:
            return self._made(self.results[key])
        out = func(*args, **kwargs)
        given = set(map(memory_of, tensors_in((args, kwargs))))
        made = tensors_in(out)
        own = set(map(memory_of, made)) - given
        if len(own) == len(made) == (len(out) if isinstance(out, tuple) else 1) and all(map(_is_plain, made)):
            found = tuple(map(_metadata, made))
            self.results[key] = found if isinstance(out, tuple) else found[0]
        return out

    def _made(self, found):
        if isinstance(found[0], torch.Size):
            size, stride, dtype = found
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return tuple(map(self._made, found))


def _is_plain(tensor):
    """Whether ``torch.empty_strided`` makes the same tensor from its metadata."""
    held = storage_of(tensor).nbytes()
    extent = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    return tensor.is_meta and held == extent * tensor.element_size() and tensor.storage_offset() == 0


class Ledger(TorchDispatchMode):
    """A context that counts the bytes of tensors made in it, as long as they are alive.

    A *moment* is a position in the step: forward, backward or recomputation of a module, by its name without numbers.
    ``peaks``: for each moment the bytes by part at its peak. ``leaving``: the store of tensors that wait for backward
    in another memory, or None.
    """

    def __init__(self, model):
        super().__init__()
        self.blocks, self.watched, self.peaks = {}, {}, {}
        self.bytes = [0] * len(PARTS)
        self.inside, self.backward, self.moment, self.part = [], False, "forward", OTHER
        self.leaving = None
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._save, self._load)
        self.known = {memory_of(one) for one in (*model.parameters(), *model.buffers())}
        self.known_results, self.handles = KnownResults(), []
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
        out = self.known_results.run(func, args, kwargs or {})
        if isinstance(out, (int, float)) and func.overloadpacket.__name__ == "detach":
            return torch.tensor(out)  # torch 1.13: a number that autograd has saved as a tensor
        for tensor in tensors_in(out):
            self._hold(tensor)
        return out

    def _hold(self, tensor):
        key = memory_of(tensor)
        if key in self.known or id(tensor) in self.watched:
            return
        if key in self.blocks:
            self._watch(id(tensor), tensor, key)
            return
        self.blocks[key] = _Block(storage_of(tensor).nbytes(), self.part)
        self._watch(id(tensor), tensor, key)
        self._note()

    def _watch(self, number, user, key):
        """``user`` of the memory ``key`` counts while it lives: a tensor, or a ``_Kept`` (with a negative number)."""
        self._count_user(number, key, 1)
        self.watched[number] = weakref.ref(user, lambda _: self._unwatch(number, key))

    def _unwatch(self, number, key):
        self.watched.pop(number, None)
        block = self._count_user(number, key, -1)
        if not any(block.users):
            del self.blocks[key]
            if block.freed is not None:
                block.freed(block.bytes)

    def _count_user(self, number, key, change):
        block = self.blocks[key]
        self._add(block, -1)
        block.users[number < 0] += change
        self._add(block, 1)
        return block

    def _add(self, block, sign):
        if any(block.users):
            self.bytes[KEPT if block.users[1] else block.part] += sign * block.bytes

    def _note(self):
        if sum(self.bytes) > sum(self.peaks.get(self.moment, ())):
            self.peaks[self.moment] = list(self.bytes)

    # ---- memory that is kept for the next one ------------------------------------------------------------------------
    def buffer(self, size):
        """A tensor of ``size`` bytes, which counts as a buffer."""
        before, self.part = self.part, BUFFERS
        made = torch.empty(size, dtype=torch.uint8, device="meta")
        self.part = before
        return made

    def when_freed(self, tensor, call):
        """Calls ``call(bytes)`` when the memory of ``tensor`` is freed."""
        self.blocks[memory_of(tensor)].freed = call

    def count(self, change):
        """Adds ``change`` (it may be negative) to the bytes of buffers."""
        self.bytes[BUFFERS] += change
        self._note()

    # ---- what autograd keeps -----------------------------------------------------------------------------------------
    def _save(self, tensor):
        key = memory_of(tensor)
        kept = _Kept(tensor, key, self.moment)
        if key in self.blocks:
            self._watch(-id(kept), kept, key)
        if self.leaving is not None and not self.backward and key not in self.known and self.leaving.wants(tensor):
            for going in self.leaving.order.add(kept):
                going.gone = Waiting(self.leaving.store, going.tensor)
                going.tensor = None
                if -id(going) in self.watched:
                    self._unwatch(-id(going), going.key)
        return kept

    def _load(self, kept):
        if self.backward and not self.inside:
            self._be_at("backward", kept.moment.partition(" of ")[2])
        if self.leaving is None:
            return kept.tensor
        tensor = kept.tensor if kept.gone is None else kept.gone.get()
        following = self.leaving.order.next_back(kept)
        if following is not None:
            following.gone.prefetch()
        return tensor

    def __enter__(self):
        self.hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()
        found = super().__exit__(*error)
        self.hooks.__exit__(*error)
        return found


# ---- memory beside the tensors of a step -----------------------------------------------------------------------------
class ExchangeMemory:
    """Memory of exchanges among planned ranks, beside their results: on the CPU, shared memory of the host, and memory
    of large results that is kept for later ones (csrc/parallel/result_memory.h); on other devices, packed rows."""

    def __init__(self, ledger, on_host):
        self.ledger, self.on_host = ledger, on_host
        self.shared, self.idle = None, []

    def carry(self, size, messages, whole):
        """``messages``: bytes to each other rank. ``whole``: bytes to all ranks, this one included."""
        wanted = _C.lengths.exchange_memory(size, max(messages, default=0)) if self.on_host else 2 * whole
        if self.shared is None or self.shared.numel() < wanted:
            self.shared = None
            self.shared = self.ledger.buffer(wanted)

    def before(self, size):
        """Called before a result of ``size`` bytes is made."""
        if size in self.idle:
            self.idle.remove(size)
            self.ledger.count(-size)

    def after(self, result):
        size = result.numel() * result.element_size()
        if self.on_host and size >= _C.lengths.kept_result_bytes:
            self.ledger.when_freed(result, self._freed)

    def _freed(self, size):
        if len(self.idle) == _C.lengths.kept_results:
            self.ledger.count(-self.idle.pop(0))
        self.idle.append(size)
        self.ledger.count(size)


class HostStore:
    """Counts inputs of layers that wait in host memory. As in activation_checkpointing/offload.py, two leaving inputs
    stay on the device until they are copied, and the next one comes back before it is needed."""

    def __init__(self):
        self.kept, self.next, self.back = {}, 0, {}
        self.leaving = collections.deque(maxlen=2)

    def put(self, tensor):
        self.leaving.append(tensor)
        self.next += 1
        self.kept[self.next] = tensor.shape, tensor.dtype
        return self.next

    def prefetch(self, number):
        self.leaving.clear()
        if number not in self.back:
            shape, dtype = self.kept[number]
            self.back[number] = torch.empty(shape, dtype=dtype, device="meta")

    def get(self, number):
        self.prefetch(number)
        return self.back.pop(number)

    def drop(self, number):
        self.kept.pop(number, None)
        self.back.pop(number, None)
