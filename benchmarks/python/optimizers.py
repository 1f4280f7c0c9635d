"""Native optimizers against the memory's speed and against torch, and a whole training step against torch's own.

    python benchmarks/python/optimizers.py [--numel 67108864] [--rounds 9] [--threads 1 2] [--json FILE]
                                           [--only adam adamw lion adagrad sgd adam8bit step]
                                           [--limit 0.95] [--many-limit 0.85]

Optimizers: one tensor of --numel fp32 elements, and 1,024 of the same total, each allocated by itself. The memory bound
is a native kernel with the loads and stores of the rule (in place, 4 bytes each) on the same kind of tensors, cut and
spread over threads alike, with one multiply-add per store.

The whole step: gradients and masters fp32, weights bf16; norm over all gradients, check for inf and nan, clip (it does
clip here), AdamW, cast to bf16. Ours is `FP16_Optimizer.step`; torch's is `clip_grad_norm_`, AdamW on the masters,
`copy_` to the weights. The ideal is two passes over memory: read the gradients (4 bytes per element); read gradient,
master and two moments, write the last three and the bf16 weight (30 bytes). Bytes are counted from what each sequence
of operations must load and store; times of the ideal are those of the bound kernel for the same bytes.

All candidates take turns within each round, so that the machine's moods meet them alike; ratios are medians over the
rounds of `time of the other / time of ours`. Exit code 1 when an optimizer reaches less than --limit of the memory
bound on one tensor, or less than --many-limit on 1,024.
"""

import argparse
import os
import statistics
import sys
import time
from functools import partial

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch  # noqa: E402

from common import machine  # noqa: E402  (the line above finds it from any directory)
from deepspeed._native import _C  # noqa: E402
from deepspeed.ops.adagrad import FusedAdagrad  # noqa: E402
from deepspeed.ops.adam import Adam8bit, FusedAdam  # noqa: E402
from deepspeed.ops.lion import FusedLion  # noqa: E402
from deepspeed.ops.sgd import FusedSGD  # noqa: E402
from deepspeed.published.fp16_optimizer import FP16_Optimizer  # noqa: E402

MANY = 1024
CLIP = 1.0
NORM_BYTES, UPDATE_BYTES = 4, 30  # of the ideal passes of a whole step, per element
# torch's sequence: norm 4; scaling the gradients 8; AdamW 16 read and 12 written; copy_ 4 read and 2 written.
TORCH_STEP_BYTES = 4 + 8 + 28 + 6

# name -> (ours, torch's class or None, its arguments)
OPTIMIZERS = {
    "adam": (lambda p: FusedAdam(p, adam_w_mode=False, weight_decay=0.01), torch.optim.Adam, {"weight_decay": 0.01}),
    "adamw": (lambda p: FusedAdam(p, weight_decay=0.01), torch.optim.AdamW, {"weight_decay": 0.01}),
    "lion": (lambda p: FusedLion(p, lr=1e-4, weight_decay=0.01), None, {}),
    "adagrad": (lambda p: FusedAdagrad(p, lr=0.01), torch.optim.Adagrad, {"lr": 0.01}),
    "sgd": (
        lambda p: FusedSGD(p, lr=1e-3, momentum=0.9),
        torch.optim.SGD,
        {"lr": 1e-3, "momentum": 0.9},
    ),
    "adam8bit": (lambda p: Adam8bit(p, lr=1e-3), None, {}),
}
# Two states of a byte each; their scales, one for each block, are less than a hundredth of that.
EIGHT_BIT_BYTES = 4 + 8 + 2 * 2


def torch_variants(cls, options):
    """name -> function that makes one of torch's forms; fused only where this torch has it for the CPU."""
    if cls is None:
        return {}
    variants = {
        "torch_loop": lambda params: cls(params, foreach=False, **options),
        "torch_foreach": lambda params: cls(params, foreach=True, **options),
    }
    probe = torch.nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    try:
        cls([probe], fused=True, **options).step()
        variants["torch_fused"] = lambda params: cls(params, fused=True, **options)
    except (TypeError, RuntimeError):
        pass
    return variants


def make_params(numel, count):
    params = [torch.nn.Parameter(torch.randn(numel // count)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn(p.shape) * 1e-3
    return params


def verify(name):
    """Ours equals torch's before anything is timed; True where torch has it."""
    build, cls, options = OPTIMIZERS[name]
    if cls is None:
        return
    ours, theirs = make_params(100003, 1), make_params(100003, 1)
    theirs[0].data.copy_(ours[0].data)
    theirs[0].grad.copy_(ours[0].grad)
    first, second = build(ours), cls(theirs, **options)
    for _ in range(3):
        first.step()
        second.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)


def in_turns(candidates, rounds, prepare=None):
    """Milliseconds of each candidate in each round: {name: [ms, ...]}."""
    times = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, run in candidates.items():
            if prepare is not None:
                prepare(name)
            start = time.perf_counter()
            run()
            if turn:  # the first turn allocates states and touches their memory
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def summarize(times, bytes_moved):
    ours = times["ours"]
    median = statistics.median(ours)
    figures = {"ours_ms": median, "ours_GBps": bytes_moved / median / 1e6}
    for name, values in times.items():
        if name != "ours":
            figures[f"{name}_ms"] = statistics.median(values)
            ratios = [other / own for other, own in zip(values, ours, strict=True)]
            figures[f"{name}_over_ours"] = statistics.median(ratios)
    return figures


def measure_optimizer(name, numel, count, threads, rounds):
    build, cls, options = OPTIMIZERS[name]
    params = make_params(numel, count)
    # The candidates share parameters and gradients, and have states of their own, as in training.
    optimizer = build(params)
    candidates = {"ours": optimizer.step}
    for variant, make in torch_variants(cls, options).items():
        candidates[variant] = make(params).step
    slots = optimizer.slots_of(optimizer.param_groups[0])
    states = [[torch.zeros_like(p) for p in params] for _ in slots]
    bound = _C.UpdateRunner(optimizer.rule, "bound")
    tensors, grads = [p.detach() for p in params], [p.grad for p in params]
    candidates["memory_bound"] = lambda: bound.memory_bound(tensors, grads, states, threads)
    figures = summarize(in_turns(candidates, rounds), numel * 4 * (3 + 2 * len(slots)))
    figures["of_memory_bound"] = figures.pop("memory_bound_over_ours")
    return figures


def torch_steps(params, numel):
    """name -> torch's own sequence for the whole step, on masters of its own."""
    found = {}
    for name, make in torch_variants(torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.01}).items():
        masters = [torch.nn.Parameter(p.detach().float()) for p in params]
        for master in masters:
            master.grad = torch.randn(master.shape)
        optimizer = make(masters)

        def step(masters=masters, optimizer=optimizer):
            norm = torch.nn.utils.clip_grad_norm_(masters, CLIP)
            if not torch.isfinite(norm):
                return
            optimizer.step()
            with torch.no_grad():
                for p, master in zip(params, masters):
                    p.copy_(master)

        found[name] = (step, masters)
    return found


def measure_step(numel, count, threads, rounds):
    params = [torch.nn.Parameter(torch.randn(numel // count).bfloat16()) for _ in range(count)]
    wrapper = FP16_Optimizer(
        FusedAdam(params, lr=1e-3, weight_decay=0.01), low_precision_dtype=torch.bfloat16, clip_grad=CLIP
    )
    for grad in wrapper.core.grads():
        grad.normal_()
    wanted = [[g.clone() for g in wrapper.core.grads()][0]]
    others = torch_steps(params, numel)

    def prepare(name):
        # A step uses gradients up (ours) or has scaled them (torch's): both get fresh ones, outside of the clock.
        if name == "ours":
            for index, grad in enumerate(wrapper.core.grads()):
                wrapper.core.set_full("grad", 0, index, grad)
        elif name in others:
            for master in others[name][1]:
                master.grad.copy_(wanted[0])

    bound = _C.UpdateRunner("adam", "bound")
    plain = make_params(numel, 1)
    states = [[torch.zeros(numel)] for _ in range(2)]
    tensors, grads = [p.detach() for p in plain], [p.grad for p in plain]
    candidates = {"ours": wrapper.step, **{name: step for name, (step, _) in others.items()}}
    candidates["ideal_norm"] = lambda: bound.memory_bound([], grads, [], threads)
    candidates["ideal_update"] = lambda: bound.memory_bound(tensors, grads, states, threads)
    times = in_turns(candidates, rounds, prepare)
    # The bound kernel writes no bf16 copy: 28 of the 30 bytes.
    pairs = zip(times.pop("ideal_norm"), times.pop("ideal_update"))
    times["ideal"] = [norm + update * UPDATE_BYTES / 28 for norm, update in pairs]
    figures = summarize(times, numel * (NORM_BYTES + UPDATE_BYTES))
    figures["of_ideal"] = figures.pop("ideal_over_ours")
    figures["ideal_bytes"] = numel * (NORM_BYTES + UPDATE_BYTES)
    # One read of the gradients, one fused pass: nothing else touches memory of this size.
    figures["bytes_moved"] = figures["ideal_bytes"]
    figures["torch_bytes"] = numel * TORCH_STEP_BYTES
    return figures


def measure_8bit(numel, count, threads, rounds):
    params = make_params(numel, count)
    wide = FusedAdam(params, lr=1e-3)
    bound = _C.UpdateRunner("adam", "bound")
    tensors, grads = [p.detach() for p in params], [p.grad for p in params]
    candidates = {"ours": OPTIMIZERS["adam8bit"][0](params).step, "fp32_states": wide.step}
    candidates["memory_bound"] = lambda: bound.memory_bound(tensors, grads, [], threads)
    times = in_turns(candidates, rounds)
    # The bound kernel reads the gradient and updates the parameter: 12 of the bytes.
    times["memory_bound"] = [ms * EIGHT_BIT_BYTES / 12 for ms in times["memory_bound"]]
    figures = summarize(times, numel * EIGHT_BIT_BYTES)
    figures["of_bytes_bound"] = figures.pop(
        "memory_bound_over_ours"
    )  # quantising computes, so there is no limit to hold
    return figures


def show(title, figures):
    print(title)
    for key, value in figures.items():
        print(f"  {key:24s} {value:,.3f}" if isinstance(value, float) else f"  {key:24s} {value:,}")
    sys.stdout.flush()


MEASURES = {"step": measure_step, "adam8bit": measure_8bit}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count()}))
    parser.add_argument("--only", nargs="+", choices=[*OPTIMIZERS, "step"], default=[*OPTIMIZERS, "step"])
    parser.add_argument("--limit", type=float, default=0.95)
    parser.add_argument("--many-limit", type=float, default=0.85)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    isa = _C.kernel_info("cpu")["isa"]
    print(f"{args.numel:,} fp32 elements, torch {torch.__version__}, kernels for {isa}")
    figures, slow = {}, []
    for name in args.only:
        if name != "step":
            verify(name)
        for threads in args.threads:
            torch.set_num_threads(threads)
            for label, count, limit in (("one_tensor", 1, args.limit), (f"{MANY}_tensors", MANY, args.many_limit)):
                key = f"{name}_{label}_{threads}_threads"
                measure = MEASURES.get(name, partial(measure_optimizer, name))
                figures[key] = measure(args.numel, count, threads, args.rounds)
                show(key, figures[key])
                if figures[key].get("of_memory_bound", limit) < limit:
                    slow.append(f"{key}: {figures[key]['of_memory_bound']:.3f} of the memory bound, less than {limit}")
    if args.json:
        limits = {"limit": args.limit, "many_limit": args.many_limit}
        machine.write_json(args.json, "optimizers", {**figures, "isa": isa, **limits}, numel=args.numel)
    print("\n".join(slow))
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
