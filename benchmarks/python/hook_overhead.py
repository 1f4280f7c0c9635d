"""The cost of the engine's gradient hooks for each parameter, beside the same bookkeeping in Python.

    python benchmarks/python/hook_overhead.py [--parameters 1000] [--rounds 30] [--json FILE]

One process, many tiny parameters, so that nothing but overhead is left. Interleaved: backward without hooks, through
the engine (each C++ hook moves the gradient into its slot, counts and frees it; its begin and end are included), and
with Python hooks that copy the gradient into a slot and count. Medians over the rounds of
(with - without) / parameters, once for backward alone and once for backward and whatever frees the gradients
afterwards, since the engine does that inside backward. The spread of two runs without hooks is the noise.
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
    parser.add_argument("--rounds", type=int, default=120)
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

    def timed(forward, backward, clear):
        loss = forward()
        start = time.perf_counter()
        backward(loss)
        middle = time.perf_counter()
        clear()
        return middle - start, time.perf_counter() - start

    plain, hooked = Many(), Many()
    slots = torch.zeros(args.parameters, 8)
    counts = [0] * args.parameters

    def hook_of(index):
        def hook(grad):
            slots[index].copy_(grad)
            counts[index] += 1

        return hook

    for index, param in enumerate(hooked.parameters()):
        param.register_hook(hook_of(index))

    def on_module(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        return lambda: timed(
            lambda: module(x), lambda loss: loss.backward(), lambda: optimizer.zero_grad(set_to_none=True)
        )

    def in_engine(stage):
        engine = engine_of(stage)
        return lambda: timed(lambda: engine(x), engine.backward, engine.core.clear_grads)

    contenders = {"without": on_module(plain), "without again": on_module(plain), "Python": on_module(hooked)}
    contenders.update({f"engine, stage {stage}": in_engine(stage) for stage in (0, 2, 3)})
    names = list(contenders)
    times = {name: [] for name in names}
    for turn in range(-2, args.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds = contenders[name]()
            if turn >= 0:
                times[name].append(seconds)

    def beyond(name, part):
        pairs = zip(times[name], times["without"])
        return statistics.median((a[part] - b[part]) / args.parameters * 1e9 for a, b in pairs)

    found = {name: {"backward": beyond(name, 0), "with_freeing": beyond(name, 1)} for name in names[1:]}
    base = [statistics.median(pair[part] for pair in times["without"]) / args.parameters * 1e9 for part in (0, 1)]
    print(
        f"without hooks: {base[0]:.0f} ns of backward for each of {args.parameters} parameters, {base[1]:.0f} ns with "
        f"the freeing of its gradient; torch {torch.__version__}\nbeyond that, in ns for each parameter:"
    )
    for name, value in found.items():
        print(f"  {name:20s} backward {value['backward']:+8.0f}    with freeing {value['with_freeing']:+8.0f}")
    if args.json:
        machine.write_json(args.json, "hook_overhead", {"ns_per_parameter": found, "without": base})


if __name__ == "__main__":
    main()
