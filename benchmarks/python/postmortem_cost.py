"""The cost of the section ``postmortem`` while nothing fails: its calls in a step of a 10M GPT, times their time.

    python benchmarks/python/postmortem_cost.py [--calls 2000] [--steps 10] [--json FILE]

One process, fp32, every failure watched. The methods that a step calls are called alone, ``--calls`` times; the state
of the random number generators is most of it. The core reads each local gradient once more (``csrc/zero/gradients/
nonfinite_grads.h``); the stand-in for that is torch's dot product of each gradient with itself. The step is timed
without the section.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    sys.path[:0] = [os.path.join(os.path.dirname(os.path.dirname(HERE)), "examples", "quickstart"), HERE]
    import torch

    import deepspeed
    from common import machine
    from model import GPT, Shape

    deepspeed.logger.setLevel("WARNING")
    shape = Shape(layers=6, heads=6, width=312, vocab_size=8192, context=256)

    def engine_of(**more):
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 1},
            **more,
        }
        return deepspeed.initialize(model=GPT(shape), config=config)[0]

    rows = torch.randint(0, shape.vocab_size, (4, shape.context + 1))
    x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step(engine):
        start = time.perf_counter()
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return time.perf_counter() - start

    plain = engine_of()
    numel = sum(param.numel() for param in plain.module.parameters())
    for _ in range(2):
        step(plain)
    step_s = statistics.median(step(plain) for _ in range(args.steps))
    plain.destroy()

    with tempfile.TemporaryDirectory() as folder:
        on = ["nonfinite", "spike", "exception", "hang"]
        engine = engine_of(postmortem={"on": on, "dir": folder})
        for _ in range(10):  # losses for the median of a spike
            step(engine)
        part, loss = engine._postmortem, torch.ones(())
        engine.losses = loss

        def timed(call):
            times = []
            for _ in range(args.calls):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            return statistics.median(times)

        grads = [torch.randn(param.numel()) for param in engine.module.parameters()]
        calls = {
            "see_inputs": timed(lambda: part.see_inputs((x, y), {})),
            "around": timed(lambda: part.around("forward")),
            "see_loss": timed(lambda: part.see_loss(loss, 1)),
            "before_step": timed(part.before_step),
            "_inspect": timed(lambda: part._inspect(1.0)),
            "after_step": timed(part.after_step),
        }
        args.calls = 10
        calls["local gradients"] = timed(lambda: [torch.dot(grad, grad) for grad in grads])
    total = sum(calls.values())
    print(f"{numel / 1e6:.1f}M parameters, step {step_s * 1e3:.1f} ms, torch {torch.__version__}")
    for name, seconds in calls.items():
        print(f"  {name:16s} {seconds * 1e6:9.1f} us")
    print(f"  {'all':16s} {total * 1e6:9.1f} us, {100 * total / step_s:.3f} % of the step")
    if args.json:
        figures = {"numel": numel, "step_s": step_s, "calls_s": calls, "share": total / step_s}
        machine.write_json(args.json, "postmortem_cost", figures)


if __name__ == "__main__":
    main()
