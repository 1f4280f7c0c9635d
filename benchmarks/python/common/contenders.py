"""Loops that train the quickstart's GPT, each as ``step(x, y)``: plain torch, its wrappers, and this library.

``make(name, ...)`` knows the names: ``bare`` (no update), ``masters`` (bf16 weights, and fp32 masters that a fused
AdamW updates and ``copy_`` casts back), ``autocast`` (fp32 weights under bf16 autocast), ``ddp``, ``fsdp2``, and a
stage of ZeRO (``0`` to ``3``), also with the optimizer on the host (``2+cpu``).
"""

import contextlib
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
MODELS = {
    "tiny": {"layers": 2, "heads": 4, "width": 128, "vocab_size": 1024, "context": 128},
    "125m": {"layers": 12, "heads": 12, "width": 768, "vocab_size": 50304, "context": 1024},
    "1.3b": {"layers": 24, "heads": 16, "width": 2048, "vocab_size": 50304, "context": 1024},
    "7b4": {"layers": 4, "heads": 32, "width": 4096, "vocab_size": 50304, "context": 2048},  # 4 layers of 7B
}
RATE, DECAY, CLIP = 1e-4, 0.1, 1.0


def lacks(name):
    """Returns the reason for which this torch cannot run a contender; "" where it can."""
    import torch

    if name == "fsdp2" and not hasattr(torch.distributed, "fsdp") or name == "fsdp2" and not _fully_shard():
        return f"torch {torch.__version__} has no FSDP2 (torch.distributed.fsdp.fully_shard)"
    if "+" in name and name.partition("+")[2] != "cpu":
        return f"{name!r} is not a contender: after the stage only +cpu is known"
    return ""


def _fully_shard():
    from torch.distributed import fsdp

    return getattr(fsdp, "fully_shard", None)


def model_of(shape, device):
    """A GPT with fp32 weights, whose random numbers the device makes where torch can."""
    if os.path.join(ROOT, "examples", "quickstart") not in sys.path:
        sys.path.insert(0, os.path.join(ROOT, "examples", "quickstart"))
    import torch

    from model import GPT, Shape

    on_device = device if isinstance(device, contextlib.AbstractContextManager) else contextlib.nullcontext()
    torch.manual_seed(0)
    with on_device:  # a device of torch 1.13 is not a context manager
        made = GPT(Shape(**shape))
    return made.to(device)


def make(name, model, rows, accumulation=1, grad_dtype="bf16", compiled=False, mesh=None, zero=()):
    """The contender ``name`` for ``model``, which becomes its own. ``rows``: of a micro-batch. ``mesh``: of FSDP2;
    None: all ranks. ``compiled``: its model is compiled. ``zero``: more of the section of ZeRO."""
    if name[0].isdigit():
        return Ours(name, model, rows, accumulation, grad_dtype, compiled, zero)
    kind = {"bare": Bare, "masters": Masters, "autocast": Autocast, "ddp": Wrapped, "fsdp2": Sharded}[name]
    return kind(model, accumulation, compiled, mesh)


class Ours:
    def __init__(self, name, model, rows, accumulation, grad_dtype, compiled, zero):
        import deepspeed

        deepspeed.logger.setLevel("WARNING")
        stage, _, place = name.partition("+")
        zero = {"stage": int(stage), **dict(zero)}
        if place:
            zero["offload_optimizer"] = {"device": place, "pin_memory": True}
        config = {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": CLIP,
            "steps_per_print": None,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": grad_dtype},
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
            "zero_optimization": zero,
        }
        self.accumulation = accumulation
        self.engine = deepspeed.initialize(model=model.bfloat16(), config=config)[0]
        if compiled:
            self.engine.compile()

    def step(self, x, y):
        for _ in range(self.accumulation):
            self.engine.backward(self.engine(x, y))
            self.engine.step()

    def end(self):
        self.engine.destroy()


class _Torch:
    """Forward and backward of plain torch, and what follows in ``update``."""

    def __init__(self, model, accumulation, compiled, mesh):
        import torch

        self.torch, self.accumulation, self.mesh = torch, accumulation, mesh
        self.model = self.prepare(model)
        self.call = torch.compile(self.model) if compiled else self.model

    def prepare(self, model):
        return model.bfloat16()

    def step(self, x, y):
        for number in range(self.accumulation):
            self.micro_step(x, y, last=number + 1 == self.accumulation)
        self.update()

    def micro_step(self, x, y, last):
        self.share(self.call(x, y)).backward()

    def share(self, loss):
        return loss / self.accumulation if self.accumulation > 1 else loss

    def update(self):
        for param in self.model.parameters():
            param.grad = None

    def adamw(self, params):
        fused = {"fused": True} if int(self.torch.__version__.split(".")[0]) >= 2 else {}
        return self.torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY, **fused)

    def end(self):
        self.model = self.call = None


class Bare(_Torch):
    pass


class Masters(_Torch):
    def prepare(self, model):
        model = model.bfloat16()
        self.params = list(model.parameters())
        self.masters = [one.detach().float().clone() for one in self.params]
        self.optimizer = self.adamw(self.masters)
        return model

    def update(self):
        torch = self.torch
        torch.nn.utils.clip_grad_norm_(self.params, CLIP)
        for master, param in zip(self.masters, self.params):
            master.grad = param.grad.float()
            param.grad = None
        self.optimizer.step()
        with torch.no_grad():
            if hasattr(torch, "_foreach_copy_"):
                torch._foreach_copy_(self.params, self.masters)
            else:
                for param, master in zip(self.params, self.masters):
                    param.copy_(master)
        self.optimizer.zero_grad(set_to_none=True)

    def end(self):
        super().end()
        self.params = self.masters = self.optimizer = None


class Autocast(_Torch):
    def prepare(self, model):
        self.params = list(model.parameters())
        self.optimizer = self.adamw(self.params)
        return model

    def micro_step(self, x, y, last):
        with self.torch.autocast(x.device.type, dtype=self.torch.bfloat16):
            loss = self.share(self.call(x, y))
        loss.backward()

    def update(self):
        self.torch.nn.utils.clip_grad_norm_(self.params, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def end(self):
        super().end()
        self.params = self.optimizer = None


class Wrapped(Masters):
    """DistributedDataParallel around bf16 weights with masters."""

    def prepare(self, model):
        device = next(model.parameters()).device
        made = super().prepare(model)
        return self.torch.nn.parallel.DistributedDataParallel(
            made, device_ids=[device.index] if device.type == "cuda" else None
        )

    def micro_step(self, x, y, last):
        with contextlib.nullcontext() if last else self.model.no_sync():
            super().micro_step(x, y, last)


class Sharded(Autocast):
    """FSDP2: a unit for each block, fp32 shards, bf16 for compute and reductions."""

    def prepare(self, model):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        bf16 = self.torch.bfloat16
        given = {"mesh": self.mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)}
        for block in model.blocks:
            fully_shard(block, **given)
        fully_shard(model, **given)
        return super().prepare(model)

    def micro_step(self, x, y, last):
        self.model.set_requires_gradient_sync(last)
        self.share(self.call(x, y)).backward()
