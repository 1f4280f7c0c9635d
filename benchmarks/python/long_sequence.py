"""The longest sequence for a rank's memory: peak against length, and the longest length under a cap, by bisection.

    python benchmarks/python/long_sequence.py [--cap-mb 64] [--hidden 128] [--layers 4] [--ranks 1 2] [--set NAME...]
        [--folder DIR] [--seconds 240] [--json FILE] [--plot FILE]

A causal language model (tests/toy_transformers.py) takes training steps of several lengths, in as many processes as
ranks; what counts is the largest peak of resident memory among them beyond what they had after one very short step
(VmHWM of the kernel, begun anew for each step). No buffer of another length helps: stores of waiting tensors are closed
before each step. Sets: ``plain``; ``checkpoint``: layers are computed again; ``tiles``: that, and MLPs
and the loss by tiles; ``chunk``: that, and attention by chunks; ``offload``: that, and inputs of layers in files.
Beside each figure stands what ``deepspeed.sequence`` predicts, from which the bisection starts. The cap is on what a
step adds to the states. After ``--seconds`` the lengths that are known so far are the result; a row says so.
"""

import argparse
import ctypes
import json
import os
import socket
import sys
import tempfile
import time

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests"))

import deepspeed  # noqa: E402
import toy_transformers  # noqa: E402
from deepspeed.comm.mesh import made_here  # noqa: E402
from deepspeed.planner.lengths import Setup  # noqa: E402

SETS = {
    "plain": (False, {}),
    "checkpoint": (True, {}),
    "tiles": (True, {"tile_mlp": True, "tile_loss": True}),
    "chunk": (True, {"tile_mlp": True, "tile_loss": True, "chunk": 256}),
    "offload": (True, {"tile_mlp": True, "tile_loss": True, "chunk": 256, "offload": "file"}),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap-mb", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--set", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--folder", help="for files; default: a temporary one")
    parser.add_argument("--seconds", type=float, default=240, help="of all steps together")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    return parser.parse_args()


def model_of(args, name):
    model = toy_transformers.ToyForCausalLM(
        args.heads, args.heads, args.hidden, args.layers, args.vocabulary, 4 * args.hidden
    )
    if SETS[name][0]:
        model.gradient_checkpointing_enable()
    return model.train()


def config_of(args, name, ranks):
    section = {**SETS[name][1], "size": ranks}
    if section.get("offload") == "file":
        section["folder"] = args.folder
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2 if ranks > 1 else 0, "reduce_bucket_size": 1000000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "sequence_parallel": section,
    }


# ---- one trial -------------------------------------------------------------------------------------------------------
def status(key):
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def rank_of(rank, ranks, port, args, name, pipe):
    """Steps of the lengths that come through ``pipe``, until None comes."""
    libc = ctypes.CDLL(None)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 13)  # an engine leaves malloc as it is
    libc.mallopt(-3, 1 << 13)  # M_MMAP_THRESHOLD: what is freed goes at once
    torch.set_num_threads(1)  # threads that wait for each other on a loaded machine cost more than they bring
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    deepspeed.log.logger.setLevel("WARNING")
    with toy_transformers.installed():
        engine = deepspeed.initialize(model=model_of(args, name), config=config_of(args, name, ranks))[0]

        def step(count):
            tokens = torch.randint(0, args.vocabulary, (1, count // ranks))
            engine.backward(engine(tokens, labels=tokens).loss)
            engine.step()

        step(8 * ranks)  # what is there for good
        libc.malloc_trim(0)
        base = status("VmRSS")
        while (tokens := pipe.recv()) is not None:
            made_here().stores.clear()
            libc.malloc_trim(0)
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")  # the peak begins anew
            start = time.perf_counter()
            step(tokens)
            pipe.send((status("VmHWM") - base, time.perf_counter() - start))
    deepspeed.comm.barrier()


class Job:
    """The processes of one set; they take steps of any length."""

    def __init__(self, args, name, ranks):
        self.args, self.name, self.ranks, self.rows = args, name, ranks, []
        with toy_transformers.installed():
            self.curve = Setup(model_of(args, name), config_of(args, name, ranks), ranks, None, None).curve()
        context = torch.multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pipes = [context.Pipe() for _ in range(ranks)]
        self.pipes = [own for own, _ in pipes]
        self.processes = [
            context.Process(target=rank_of, args=(rank, ranks, port, args, name, pipes[rank][1]), daemon=True)
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def end(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()

    def fits(self, tokens):
        """Whether a step of this length stays under the cap."""
        for pipe in self.pipes:
            pipe.send(tokens)
        found = [pipe.recv() for pipe in self.pipes]
        peak, seconds = max(peak for peak, _ in found), max(seconds for _, seconds in found)
        predicted = self.curve.peak(tokens).bytes - self.curve.states
        print(
            f"{self.name:11s} {self.ranks} ranks {tokens:8d} tokens: {peak / 2**20:8.1f} MB, predicted "
            f"{predicted / 2**20:8.1f} ({predicted / peak - 1:+.1%}), {seconds:.2f} s",
            flush=True,
        )
        self.rows.append(
            {
                "set": self.name,
                "ranks": self.ranks,
                "tokens": tokens,
                "peak": peak,
                "predicted": predicted,
                "s": seconds,
            }
        )
        return peak <= self.args.cap_mb << 20

    def longest(self, deadline):
        """The longest length under the cap to a sixteenth, and whether it was found before ``deadline``."""
        unit = 32 * self.ranks
        first = self.curve.longest((self.args.cap_mb << 20) + self.curve.states)
        low, high, tokens = 0, None, max(unit, first // unit * unit)  # what fits, what does not, what is tried
        for share in (4, 2):  # points of the curve
            short = max(unit, tokens // share // unit * unit)
            low = short if self.fits(short) else low
        while time.monotonic() < deadline:
            if self.fits(tokens):
                low = tokens
            else:
                high = tokens
            step = max(unit, (low or high) // 8 // unit * unit)
            if high is not None and (high - low <= max(unit, low // 16) or high == unit):
                return low, True
            if high is None:
                tokens = low + step
            else:
                tokens = (low + high) // 2 // unit * unit if low else max(unit, high - step)
        return low, False


def plot(args, rows):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for key in sorted({(one["set"], one["ranks"]) for one in rows}):
        own = sorted((one for one in rows if (one["set"], one["ranks"]) == key), key=lambda one: one["tokens"])
        lengths = [one["tokens"] for one in own]
        line = axes.plot(lengths, [one["peak"] / 2**20 for one in own], "o-", label=f"{key}")[0]
        axes.plot(lengths, [one["predicted"] / 2**20 for one in own], ":", color=line.get_color())
    axes.axhline(args.cap_mb, color="grey")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a sequence", ylabel="MB of a step; dots: predicted")
    axes.legend()
    figure.savefig(args.plot, dpi=120)


def main():
    args = parse_arguments()
    begin = time.monotonic()
    jobs = [(name, ranks) for ranks in args.ranks for name in args.set]
    with tempfile.TemporaryDirectory() as folder:
        args.folder = args.folder or folder
        rows, found = [], []
        for index, (name, ranks) in enumerate(jobs):
            left = args.seconds - (time.monotonic() - begin)
            job = Job(args, name, ranks)
            tokens, complete = job.longest(time.monotonic() + left / (len(jobs) - index))
            job.end()
            rows += job.rows
            found.append({"set": name, "ranks": ranks, "tokens": tokens, "complete": complete})
    for one in found:
        print(
            f"longest under {args.cap_mb} MB: {one['set']:11s} {one['ranks']} ranks: {one['tokens']}, "
            f"{one['tokens'] / found[0]['tokens']:.1f} x{'' if one['complete'] else ', at least: time was over'}"
        )
    print(f"{time.monotonic() - begin:.0f} s")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"cap": args.cap_mb << 20, "rows": rows, "longest": found}, file, indent=1)
    if args.plot:
        plot(args, rows)


if __name__ == "__main__":
    main()
