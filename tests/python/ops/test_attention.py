"""Attention of whole sequences by the kernels against the formula in float64: masks, layouts, biases, dropout."""

import random

import pytest
import torch
import torch.utils.checkpoint

from deepspeed.ops.attention import Dropped, KeyBlocks, attention, body
from deepspeed.ops.attention import whole as whole_attention
from deepspeed.profiling.op_costs import cost_of
from refusals import refused
from sampling import every_case

TIMES = 200 if every_case() else 40


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Case:
    """A random call. Lengths and sizes around registers and tiles."""

    def __init__(self, seed):
        pick = random.Random(seed)
        self.seed = seed
        self.outer = pick.choice([None, None, 1, 2, 3])
        self.inner, self.kv = pick.choice([1, 2, 3]), pick.choice([1, 2])
        self.heads = self.kv * pick.choice([1, 2, 3])
        longest = pick.choice([17, 70, 300, 300, 1025])
        if longest > 300:  # which takes long
            self.outer, self.inner = None, 1
        self.queries, self.keys = pick.randint(1, longest), pick.randint(1, longest)
        self.size, self.value_size = pick.choice([1, 5, 8, 16, 33, 64, 256]), pick.choice([1, 8, 20, 256])
        self.causal, self.window = pick.random() < 0.3, pick.choice([0, 0, 0, 5, 64])
        self.soft_cap, self.scale = pick.choice([0.0, 0.0, 1.5]), pick.choice([None, 0.4])
        self.block, self.density = pick.choice([0, 0, 1, 7, 16, 64]), pick.choice([0.05, 0.4, 1.0])
        self.alike, self.looks = pick.random() < 0.3, pick.choice(["all", "all", "padding", "pairs"])
        self.biases = [[pick.random() < 0.6 for _ in range(5)] for _ in range(pick.choice([0, 1, 2]))]
        self.drop = pick.choice([0.0, 0.0, 0.3])

    def leaves(self):
        lead = (self.inner,) if self.outer is None else (self.outer, self.inner)
        shapes = [(self.heads, self.queries, self.size), (self.kv, self.keys, self.size)]
        shapes.append((self.kv, self.keys, self.value_size))
        made = [normal(*lead, *shape, seed=self.seed + at) for at, shape in enumerate(shapes)]
        sizes = (self.outer or 1, self.inner, self.heads, self.queries, self.keys)
        for number, full in enumerate(self.biases):
            shape = [size if one else 1 for size, one in zip(sizes, full)]
            made.append(normal(*(shape if self.outer else shape[1:]), seed=self.seed + 7 + number))
        return made

    def rules(self):
        generator = torch.Generator().manual_seed(self.seed)
        found = {name: getattr(self, name) for name in ("causal", "window", "soft_cap", "scale")}
        batch = (self.outer or 1) * self.inner
        if self.looks != "all":
            rows = 1 if self.looks == "padding" else self.queries
            found["looks"] = torch.rand(batch, 1, rows, self.keys, generator=generator) > 0.4
        if self.block:
            blocks = [-(-tokens // self.block) for tokens in (self.queries, self.keys)]
            heads = 1 if self.alike else self.heads
            found["blocks"] = KeyBlocks(torch.rand(heads, *blocks, generator=generator) < self.density, self.block)
        if self.drop:
            found["dropped"] = Dropped(self.drop, seed=self.seed)
        return found


def run(case, dtype, leaves=None):
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves or case.leaves()]
    output = attention(*leaves[:3], biases=leaves[3:], **case.rules())
    upper = normal(*output.shape, seed=case.seed + 50).to(dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, upper)]


def gaps(found, expected):
    """Relative to the largest of what is expected, of each tensor, or to a sum over the features of a value: gradients
    of scores are differences of such sums, and may be zero."""
    least = max(1.0, expected[0].shape[-1] ** 0.5)
    return [
        float((one.double() - other.double()).abs().max() / other.abs().max().clamp(min=least)) if one.numel() else 0.0
        for one, other in zip(found, expected, strict=True)
    ]


@pytest.fixture
def by(monkeypatch):
    return lambda name: monkeypatch.setenv("DS_ATTENTION", name)


@pytest.mark.parametrize("part", range(4))
def test_random_calls_equal_the_formula(part, by):
    for seed in range(part * TIMES, (part + 1) * TIMES):
        case = Case(seed)
        by("torch")
        expected = run(case, torch.float64)
        by("kernel")
        found = gaps(run(case, torch.float32), expected)
        assert max(found) < 1e-5, (seed, vars(case), found)


def in_16_bits(query, key, value, biases, rules):
    """The formula as torch computes it with tensors of 16 bits: products sum up in fp32, and results are rounded."""
    heads, dtype = query.shape[1], query.dtype
    key, value = (one.repeat_interleave(heads // key.shape[1], 1) for one in (key, value))
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)).to(dtype) * rules.scale
    if rules.soft_cap:
        scores = torch.tanh(scores.float() / rules.soft_cap).to(dtype) * rules.soft_cap
    for bias in biases:
        scores = scores + bias.expand(query.shape[0] // rules.inner, rules.inner, -1, -1, -1).flatten(0, 1)
    seen = whole_attention.seen_keys(query, key, rules)
    seen = torch.ones_like(scores, dtype=torch.bool) if seen is None else seen
    used = scores.float().masked_fill(~seen, -1e30).softmax(-1).to(dtype) * seen
    if rules.dropped is not None:
        used = used * rules.dropped.mask(used.unsqueeze(2), (0, 0)).squeeze(2)
    return torch.matmul(used.float(), value.float()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_have_at_most_twice_the_error_of_torchs_formula(dtype, by, monkeypatch):
    ours, theirs = [], []
    for seed in range(1000, 1000 + 2 * TIMES):
        case = Case(seed)
        for full in case.biases:  # a bias that is the same for all keys changes nothing, and its gradient is rounding
            full[4] = True
        leaves = [leaf.to(dtype).double() for leaf in case.leaves()]
        by("torch")
        expected = run(case, torch.float64, leaves)
        with monkeypatch.context() as patch:
            patch.setattr(whole_attention, "formula", in_16_bits)
            theirs.append(gaps(run(case, dtype, leaves), expected))
        by("kernel")
        found = run(case, dtype, leaves)
        assert all(one.dtype == dtype for one in found)
        ours.append(gaps(found, expected))
        assert max(ours[-1]) < 8 * torch.finfo(dtype).eps, (seed, vars(case), ours[-1])
    for own, other in zip(zip(*[one[:4] for one in ours]), zip(*[one[:4] for one in theirs])):
        assert sum(own) < 2 * sum(other), (sum(own), sum(other))
    own, other = (sum(sum(one[4:]) for one in some) for some in (ours, theirs))
    assert own < 2 * other, (own, other)  # of biases


def test_a_query_that_sees_no_key_gets_zeros(by):
    for name in ("kernel", "torch"):
        by(name)
        leaves = [normal(1, 2, 20, 8, seed=at).float().requires_grad_() for at in range(3)]
        bias = torch.zeros(1, 1, 20, 20)
        bias[..., 3, :] = float("-inf")
        looks = torch.ones(1, 1, 20, 20, dtype=torch.bool)
        looks[..., 7, :] = False
        output = attention(*leaves, biases=[bias.requires_grad_()], looks=looks)
        grads = torch.autograd.grad(output.sum(), [*leaves, bias])
        assert not output[:, :, [3, 7]].any() and output[:, :, 4].all()
        assert not grads[0][:, :, [3, 7]].any() and all(one.isfinite().all() for one in grads)


@pytest.mark.parametrize("blocks", [False, True])
def test_dropout_is_drawn_once_for_a_forward_that_is_repeated(blocks):
    leaves = [normal(2, 2, 40, 8, seed=at).float().requires_grad_() for at in range(3)]
    layout = KeyBlocks(torch.ones(1, 5, 5).tril(), 8) if blocks else None

    def forward(*given):
        return attention(*given, blocks=layout, dropped=Dropped.drawn(0.3))

    results = []
    for again in (False, True):
        torch.manual_seed(3)
        output = torch.utils.checkpoint.checkpoint(forward, *leaves, use_reentrant=True) if again else forward(*leaves)
        output.square().sum().backward()
        results.append([output.detach(), *[leaf.grad for leaf in leaves]])
        for leaf in leaves:
            leaf.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_results_do_not_depend_on_threads():
    case, before = Case(4), torch.get_num_threads()
    case.__dict__.update(queries=300, keys=290, inner=2, outer=2, block=16, biases=[[True, False, True, True, True]])
    found = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(run(case, torch.float32))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for more in found[1:] for one, other in zip(found[0], more, strict=True))


def test_nothing_of_the_size_of_scores_is_kept():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.numel()) or one, lambda one: one):
        attention(*[torch.zeros(1, 2, 512, 8, requires_grad=True) for _ in range(3)], causal=True)
    assert max(kept) == 2 * 512 * 8


def test_plans_and_costs_count_it():
    meta = [torch.empty(2, 4, 64, 8, device="meta", requires_grad=True) for _ in range(3)]
    bias = torch.empty(1, 4, 64, 64, device="meta", requires_grad=True)
    layout = torch.zeros(4, 4, 4)
    layout[:, :, 0] = 1  # a quarter
    output = attention(*meta, biases=[bias], blocks=KeyBlocks(layout, 16))
    assert output.shape == (2, 4, 64, 8) and output.is_meta
    grads = torch.autograd.grad(output.sum(), [*meta, bias])
    assert [one.shape for one in grads] == [one.shape for one in (*meta, bias)]
    scores = 2 * 4 * 64 * 64 // 4
    q, k, v = meta
    costs = {
        "": cost_of("deepspeed::block_attention", (q, k, v, 0.25), {}, output),
        "backward": cost_of("deepspeed::block_attention_backward", (output, q, k, v, 0.25), {}, grads),
        "bias": cost_of("deepspeed::block_attention_bias", (output, q, k, v, 0.25), {}, bias),
    }
    expected = {"": (scores * 16, scores), "backward": (scores * 40, scores), "bias": (scores * 16, 2 * scores)}
    assert {name: (cost.macs, cost.other) for name, cost in costs.items()} == expected


def test_bad_calls_name_both_numbers(by):
    q, bias = torch.zeros(2, 4, 32, 8), torch.zeros(1, 3, 32, 32)
    layout = torch.ones(3, 2, 2)
    refused(ValueError, "the layout has 3 heads and the queries 4", attention, q, q, q, blocks=KeyBlocks(layout, 16))
    refused(
        ValueError, "the layout has 2 x 2 blocks of 8 tokens, but 32 queries and 32 keys are 4 x 4 blocks",
        attention, q, q, q, blocks=KeyBlocks(torch.ones(4, 2, 2), 8),
    )  # fmt: skip
    refused(
        ValueError, r"bias 1 has the shape \(1, 3, 32, 32\): it is \(2, 4, 32, 32\)", attention, q, q, q, biases=[bias]
    )
    refused(ValueError, "at most 2 biases, got 3", attention, q, q, q, biases=[bias] * 3)
    refused(ValueError, r"\(4, 32, 8\)", attention, q[0], q[0], q[0])
    refused(ValueError, "blocks of attention have 1 token or more, not 0", KeyBlocks, torch.ones(1, 1, 1), 0)
    refused(ValueError, "in fp32 or the dtype of the queries", attention, q, q, q, biases=[bias[:, :1].double()])
    by("gpu")
    refused(ValueError, "DS_ATTENTION is 'gpu': it is 'kernel', 'torch' or not set", attention, q, q, q)
    by("kernel")
    refused(
        ValueError, "attention of torch.float64 on cpu has no kernel", attention, q.double(), q.double(), q.double()
    )


def test_the_body_is_chosen_by_device_dtype_and_options(by, monkeypatch):
    query = torch.zeros(1, 1, 4, 4)
    fused = hasattr(torch.nn.functional, "scaled_dot_product_attention")
    assert body.body_for(query, True) == "kernel"
    assert body.body_for(query.double(), False) == "formula"
    by("torch")
    assert body.body_for(query, False) == "formula"
    assert body.body_for(query, True) == ("fused" if fused else "formula")
    monkeypatch.delenv("DS_ATTENTION")
    monkeypatch.setattr(body, "on_host", lambda tensor: False)  # another device
    built = []
    monkeypatch.setattr(body, "_built_for", lambda device: bool(built))
    assert body.body_for(query, False) == "formula"
    built.append(True)
    assert body.body_for(query, False) == "kernel"
    assert body.body_for(query, True) == ("fused" if fused else "kernel")


def test_fused_attention_gives_the_same(by, monkeypatch):
    if not hasattr(torch.nn.functional, "scaled_dot_product_attention"):
        pytest.skip("this torch has no fused attention")
    monkeypatch.setattr(whole_attention, "body_for", lambda query, plain: "fused")
    query, key = normal(2, 4, 30, 8, seed=1), normal(2, 2, 30, 8, seed=2)
    found = attention(query, key, key, causal=True)
    monkeypatch.setattr(whole_attention, "body_for", lambda query, plain: "formula")
    assert max(gaps([found], [attention(query, key, key, causal=True)])) < 1e-12
