"""Kernels beside torch's, on the CPU, forward and backward: times and memory, in one run.

    python benchmarks/python/kernels.py [--threads 2] [--rounds 5] [--json FILE]
                                        [--only dense sparse evoformer layer lora memory]

``dense``: the share of the flops of torch.matmul in fp32, and torch's scaled_dot_product_attention (torch 2) beside it.
``sparse``: layouts of random blocks; times over density times the dense time, and beside dense torch. ``evoformer``:
two biases with gradients, beside einsum and beside torch with summed biases. ``layer``: a layer of BERT-large with
dropout beside torch's, eager and compiled, and the time of its matrix products alone. ``lora``: a linear layer with
LoRA over frozen weights of fp32 and of small floats, beside torch's own layers, and the time of decoding twice alone;
bytes of the frozen weight, and bytes that autograd keeps. ``memory``: bytes at the peak of a process beyond what it had
with inputs and gradients, of one forward and backward. Forms take turns; the best times count.
"""

import argparse
import functools
import gc
import json
import resource
import subprocess
import sys
import time

HEADS, SIZE = 16, 64


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["dense", "sparse", "evoformer", "layer", "lora", "memory"])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--peak", metavar="CASE", help=argparse.SUPPRESS)  # in a process of its own
    return parser.parse_args()


def leaves_of(torch, *shapes, dtype=None):
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def both_ways(torch, attend, leaves):
    output = attend(*leaves)
    return torch.autograd.grad(output, leaves, torch.ones_like(output))


def forms_of(torch, leaves, **attends):
    """Calls of both ways; None is left out."""
    return {name: functools.partial(both_ways, torch, one, leaves) for name, one in attends.items() if one is not None}


def best_of(rounds, forms):
    """Seconds of each form, which take turns."""
    best = {}
    for _ in range(rounds):
        for name, form in forms.items():
            start = time.perf_counter()
            form()
            best[name] = min(best.get(name, 1e9), time.perf_counter() - start)
    return best


def formula(torch, query, key, value, *biases):
    """Attention as it is written down, on ``[..., heads, tokens, size]``."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    for bias in biases:
        scores = scores + bias
    return scores.softmax(-1) @ value


def layout_of(torch, heads, blocks, density):
    generator = torch.Generator().manual_seed(0)
    layout = torch.rand(heads, blocks, blocks, generator=generator) < density
    return layout | torch.eye(blocks, dtype=torch.bool)


def dense(torch, ops, rounds, report):
    fused = getattr(torch.nn.functional, "scaled_dot_product_attention", None)
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (512, 1024, 2048, 4096):
            leaves = leaves_of(torch, *[(1, HEADS, tokens, SIZE)] * 3, dtype=dtype)
            forms = forms_of(torch, leaves, ours=ops.attention, fused=fused)
            one = torch.randn(2048, 2048)
            forms["matmul"] = functools.partial(torch.matmul, one, one)
            best = best_of(rounds, forms)
            flops = 7 * 2 * HEADS * tokens * tokens * SIZE  # two products, then five
            share = flops / best["ours"] / (2 * 2048**3 / best["matmul"])
            report("dense", dtype=str(dtype)[6:], tokens=tokens, matmul_share=share, best=best)


def sparse(torch, ops, rounds, report):
    fused = getattr(torch.nn.functional, "scaled_dot_product_attention", None)
    for tokens in (2048, 4096):
        leaves = leaves_of(torch, *[(1, HEADS, tokens, SIZE)] * 3)
        for block in (64, 16):
            for density in (0.1, 0.5):
                blocks = ops.KeyBlocks(layout_of(torch, HEADS, tokens // block, density), block)
                of_blocks = functools.partial(ops.attention, blocks=blocks)
                forms = forms_of(torch, leaves, dense=ops.attention, sparse=of_blocks, fused=fused)
                best = best_of(rounds, forms)
                over = best["sparse"] / (best["dense"] * blocks.density)
                report("sparse", tokens=tokens, block=block, density=blocks.density, over_density=over, best=best)


def by_heads(attend):
    """``attend`` for tensors ``[..., tokens, heads, size]``."""
    return lambda q, k, v, *biases: attend(*[one.transpose(-2, -3) for one in (q, k, v)], *biases).transpose(-2, -3)


def evoformer(torch, ops, rounds, report):
    from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention

    def ours(q, k, v, *biases):
        return DS4Sci_EvoformerAttention(q, k, v, list(biases))

    fused = getattr(torch.nn.functional, "scaled_dot_product_attention", None)
    summed = fused and by_heads(lambda q, k, v, *biases: fused(q, k, v, attn_mask=biases[0] + biases[1]))
    for sequences, residues in ((8, 256), (32, 384)):
        shapes = [(1, sequences, residues, 8, 32)] * 3
        biases = [(1, sequences, 1, 1, residues), (1, 1, 8, residues, residues)]
        leaves = leaves_of(torch, *shapes, *biases)

        forms = forms_of(torch, leaves, ours=ours, einsum=by_heads(functools.partial(formula, torch)), fused=summed)
        report("evoformer", sequences=sequences, residues=residues, best=best_of(rounds, forms))


def layer(torch, ops, rounds, report):
    from deepspeed.ops.transformer import DeepSpeedTransformerLayer

    hidden = 1024
    for batch, tokens in ((4, 128), (2, 512)):
        eager = torch.nn.TransformerEncoderLayer(hidden, 16, 4 * hidden, 0.1, "gelu", batch_first=True, norm_first=True)
        ours = DeepSpeedTransformerLayer.from_layer(eager)
        leaves = leaves_of(torch, (batch, tokens, hidden)) + list(eager.parameters())
        own = [leaves[0], *ours.parameters()]
        rows, weight = torch.randn(batch * tokens, hidden), torch.randn(hidden, 12 * hidden)
        forms = {
            "ours": functools.partial(both_ways, torch, lambda x, *_: ours(x), own),
            "eager": functools.partial(both_ways, torch, lambda x, *_: eager(x), leaves),
            "products": lambda rows=rows, weight=weight: [torch.matmul(rows, weight) for _ in range(3)],
        }
        if hasattr(torch, "compile"):
            compiled = torch.compile(eager)
            forms["compiled"] = functools.partial(both_ways, torch, lambda x, *_, call=compiled: call(x), leaves)
            forms["compiled"]()
        best = best_of(rounds, forms)
        speeds = {name: seconds / best["ours"] for name, seconds in best.items() if name != "ours"}
        report("layer", batch=batch, tokens=tokens, speed_over=speeds, best=best)


def lora(torch, ops, rounds, report):
    from deepspeed import linear

    width, out, rank = 1024, 4096, 16

    def make(bits):
        coded = bits and linear.QuantizationConfig(q_bits=bits)
        return linear.OptimizedLinear(width, out, False, linear.LoRAConfig(rank), coded, dtype=torch.float32)

    layers = {f"{bits} bits" if bits else "whole": make(bits) for bits in (None, 12, 8, 6, 4)}
    base, first, second = (torch.nn.Linear(*sizes, bias=False) for sizes in ((width, out), (width, rank), (rank, out)))
    base.weight.requires_grad_(False)

    def plain(x):
        return base(x) + second(first(x)) * (16.0 / rank)

    def step(call, x):
        call(x).backward(torch.ones(x.shape[0], out))

    for tokens in (64, 1024):
        x = torch.randn(tokens, width, requires_grad=True)
        forms = {"torch": functools.partial(step, plain, x)}
        forms.update({name: functools.partial(step, layer, x) for name, layer in layers.items()})
        forms["decoding twice"] = lambda: [layers["8 bits"].full_weight() for _ in range(2)]
        best = best_of(rounds, forms)
        speeds = {name: best["torch"] / seconds for name, seconds in best.items() if name != "torch"}
        report("lora", tokens=tokens, speed_over_torch=speeds, best=best)
    kept = {}
    for name, call in {"torch": plain, **layers}.items():
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.setdefault(t.data_ptr(), t), lambda t: t
        ):
            call(torch.randn(64, width, requires_grad=True))
        kept[name] = sum(one.numel() * one.element_size() for one in saved.values())
    rests = {name: layer.weight.numel() * layer.weight.element_size() for name, layer in layers.items()}
    report("lora", bytes_at_rest=rests, bytes_kept=kept)


def peak(torch, ops, case):
    """Bytes of this process at its peak beyond what it had before the call."""
    kind, form, *numbers = case.split(",")
    if kind == "attention":
        tokens = int(numbers[0])
        blocks = ops.KeyBlocks(layout_of(torch, HEADS, tokens // 64, 0.1), 64) if form == "sparse" else None
        leaves = leaves_of(torch, *[(1, HEADS, tokens, SIZE)] * 3)
        forms = {
            "formula": lambda *given: formula(torch, *given),
            "dense": ops.attention,
            "sparse": lambda *given: ops.attention(*given, blocks=blocks),
        }
        attend = forms[form]
    else:
        from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention

        dtype = getattr(torch, numbers[0])
        shapes = [(1, 8, 1024, 8, 32)] * 3 + [(1, 8, 1, 1, 1024), (1, 1, 8, 1024, 1024)]
        leaves = leaves_of(torch, *shapes, dtype=dtype)
        plain = by_heads(functools.partial(formula, torch))
        attend = plain if form == "formula" else lambda q, k, v, *b: DS4Sci_EvoformerAttention(q, k, v, list(b))
    if kind == "attention":
        warm = [leaf[..., :64, :] for leaf in leaves]
    else:
        warm = [leaf[..., :64, :, :] for leaf in leaves[:3]] + [leaves[3][..., :64], leaves[4][..., :64, :64]]
    warm = [one.detach().requires_grad_() for one in warm]
    both_ways(torch, ops.attention if form == "sparse" else attend, warm)  # what torch makes once is made
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    gc.collect()
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")  # the peak begins anew
    before = resident("VmRSS")
    grads = both_ways(torch, attend, leaves)
    print(resident("VmHWM") - before - sum(one.numel() * one.element_size() for one in grads))


def resident(name):
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


def memory(torch, ops, rounds, report):
    def measured(*case):
        command = [sys.executable, __file__, "--peak", ",".join(map(str, case))]
        run = subprocess.run(command, capture_output=True, text=True)
        return int(run.stdout) if run.returncode == 0 else None  # not enough memory

    for form in ("dense", "sparse", "formula"):
        for tokens in (512, 1024, 2048, 4096, 8192):
            if form != "formula" or tokens <= 4096:
                report("memory", form=form, tokens=tokens, peak=measured("attention", form, tokens))
    for dtype in ("float32", "bfloat16"):
        found = {form: measured("evoformer", form, dtype) for form in ("ours", "formula")}
        report("memory", form="evoformer", dtype=dtype, peak=found, ratio=found["formula"] / found["ours"])


def main():
    args = parse_arguments()
    import torch

    from deepspeed.ops import attention as ops

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.peak:
        return peak(torch, ops, args.peak)
    found = []

    def report(kind, **facts):
        found.append({"kind": kind, **facts})
        best = facts.pop("best", {})
        facts = {name: round(one, 3) if isinstance(one, float) else one for name, one in facts.items()}
        times = "  ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in best.items())
        print(f"{kind}: {facts}  {times}", flush=True)

    for name in args.only:
        {"dense": dense, "sparse": sparse, "evoformer": evoformer, "layer": layer, "lora": lora, "memory": memory}[
            name
        ](torch, ops, args.rounds, report)
    if args.json:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        with open(args.json, "w", encoding="utf-8") as file:
            facts = {"torch": torch.__version__, "threads": args.threads, "user seconds": usage.ru_utime}
            json.dump({**facts, "found": found}, file, indent=1)
    return None


if __name__ == "__main__":
    main()
