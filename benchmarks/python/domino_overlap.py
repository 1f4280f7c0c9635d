"""The share of communication that ranks wait for, with and without Domino, over a slow link.

    python benchmarks/python/domino_overlap.py [--rows 4] [--tokens 256] [--hidden 512] [--layers 4] [--json FILE]

A Megatron transformer, cut over the ranks (one thread each), computes forward and backward over gloo. Each all-reduce
ends no earlier than ``delay`` after its start: ``--share`` times the mean forward time of an attention and of a unit on
half a batch, which each round measures anew. The exposed share is the part of these delays for which rank 0 waits,
while it has nothing to compute. Beside it stands (time with the delays - time without them) / delays, which a busy
machine disturbs. Both are given as the quartiles over the rounds.

``inter`` and ``intra``: ``DominoTransformer``, with overlap across layers or within them; ``overlap``: ordinary cut
layers with ``tp_overlap_comm``, undivided; ``plain``: these without it.
"""

import argparse
import os
import statistics
import sys
import time
import types

from common import ranks

NAMES = ("ranks", "rows", "tokens", "hidden", "inner", "heads", "layers", "share", "rounds")
HERE = os.path.dirname(os.path.abspath(__file__))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter with the deepspeed to measure")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=2048, help="channels of the unit")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.8, help="of the forward time of a half, that a call takes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def domino(args, mpu):
    from deepspeed.runtime.domino.transformer import DominoTransformer, ModelType

    config = types.SimpleNamespace(
        hidden_size=args.hidden, ffn_hidden_size=args.inner, num_attention_heads=args.heads, num_layers=args.layers,
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return DominoTransformer(config, mpu, None, ModelType.encoder_or_decoder)


def ordinary(torch, args, group, overlap):
    """The same layers in the ordinary way, as a function of (tokens, rows, hidden)."""
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    functional, size = torch.nn.functional, args.hidden // args.heads

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            linear, width = torch.nn.Linear, args.hidden
            self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.qkv = LinearLayer(linear(width, 3 * width), group, overlap=overlap)
            self.out = LinearAllreduce(linear(width, width), group, overlap=overlap)
            self.up = LinearLayer(linear(width, args.inner), group, overlap=overlap)
            self.down = LinearAllreduce(linear(args.inner, width), group, overlap=overlap)

        def forward(self, x, later):
            fused = self.qkv(self.before(x)).view(*x.shape[:2], -1, 3 * size).permute(1, 2, 0, 3)
            query, key, value = fused.split(size, -1)
            scores = (query * size**-0.5 @ key.transpose(-1, -2)).masked_fill(later, -1e4)
            x = x + self.out((scores.softmax(-1) @ value).permute(2, 0, 1, 3).flatten(2))
            return x + self.down(functional.gelu(self.up(self.between(x))))

    blocks = torch.nn.ModuleList(Block() for _ in range(args.layers))
    later = torch.ones(args.tokens, args.tokens, dtype=torch.bool).triu(1)

    def run(x):
        for block in blocks:
            x = block(x, later)
        return x

    return run


class Clock:
    """The mean time of the forward of ``modules`` since the last ``take()``."""

    def __init__(self, modules):
        self.seconds, self.calls = 0.0, 0
        for module in modules:
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end)

    def _begin(self, *_):
        self.seconds -= time.perf_counter()

    def _end(self, *_):
        self.seconds += time.perf_counter()
        self.calls += 1

    def take(self):
        mean = self.seconds / self.calls
        self.seconds, self.calls = 0.0, 0
        return mean


def shares(rows):
    """The exposed share of forward, of backward and of both: ``[lowest quartile, median, highest quartile]``."""
    parts = {"forward": slice(0, 1), "backward": slice(1, 2), "both": slice(0, 2)}
    return {
        kind: statistics.quantiles(
            sum(one[1] for one in late[part]) / sum(one[2] for one in late[part]) / delay for delay, late, _ in rows
        )
        for kind, part in parts.items()
    }


def longer(rows):
    """The same of both, by the time of rounds with and without delay."""
    return statistics.quantiles(
        sum(one[0] - other[0] for one, other in zip(late, quick)) / sum(one[2] for one in late) / delay
        for delay, late, quick in rows
    )


def work(args):
    import torch

    sys.path.insert(0, os.path.join(HERE, "..", "..", "tests", "dist"))
    import deepspeed
    from common import machine
    from deepspeed import comm as dist
    from injected_delays import SlowLink
    from mpu import Mpu

    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, group = dist.get_rank(), dist.get_world_group()
    alone = [dist.new_group([one]) for one in range(args.ranks)]
    with SlowLink() as link:
        transformer = domino(args, Mpu(alone[rank], group))
    contenders = {
        "inter": lambda x: transformer.inter_layer_overlap_forward(x, None),
        "intra": lambda x: transformer.intra_layer_overlap_forward(x, None),
        "overlap": ordinary(torch, args, group, True),
        "plain": ordinary(torch, args, group, False),
    }
    x = torch.randn(args.tokens, args.rows, args.hidden, requires_grad=True)
    grad = torch.randn(x.shape)
    clocks = {
        "attention": Clock(layer.self_attention for layer in transformer.layers),
        "unit": Clock(layer.mlp for layer in transformer.layers),
    }

    def run(name, slow):
        """``(seconds, seconds that waited for the link, calls)`` of forward and of backward."""
        link.delay, seen = slow, []
        for kind in ("forward", "backward"):
            dist.barrier()
            calls, exposed, begin = link.calls, link.exposed, time.perf_counter()
            if kind == "forward":
                made = contenders[name](x)
            else:
                made.backward(grad)
            seen.append((time.perf_counter() - begin, link.exposed - exposed, link.calls - calls))
        return seen

    def forward_times():
        """Forward times of an attention and of a unit on half a batch, the mean over the ranks."""
        for clock in clocks.values():
            clock.seconds, clock.calls = 0.0, 0
        run("inter", 0.0)
        seconds = torch.tensor([clock.take() for clock in clocks.values()])
        dist.all_reduce(seconds)
        return (seconds / args.ranks).tolist()

    found, halves = {name: [] for name in contenders}, []
    for name in contenders:
        run(name, 0.0)
    for turn in range(args.rounds):
        halves.append(forward_times())
        delay = args.share * sum(halves[-1]) / 2
        for name in contenders:
            row = {slow: run(name, slow) for slow in ((0.0, delay) if turn % 2 else (delay, 0.0))}
            found[name].append((delay, row[delay], row[0.0]))
    if rank == 0:
        figures = {
            "exposed_share": {name: shares(rows) for name, rows in found.items()},
            "longer_share": {name: longer(rows) for name, rows in found.items()},
            "forward_of_half_s": dict(zip(clocks, (statistics.quantiles(one) for one in zip(*halves)))),
            "calls": {name: [one[2] for one in rows[0][1]] for name, rows in found.items()},
            "without_delay_s": {
                name: statistics.median(sum(one[0] for one in quick) for _, _, quick in rows)
                for name, rows in found.items()
            },
            "setting": {name: getattr(args, name) for name in NAMES},
        }
        machine.write_json(args.json, "domino_overlap", figures, threads_per_rank=1, blas=machine.blas_libraries())
    dist.barrier()


if __name__ == "__main__":
    arguments = parse_arguments()
    ranks.run(__file__, arguments, work, NAMES, arguments.ranks, python=arguments.python)
