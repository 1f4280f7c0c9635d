"""Step time of ranks that share the layers of a model, against one process with as many threads.

    python benchmarks/python/tensor_step.py [--python PATH] [--rows 8] [--tokens 512] [--json FILE]

The causal language model of sequence_step.py takes training steps, forward, backward and AdamW, on the same rows by
turns, in blocks:

``plain``: one process with a thread for each rank, torch alone; ``ours``: an engine with
``tensor_parallel.autotp_size``, one thread a rank; ``overlap``: the same with ``tp_overlap_comm``; ``words``: with
``vocab_parallel_lm_head``; ``parts``: with that and ``split_sequence``; ``torch``: the model by torch's
``parallelize_module`` over gloo, where torch has it; ``floor``: forward, backward and update of the layers of one rank,
without any exchange: what no rank can go below. Losses are compared before anything is timed. ``saved_mib``: what
autograd keeps of a step for backward on rank 0, without parameters.
"""

import argparse
import importlib
import os
import statistics
import sys
import time

import sequence_step
from common import ranks

NAMES = ("ranks", "rows", "tokens", "hidden", "layers", "heads", "kv-heads", "vocabulary", "rounds", "block", "dtype")


COLUMNS, ROWS = ("attention.q", "attention.k", "attention.v", "gate", "up"), ("attention.out", "down")
SECTIONS = {
    "ours": {},
    "overlap": {"tp_overlap_comm": True},
    "words": {"vocab_parallel_lm_head": True},
    "parts": {"vocab_parallel_lm_head": True, "split_sequence": True},
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter with the deepspeed to measure")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=1001)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=1, help="timed steps of each contender in a round")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def model_of(torch, args):
    """The model as a function of tokens, which gives the mean loss."""
    inner, attend = sequence_step.model_of(torch, args), sequence_step.attention(torch)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def get_output_embeddings(self):
            return self.inner.head

        def get_input_embeddings(self):
            return self.inner.words

        @property
        def dummy_inputs(self):
            return {"tokens": torch.zeros(2, 6, dtype=torch.long)}

        def forward(self, tokens):
            return self.inner(tokens[:, :-1], tokens[:, 1:], 0, attend)

    return Model()


def adamw(torch, model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def by_torch(torch, args):
    """The model by ``parallelize_module`` over all ranks; None where torch has no such thing."""
    try:
        parallel = importlib.import_module("torch.distributed.tensor.parallel")
        column, row = parallel.ColwiseParallel, parallel.RowwiseParallel
    except (ImportError, AttributeError):
        return None
    model, mesh = model_of(torch, args), torch.distributed.init_device_mesh("cpu", (args.ranks,))
    styles = {name: column() for name in COLUMNS}
    styles.update({name: row() for name in ROWS})
    for block in model.inner.blocks:
        parallel.parallelize_module(block, mesh, styles)
    return model


class Alone:
    """One process with a thread for each rank, which rank 0 is while the others wait."""

    def __init__(self, torch, args, rank):
        self.torch, self.threads, self.here = torch, args.ranks, rank == 0
        self.model = model_of(torch, args) if self.here else None
        self.optimizer = adamw(torch, self.model) if self.here else None

    def __call__(self, tokens):
        if not self.here:
            return self.torch.zeros(())
        self.torch.set_num_threads(self.threads)
        loss = step_of(self.model, self.optimizer, tokens)
        self.torch.set_num_threads(1)
        return loss


def step_of(model, optimizer, tokens):
    loss = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def engine_step(deepspeed, model, args, **section):
    config = {
        "train_micro_batch_size_per_gpu": args.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 1e-2}},
        "gradient_clipping": 0.0,
        "bf16": {"enabled": args.dtype == "bf16"},
        "tensor_parallel": {"autotp_size": args.ranks, **section},
        "steps_per_print": 10**9,
    }
    engine = deepspeed.initialize(model=model, config=config)[0]

    def step(tokens):
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def floor_step(torch, args):
    """A step of the layers of one rank: fewer heads, narrower units, and no exchange."""
    narrow = argparse.Namespace(**vars(args))
    model, share = model_of(torch, narrow), args.ranks
    linear = torch.nn.Linear
    for block in model.inner.blocks:
        for name in (*COLUMNS, *ROWS):
            old = block.get_submodule(name)
            inside, outside = (share, 1) if name in ROWS else (1, share)
            owner, _, last = name.rpartition(".")
            made = linear(old.in_features // inside, old.out_features // outside, bias=False)
            setattr(block.get_submodule(owner), last, made)
    optimizer = adamw(torch, model)
    return lambda tokens: step_of(model, optimizer, tokens)


def saved_bytes(torch, call):
    """Bytes of the tensors that autograd saves during ``call``, each memory once, without leaves."""
    held = {}

    def pack(tensor):
        if not tensor.is_leaf or not tensor.requires_grad:
            memory = tensor.storage() if not hasattr(tensor, "untyped_storage") else tensor.untyped_storage()
            held.setdefault(memory.data_ptr(), (tensor, memory.nbytes()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(size for _, size in held.values())


def work(args):
    import torch

    import deepspeed
    from common import machine

    rank = int(os.environ["RANK"])
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo")
    torch.set_num_threads(1)
    contenders = {"plain": Alone(torch, args, rank)}
    for name, section in SECTIONS.items():
        contenders[name] = engine_step(deepspeed, model_of(torch, args), args, **section)
    torchs = by_torch(torch, args)
    if torchs is not None:
        optimizer = torch.optim.AdamW(torchs.parameters(), lr=1e-4, foreach=False)
        contenders["torch"] = lambda tokens: step_of(torchs, optimizer, tokens)
    contenders["floor"] = floor_step(torch, args)
    compared = [name for name in contenders if name != "floor"]

    def run(name, number):
        tokens = torch.randint(
            0, args.vocabulary, (args.rows, args.tokens + 1), generator=torch.Generator().manual_seed(number)
        )
        torch.distributed.barrier()
        start = time.perf_counter()
        loss = contenders[name](tokens)
        torch.distributed.barrier()
        return time.perf_counter() - start, float(loss.detach())

    losses = {name: [run(name, number)[1] for number in range(3)] for name in compared}
    for name in compared if rank == 0 else ():
        if abs(losses[name][-1] / losses["plain"][-1] - 1) > sequence_step.TOLERANCE[args.dtype]:
            raise SystemExit(f"{name} has the losses {losses[name]}, one process {losses['plain']}")
    own = [name for name in contenders if name != "torch"]  # whose tensors have no memory of their own
    saved = {name: saved_bytes(torch, lambda name=name: run(name, 4)) / 2**20 for name in own}
    times, order = {name: [] for name in contenders}, list(contenders)
    for turn in range(args.rounds):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            times[name].append(sum(run(name, 10 + turn)[0] for _ in range(args.block)) / args.block)
    if rank != 0:
        return
    figures = {
        "step_s": {name: statistics.median(row) for name, row in times.items()},
        "best_s": {name: min(row) for name, row in times.items()},
        "ours_over_plain": statistics.median(a / b for a, b in zip(times["ours"], times["plain"])),
        "above_floor_s": {
            name: statistics.median(a - b for a, b in zip(times[name], times["floor"]))
            for name in order
            if name not in ("plain", "floor")
        },
    }
    figures["saved_mib"] = saved
    figures["setting"] = {name: getattr(args, name.replace("-", "_")) for name in NAMES}
    machine.write_json(args.json, "tensor_step", figures, threads_per_rank=1, blas=machine.blas_libraries())


if __name__ == "__main__":
    arguments = parse_arguments()
    ranks.run(__file__, arguments, work, NAMES, arguments.ranks, python=arguments.python)
