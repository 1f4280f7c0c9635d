"""Step time of two ranks that share a sequence, against one process with two threads, and against an exchange by hand.

    python benchmarks/python/sequence_step.py [--python PATH] [--shapes 1x4096,8x512] [--stage 1] [--json FILE]

A causal language model (Llama's blocks: RMSNorm, rotary positions, grouped queries, SwiGLU) takes training steps,
forward, backward and AdamW, on the same sequences by turns, in blocks:

``plain``: one process with as many threads as ranks, torch alone; ``ours``: an engine, DistributedAttention, one
thread a rank; ``gloo``: the same model under DistributedDataParallel, with tokens exchanged for heads by torch's
all_to_all_single over gloo, as one writes it, one thread a rank; ``floor``: forward and backward of a share of a rank,
with the attention of its heads, without exchange, reduction or update: what no rank can go below. A shape is rows x
tokens. With ``--dtype bf16`` the engine keeps fp32 masters, the others are as torch makes them of ``model.bfloat16()``.
Attention is scaled_dot_product_attention where torch has it, else two products. Losses are compared before anything is
timed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from common import ranks

HERE = os.path.dirname(os.path.abspath(__file__))
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}  # of losses after some steps, between contenders


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter with the deepspeed to measure")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", default="1x4096,8x512", help="rows x tokens of the whole sequence, by commas")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO, in ours")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block", type=int, default=1, help="timed steps of each contender in a round")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


NAMES = ("ranks", "shapes", "stage", "dtype", "hidden", "layers", "heads", "kv-heads", "vocabulary", "rounds", "block")


# ---- the model -------------------------------------------------------------------------------------------------------
def model_of(torch, args):
    from torch import nn
    from torch.nn import functional

    size = args.hidden // args.heads

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(args.hidden))

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            widths = (args.heads * size, args.kv_heads * size, args.kv_heads * size)
            self.q, self.k, self.v = (nn.Linear(args.hidden, width, bias=False) for width in widths)
            self.out = nn.Linear(args.heads * size, args.hidden, bias=False)

        def forward(self, h, turns, attend):
            q, k, v = (one(h).view(*h.shape[:2], -1, size) for one in (self.q, self.k, self.v))
            context = attend(turned(q, *turns), turned(k, *turns), v)
            return self.out(context.reshape(*h.shape[:2], -1))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.between, self.attention = Norm(), Norm(), Attention()
            inner = args.hidden * 11 // 4
            self.gate, self.up = (nn.Linear(args.hidden, inner, bias=False) for _ in range(2))
            self.down = nn.Linear(inner, args.hidden, bias=False)

        def forward(self, x, turns, attend):
            x = x + self.attention(self.before(x), turns, attend)
            h = self.between(x)
            return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(args.vocabulary, args.hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
            self.norm = Norm()
            self.head = nn.Linear(args.hidden, args.vocabulary, bias=False)

        def forward(self, tokens, labels, first, attend):
            """``tokens`` from number ``first`` of their sequence on. The mean over these labels."""
            x, places = self.words(tokens), torch.arange(first, first + tokens.shape[1])
            angles = torch.outer(places, 1e4 ** -(torch.arange(0, size, 2) / size))
            turns = [angles.cos().repeat(1, 2)[:, None].to(x.dtype), angles.sin().repeat(1, 2)[:, None].to(x.dtype)]
            for block in self.blocks:
                x = block(x, turns, attend)
            return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())

    def turned(x, cos, sin):
        one, other = x.chunk(2, -1)
        return x * cos + torch.cat((-other, one), -1) * sin

    torch.manual_seed(0)
    return Model().to(torch.bfloat16 if args.dtype == "bf16" else torch.float32)


def attention(torch):
    """Causal, of [batch, sequence, heads, size]."""
    from torch.nn import functional

    def attend(q, k, v):
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        if q.shape[1] != k.shape[1]:
            k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        if hasattr(functional, "scaled_dot_product_attention"):
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            ahead = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
            found = scores.masked_fill_(ahead, float("-inf")).softmax(-1) @ v
        return found.transpose(1, 2)

    return attend


def by_hand(torch, world):
    """Tokens for heads over torch's all_to_all_single, as one writes it."""
    dist = torch.distributed

    class Exchange(torch.autograd.Function):
        """[batch, tokens / world, heads, size] to [batch, tokens, heads / world, size], or back."""

        @staticmethod
        def forward(ctx, x, to_heads):
            ctx.to_heads = to_heads
            cut, joined = (2, 1) if to_heads else (1, 2)
            given = torch.stack(x.chunk(world, cut)).contiguous()
            taken = torch.empty_like(given)
            dist.all_to_all_single(taken, given)
            return torch.cat(taken.unbind(0), joined)

        @staticmethod
        def backward(ctx, grad):
            return Exchange.apply(grad, not ctx.to_heads), None

    attend = attention(torch)
    return lambda q, k, v: Exchange.apply(attend(*(Exchange.apply(one, True) for one in (q, k, v))), False)


def shapes_of(args):
    return {text: tuple(map(int, text.split("x"))) for text in args.shapes.split(",")}


def batch(torch, args, shape, number):
    random = torch.Generator().manual_seed(number)
    rows = torch.randint(0, args.vocabulary, (shape[0], shape[1] + 1), generator=random)
    return rows[:, :-1], rows[:, 1:]


# ---- one process -----------------------------------------------------------------------------------------------------
def plain(args):
    """Takes the steps that lines of standard input ask for, and answers with seconds and the last loss."""
    import torch

    torch.set_num_threads(args.ranks)
    model, attend, shapes = model_of(torch, args), attention(torch), shapes_of(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    number = 0
    for line in sys.stdin:
        shape, steps = json.loads(line)
        data = [batch(torch, args, shapes[shape], number + i) for i in range(steps)]
        number += steps
        start = time.perf_counter()
        for x, y in data:
            loss = model(x, y, 0, attend)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(json.dumps([time.perf_counter() - start, loss.item()]), flush=True)


class Plain:
    """That process, as a contender of rank 0; the ranks sleep meanwhile."""

    def __init__(self, args, rank, dist):
        self.process, self.dist = None, dist
        if rank == 0:
            options = [text for name in NAMES for text in (f"--{name}", str(getattr(args, name.replace("-", "_"))))]
            self.process = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), "--plain", *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(args.ranks)},
            )

    def run(self, shape, steps):
        answer = (0.0, 0.0)
        if self.process:
            self.process.stdin.write(json.dumps([shape, steps]) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        self.dist.barrier()
        return answer

    def end(self):
        if self.process:
            self.process.communicate()


class Stepper:
    """A contender in the ranks: ``step(x, y, first)`` of this rank's part of a batch gives a loss."""

    def __init__(self, torch, args, rank, step, number=0):
        self.torch, self.args, self.rank, self.step, self.number = torch, args, rank, step, number

    def run(self, shape, steps):
        rows, tokens = shapes_of(self.args)[shape]
        part = tokens // self.args.ranks
        mine = slice(self.rank * part, (self.rank + 1) * part)
        data = [batch(self.torch, self.args, (rows, tokens), self.number + i) for i in range(steps)]
        data = [(x[:, mine].contiguous(), y[:, mine].contiguous()) for x, y in data]
        self.number += steps
        self.torch.distributed.barrier()
        start = time.perf_counter()
        for x, y in data:
            loss = self.step(x, y, mine.start)
        loss = loss.detach().clone()
        self.torch.distributed.barrier()
        seconds = time.perf_counter() - start
        self.torch.distributed.all_reduce(loss)
        return seconds, float(loss) / self.args.ranks


# ---- the ranks -------------------------------------------------------------------------------------------------------
def work(args):
    import torch

    import deepspeed
    from common import machine
    from deepspeed.sequence.layer import DistributedAttention

    rank, world = int(os.environ["RANK"]), args.ranks
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo")
    torch.set_num_threads(1)

    def ours():
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "sequence_parallel_size": world,
            "zero_optimization": {"stage": args.stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 1e-2}},
            "bf16": {"enabled": args.dtype == "bf16"},
            "steps_per_print": 10**9,
        }
        engine = deepspeed.initialize(model=model_of(torch, args), config=config)[0]
        inner = DistributedAttention(attention(torch), engine.seq_parallel_group)

        def step(x, y, first):
            # Parts are equally long: the mean of the parts' means is that of the sequence.
            loss = engine(x, y, first, lambda q, k, v: inner(q, k, v, 0))
            engine.backward(loss)
            engine.step()
            return loss

        return step

    def gloo():
        model = torch.nn.parallel.DistributedDataParallel(model_of(torch, args), gradient_as_bucket_view=True)
        optimizer, attend = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True), by_hand(torch, world)

        def step(x, y, first):
            loss = model(x, y, first, attend)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    def floor():
        model, inner = model_of(torch, args), attention(torch)

        def attend(q, k, v):
            # As many tokens and heads as after an exchange: the heads of this rank, its tokens repeated.
            whole = [one[:, :, : one.shape[2] // world].repeat(1, world, 1, 1) for one in (q, k, v)]
            found = inner(*whole)[:, : q.shape[1]]
            return found.repeat(1, 1, world, 1)

        def step(x, y, first):
            loss = model(x, y, first, attend)
            loss.backward()
            model.zero_grad()
            return loss

        return step

    contenders = {
        "plain": Plain(args, rank, torch.distributed),
        "ours": Stepper(torch, args, rank, ours()),
        "gloo": Stepper(torch, args, rank, gloo()),
        "floor": Stepper(torch, args, rank, floor()),
    }
    figures, order = {}, list(contenders)
    for shape in shapes_of(args):
        losses = {name: one.run(shape, 3)[1] for name, one in contenders.items()}
        if rank == 0:
            for name in ("ours", "gloo"):
                if abs(losses[name] / losses["plain"] - 1) > TOLERANCE[args.dtype]:
                    raise SystemExit(f"{shape}: {name} has the loss {losses[name]}, one process {losses['plain']}")
        times = {name: [] for name in order}
        for turn in range(args.rounds):
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                times[name].append(contenders[name].run(shape, args.block)[0] / args.block)
        if rank != 0:  # the plain process is rank 0's
            continue
        figures[shape] = {
            "step_s": {name: statistics.median(row) for name, row in times.items()},
            "best_s": {name: min(row) for name, row in times.items()},
            "ours_over": {
                name: statistics.median(a / b for a, b in zip(times["ours"], times[name]))
                for name in order
                if name != "ours"
            },
            "loss": losses,
        }
    contenders["plain"].end()
    if rank == 0:
        figures["setting"] = {name: getattr(args, name.replace("-", "_")) for name in NAMES}
        machine.write_json(
            args.json,
            "sequence_step",
            figures,
            threads_per_rank=1,
            threads_of_plain=world,
            blas=machine.blas_libraries(),
        )
    torch.distributed.barrier()


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.plain:
        plain(arguments)
    elif arguments.worker:
        work(arguments)
    else:
        result = ranks.measure(__file__, arguments, NAMES, arguments.ranks, python=arguments.python)
        ranks.show(result, arguments.json)
