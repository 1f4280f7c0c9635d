"""What the engine's gradient hooks cost for each parameter, beside the same bookkeeping in Python.

    python benchmarks/python/hook_overhead.py [--parameters 1000] [--rounds 30] [--json FILE]

One process, many tiny parameters, so that nothing but overhead is left. Interleaved: backward without hooks, with the
engine's C++ hooks (each moves the gradient into its slot and keeps count), and with Python hooks that copy the gradient
into a slot and count. Medians over the rounds of (with - without) / parameters; the spread of two runs without hooks is
the noise.
"""

import argparse
import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    sys.path.insert(0, HERE)
    import torch

    import deepspeed
    from common import machine

    deepspeed.logger.setLevel("WARNING")
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_PORT", "29611")

    class Many(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.ones(8) for _ in range(args.parameters)])

        def forward(self, x):
            return torch.stack([x * w for w in self.weights]).sum()

    def engine_of(stage):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
        }
        return deepspeed.initialize(model=Many(), config=config)[0]

    x = torch.ones(8)

    def clear(module):
        for param in module.parameters():
            param.grad = None

    plain = Many()

    def without():
        loss = plain(x)
        start = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - start
        clear(plain)
        return seconds

    hooked = Many()
    slots = torch.zeros(args.parameters, 8)
    counts = [0] * args.parameters

    def hook_of(index):
        def hook(grad):
            slots[index].copy_(grad)
            counts[index] += 1

        return hook

    for index, param in enumerate(hooked.parameters()):
        param.register_hook(hook_of(index))

    def in_python():
        loss = hooked(x)
        start = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - start
        clear(hooked)
        return seconds

    def in_engine(engine):
        def run():
            loss = engine(x)
            engine.core.begin_backward(True)
            start = time.perf_counter()
            loss.backward()
            seconds = time.perf_counter() - start
            engine.core.end_backward()
            engine.core.clear_grads()
            return seconds

        return run

    contenders = {"without": without, "without again": without, "Python": in_python}
    contenders.update({f"engine, stage {stage}": in_engine(engine_of(stage)) for stage in (0, 2, 3)})
    for run in contenders.values():
        run()
    times = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, run in contenders.items():
            times[name].append(run())
    found = {
        name: statistics.median((a - b) / args.parameters * 1e9 for a, b in zip(values, times["without"]))
        for name, values in times.items()
        if name != "without"
    }
    base = statistics.median(times["without"]) / args.parameters * 1e9
    print(f"backward without hooks: {base:.0f} ns for each of {args.parameters} parameters, torch {torch.__version__}")
    for name, value in found.items():
        print(f"  {name:20s} {value:+8.0f} ns for each parameter")
    if args.json:
        machine.write_json(args.json, "hook_overhead", {"ns_per_parameter": found, "backward_ns": base})


if __name__ == "__main__":
    main()
