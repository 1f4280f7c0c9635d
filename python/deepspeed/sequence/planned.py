"""A planned training step of one rank: the model runs on the device ``meta``, and no other rank exists."""

import contextlib
import functools

import torch

from deepspeed._compat import memory_of
from deepspeed.accelerator import get_accelerator
from deepspeed.sequence import exchange, hf_attention, methods, tiling
from deepspeed.sequence.chunked import chunked_attention
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.sequence.ledger import ExchangeMemory, HostStore, Leaving, Ledger
from deepspeed.sequence.ring import ring_attention
from deepspeed.utils.fused_attention import FusedAttention
from deepspeed.utils.init_on_device import copy_on_meta
from deepspeed.utils.waiting_tensors import ShapeStore
from deepspeed.zero.nested import loss_or_sum


def _attend(core, ranks, how, memory, store, module, query, key, value, mask, *args, **kwargs):
    """Attention of a transformers model as ``ranks`` that share a sequence compute it."""
    heads, chunk = query.shape[1], how["chunk"]
    size = ranks if chunk else methods.exchanging(how["method"], heads, ["here"] * ranks)
    group = exchange.PlannedGroup(size, memory)
    shared = exchange.HeadExchange(heads, key.shape[1], group)
    parts = shared.to_heads([one.transpose(1, 2) for one in (query, key, value)], heads_first=True)
    query, key, value = (one.transpose(1, 2) for one in parts)
    if size < ranks:
        around = exchange.PlannedGroup(ranks // size, memory)
        context = ring_attention(query, key, value, around, True, kwargs.get("scaling")).transpose(1, 2)
    elif chunk:
        context = chunked_attention(query, key, value, chunk, True, None, store).transpose(1, 2)
    else:
        seen = hf_attention.Seen(module, query.shape[1] // key.shape[1])
        query, key, value = (one.contiguous() for one in (query, key, value))
        context = core(seen, query, key, value, None, *args, **kwargs)[0]
    return shared.to_sequence([context])[0], None


@contextlib.contextmanager
def _shared(model, ranks, how, memory, store):
    """Attention of ``model`` is that of ``ranks`` that share sequences."""
    for module in model.modules():
        if isinstance(module, DistributedAttention):
            module.spg = exchange.PlannedGroup(ranks, memory)
    if not hf_attention.is_model(model) or (ranks == 1 and not how["chunk"]):
        yield
        return
    with hf_attention.for_now(model, lambda core: functools.partial(_attend, core, ranks, how, memory, store)):
        yield


def _inputs_of(model, batch, tokens):
    """Of a transformers model for causal language modelling."""
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids, "use_cache": False}


class PlannedStep:
    """Forward and backward of ``model`` on one of ``ranks`` that share a sequence.

    ``inputs``: ``(batch, tokens of a rank)`` to the arguments of the model, on meta; None: those of a causal language
    model. ``how``: keys of the section ``sequence_parallel``, "widths": of what ``tile_mlp`` cuts, and "checkpointing":
    whether layers are computed again.
    """

    def __init__(self, model, dtype, batch, ranks, inputs, how):
        self.model, self.batch, self.ranks, self.how = copy_on_meta(model, dtype), batch, ranks, how
        self.inputs = inputs
        if how["checkpointing"]:
            self.model.gradient_checkpointing_enable()
        self.model.train()
        tiling.cut(self.model, how["widths"], how["tile_loss"] and tiling.has_known_loss(self.model))
        for param in self.model.parameters():
            if param.requires_grad:
                param.grad = torch.empty_like(param)

    def peaks(self, tokens):
        """``{moment: bytes by part}`` for a sequence of ``tokens``."""
        local = tokens // self.ranks
        ledger = Ledger(self.model)
        ledger.known |= {memory_of(param.grad) for param in self.model.parameters() if param.grad is not None}
        given = _inputs_of(self.model, self.batch, local) if self.inputs is None else self.inputs(self.batch, local)
        args, kwargs = ((), given) if isinstance(given, dict) else (given if isinstance(given, tuple) else (given,), {})
        store = self._store(ledger)
        if store:
            waits = store if self.how["offload"] == "file" else HostStore()
            ledger.leaving = Leaving(_hidden_shapes(self.model, self.batch, local), waits)
        memory = ExchangeMemory(ledger, get_accelerator().device_name() == "cpu")
        with _shared(self.model, self.ranks, self.how, memory, store), FusedAttention(), ledger:
            loss = loss_or_sum(self.model(*args, **kwargs))
            ledger.begin_backward()
            # Not loss.backward(): torch leaves a function mode in what it calls, where layers are computed again.
            torch.autograd.Variable._execution_engine.run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            del loss
        return ledger.peaks

    def _store(self, ledger):
        """The store in which tensors wait for backward; False if they stay on the device."""
        here = get_accelerator().device_name() == "cpu"  # host memory is the device's
        return self.how["offload"] in (("file",) if here else ("file", "host")) and ShapeStore(ledger.buffer)


def _hidden_shapes(model, batch, tokens):
    """Of what goes from layer to layer."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    return set() if embeddings is None else {torch.Size((batch, tokens, embeddings.weight.shape[-1]))}
