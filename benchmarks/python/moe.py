"""The cost of a mixture of experts, beside the layers that it replaces.

    python benchmarks/python/moe.py [--rounds 15] [--threads 1] [--json FILE]

One process, fp32, all of a row interleaved, medians over the rounds: routing and moving rows (4,096 tokens, 64 experts)
by plan and kernels against one-hot masks and einsum, and moving them against copying as many bytes; 8 experts as one
grouped product against one dense product of equal operations, with equal loads and with Zipf's; a top-1 layer, forward
and backward, against the dense layer that it replaces; keeping all tokens by exact rows against padding to the busiest
expert; a layer of an unchanged model with 64 experts of 16 rows each against its own loop over experts; the statistics
of a step.
"""

import argparse
import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def medians(rounds, **calls):
    """ms of each call, in turn."""
    found = {name: [] for name in calls}
    for _ in range(rounds + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(times[2:]) for name, times in found.items()}


def zipf(total, parts):
    """``total`` rows, part i gets 1 / (i + 1) of the first."""
    weights = [1 / (i + 1) for i in range(parts)]
    counts = [int(total * w / sum(weights)) for w in weights]
    counts[0] += total - sum(counts)
    return counts


def unchanged(torch, AutoEP, AutoEPConfig):
    """A layer with experts as transformers 4 has it, and what takes its place; gradients are dropped each time."""
    nn, width, inner, experts = torch.nn, 256, 512, 64

    class GatedMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
            self.w2 = nn.Linear(inner, width, bias=False)

        def forward(self, x):
            return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))

    class SparseBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(width, experts, bias=False)
            self.experts = nn.ModuleList([GatedMLP() for _ in range(experts)])

        def forward(self, x):
            logits = self.gate(x)
            weights, chosen = torch.topk(torch.softmax(logits, 1), 2)
            weights, out = weights / weights.sum(1, keepdim=True), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                token, place = (chosen == number).nonzero(as_tuple=True)
                out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
            return out, logits

    def run(layer):
        layer.zero_grad(set_to_none=True)
        layer(given)[0].square().sum().backward()

    given = torch.randn(512, width, requires_grad=True)
    own = SparseBlock()
    model = nn.ModuleDict({"mlp": SparseBlock()})
    model["mlp"].load_state_dict(own.state_dict())
    names = {"moe_layer_pattern": "mlp$", "top_k": 2, "route_norm": True}
    weights = {"expert_w1": "w1", "expert_w2": "w2", "expert_w3": "w3"}
    auto = AutoEP(model, AutoEPConfig(enabled=True, **names, **weights))
    auto.replace_moe_layers(auto.ep_parser(), 1, 0)
    assert torch.allclose(model["mlp"](given)[0], own(given)[0], atol=1e-5)
    return {"ours": lambda: run(model["mlp"]), "loop": lambda: run(own)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    sys.path.insert(0, HERE)
    import torch

    import deepspeed
    from common import machine
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.moe.gating import route_topk
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.rows import combine_rows, dispatch_rows, ops
    from deepspeed.moe.sharded_moe import topkgating

    deepspeed.logger.setLevel("WARNING")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = {}

    # ---- routing ----------------------------------------------------------------------------------------------------
    tokens, experts, width = 4096, 64, 512
    logits, x = torch.randn(tokens, experts), torch.randn(tokens, width)

    def by_plan():
        routes = route_topk(logits, 2, 1.0, 4)
        sources, slots = routes.plan.sources(routes.capacity), routes.plan.slots(routes.capacity)
        return combine_rows(dispatch_rows(x, sources, slots), routes.weights(), sources, slots)

    def by_masks():
        _, combine, dispatch, _ = topkgating(logits, 2, 1.0, 4)
        moved = torch.einsum("sec,sm->ecm", dispatch.float(), x)
        return torch.einsum("sec,ecm->sm", combine, moved)

    assert torch.allclose(by_plan(), by_masks(), atol=1e-5)
    rows["routing and rows against one-hot einsum (ms)"] = medians(args.rounds, ours=by_plan, einsum=by_masks)
    order = torch.randperm(2 * tokens).to(torch.int32)
    many = torch.randn(2 * tokens, width)
    rows["8,192 rows of 512: permute against copy (ms)"] = medians(
        args.rounds, permute=lambda: ops().permute_rows(many, order), copy=many.clone
    )

    # ---- the product ------------------------------------------------------------------------------------------------
    inner, groups = 2048, 8
    weights = [torch.randn(inner, width) for _ in range(groups)]
    for name, counts in (("equal", [tokens // groups] * groups), ("Zipf", zipf(tokens, groups))):
        rows[f"8 experts as one product against a dense one, {name} loads (ms)"] = medians(
            args.rounds,
            ours=lambda counts=counts: ops().grouped_linear(x, counts, weights),
            dense=lambda: torch.nn.functional.linear(x, weights[0]),
            loop=lambda counts=counts: [
                torch.nn.functional.linear(part, w) for part, w in zip(x.split(counts), weights, strict=True)
            ],
        )

    # ---- the layer --------------------------------------------------------------------------------------------------
    def dense_layer():
        return torch.nn.Sequential(torch.nn.Linear(width, inner), torch.nn.GELU(), torch.nn.Linear(inner, width))

    def trained(layer):
        def run():
            out = layer(given)
            (out[0] if isinstance(out, tuple) else out).sum().backward()

        given = torch.randn(2048, width, requires_grad=True)
        return run

    rows["a top-1 layer of 8 experts against its dense one, forward and backward (ms)"] = medians(
        args.rounds,
        dropless=trained(MoE(width, dense_layer(), groups, drop_tokens=False)),
        capacity=trained(MoE(width, dense_layer(), groups)),
        dense=trained(dense_layer()),
    )
    keep = MoE(width, dense_layer(), groups, drop_tokens=False).eval()
    pad = MoE(width, dense_layer(), groups, eval_capacity_factor=1000.0).eval()
    pad.load_state_dict(keep.state_dict())
    skewed = zipf(2048, groups)
    with torch.no_grad():
        for layer in (keep, pad):
            layer.deepspeed_moe.gate.wg.weight.zero_()
            layer.deepspeed_moe.gate.wg.weight[:, :groups] = torch.eye(groups)
        batch = torch.randn(2048, width) * 0.01
        for expert, part in enumerate(batch.split(skewed)):
            part[:, expert] = 5.0
    pad.deepspeed_moe.gate.eval_capacity_factor = max(skewed) * groups / 2048
    assert keep(batch)[2].tolist() == skewed and torch.allclose(keep(batch)[0], pad(batch)[0], atol=1e-4)
    with torch.no_grad():
        rows["keeping all tokens at Zipf's loads: exact rows against padding (ms)"] = medians(
            args.rounds, exact=lambda: keep(batch), padded=lambda: pad(batch)
        )
    rows["64 experts of 16 rows in an unchanged model against its own loop, forward and backward (ms)"] = medians(
        args.rounds, **unchanged(torch, AutoEP, AutoEPConfig)
    )
    keep.train()
    counting = keep.deepspeed_moe.statistics
    routes = keep.deepspeed_moe.gate.route(batch)
    counting.counting = True
    rows["the statistics of a forward (ms)"] = medians(args.rounds, see=lambda: counting.see(routes))

    print(f"torch {torch.__version__}, {args.threads} thread(s), load {os.getloadavg()[0]:.1f}")
    for name, times in rows.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in times.items()))
    machine.write_json(args.json, "moe", rows, threads=args.threads, load=os.getloadavg()[0])


if __name__ == "__main__":
    main()
