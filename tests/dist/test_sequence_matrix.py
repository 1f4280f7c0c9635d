"""Engines on sequences that ranks share against one plain process: ways of attention, heads, masks, losses, stages,
replicas and accumulation together, ten steps of SGD (Adam would hide a factor)."""

import pytest
import torch

import toy_transformers
from deepspeed.sequence import masks, methods, weighted_loss
from deepspeed.sequence.hf_attention import UlyssesSPAttentionHF
from deepspeed.utils import groups, safe_get_full_grad
from harness import run_ranks
from runs import weight_list
from sampling import every_case, sample
from sequence_models import mean_loss, of_cases, plain_sgd, sgd_engine, vocab_loss, worst

RATE, STEPS, LENGTH, VOCAB, SIZE = 0.2, 10, 48, 13, 4
HEADS = [(8, 8), (8, 2), (6, 3), (5, 1), (2, 2)]
MASKS = ["causal", "full", "packed", "padded", "window"]
METHODS = ["auto", "ulysses", "ring", "both", "chunk"]  # chunk: an exchange, and blocks of 5 tokens
# The largest gaps to one process in fp32: losses, gradients and parameters after ten steps, relative to the largest.
GAPS = {"fp32": 1e-6, "bf16": 2e-2}


def sdpa_attention_forward(module, query, key, value, mask, is_causal=True, scaling=None, **kwargs):
    """Plain attention under the name that rings ask for."""
    mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool) if mask is None and not is_causal else mask
    return toy_transformers.sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)


class Model(torch.nn.Module):
    """One layer. ``attention``: of transformers' signature."""

    def __init__(self, heads, kv, kind, attention):
        super().__init__()
        torch.manual_seed(5)
        width = heads * SIZE
        self.attention, self.num_key_value_groups, self.is_causal = attention, heads // kv, kind != "full"
        self.sliding_window = 7 if kind == "window" else None
        self.tokens, self.places = torch.nn.Embedding(VOCAB, width), torch.nn.Embedding(LENGTH, width)
        self.query, self.keys = torch.nn.Linear(width, width), torch.nn.Linear(width, 2 * kv * SIZE)
        self.back, self.head = torch.nn.Linear(width, width), torch.nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens, positions, mask):
        x = self.tokens(tokens) + self.places(positions)
        query, (key, value) = self.query(x), self.keys(x).chunk(2, -1)
        heads = (one.unflatten(-1, (-1, SIZE)).transpose(1, 2) for one in (query, key, value))
        out = self.attention(
            self, *heads, mask, position_ids=positions, is_causal=self.is_causal, scaling=SIZE**-0.5,
            sliding_window=self.sliding_window,
        )[0]  # fmt: skip
        return self.head(torch.tanh(x + self.back(out.flatten(2))))


def batch_of(kind, micro, replica):
    """Tokens, positions, padding (None: there is none) and shifted labels of a whole sequence."""
    generator = torch.Generator().manual_seed(1000 * micro + replica)
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    positions, kept = torch.arange(LENGTH).expand(2, LENGTH), None
    labels = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].clone()
    labels[torch.rand(2, LENGTH, generator=generator) < 0.3] = -100
    labels[0, 0] = 3
    if kind == "packed":
        positions = torch.cat((torch.arange(29), torch.arange(LENGTH - 29))).expand(2, LENGTH)
    if kind == "padded":
        kept = torch.ones(2, LENGTH, dtype=torch.bool)
        kept[0, 31:] = kept[1, 5:] = False  # of some ranks nothing
        labels = labels.masked_fill(~kept, -100)
    return tokens, positions, kept, labels


def attend_alone(kind):
    def attention(module, query, key, value, mask, position_ids, **kwargs):
        whole = torch.ones_like(position_ids, dtype=torch.bool) if mask is None else mask
        looks = masks.allowed(position_ids, whole, module.is_causal, module.sliding_window)
        return sdpa_attention_forward(module, query, key, value, looks, **kwargs)

    return attention


def reference(heads, kind, loss_kind, accumulate, replicas):
    def loss_at(model, step, part):
        *inputs, labels = batch_of(kind, step * accumulate + part // replicas, part % replicas)
        return mean_loss(model(*inputs), labels)

    model = Model(*heads, kind, attend_alone(kind))
    return plain_sgd(model, RATE, loss_at, STEPS, accumulate * replicas)


def loss_of(kind, logits, labels, group, size):
    logits = logits.float()
    if size == 1:
        return mean_loss(logits, labels)
    if kind == "weighted":
        return weighted_loss(mean_loss(logits, labels), labels, group)
    return vocab_loss(logits, labels, group)


def gap_of(pairs):
    """Relative to the largest of what is expected."""
    pairs = list(pairs)
    return worst(pairs) / max(float(expected.detach().abs().max()) for _, expected in pairs)


def train_case(rank, world, *case):
    """The largest gap to one process of losses, of gradients in the first step, and of parameters after the last."""
    size, replicas, stage, method, heads, kind, loss_kind, accumulate, dtype = case
    place, replica = rank % size, rank // size
    model = Model(*heads, kind, attend_alone(kind))
    engine = sgd_engine(
        model, stage, RATE, accumulate, level="ERROR", dtype=dtype, zero={"reduce_bucket_size": 300},
        sequence_parallel_size=size,
    )  # fmt: skip
    group, found = engine.seq_parallel_group, []
    if size > 1:
        shared = UlyssesSPAttentionHF(
            sdpa_attention_forward, 2, heads[0], SIZE, heads[1], 1, group, seq_length_is_variable=True
        )
        shared.configure(*(("auto", 5) if method == "chunk" else (method,)))
        model.attention = shared
    grads = []
    for micro in range(STEPS * accumulate):
        inputs = [None if one is None else one.chunk(size, 1)[place] for one in batch_of(kind, micro, replica)]
        loss = loss_of(loss_kind, engine(*inputs[:3]), inputs[3], group, size)
        engine.backward(loss)
        if micro == accumulate - 1:
            grads = [safe_get_full_grad(param).float() for param in engine.module.parameters()]
        engine.step()
        found.append(loss.item())
    plain = reference(heads, kind, loss_kind, accumulate, replicas)
    losses = sum(plain.losses, [])
    gaps = [
        gap_of(zip(weight_list(engine), plain.params.values())),
        gap_of((a, plain.grads[0][b]) for a, b in zip(grads, plain.params)),
    ]
    engine.destroy()
    groups.clear()
    return max(gaps + [abs(a - b) / max(abs(b), 1.0) for a, b in zip(found, losses[replica::replicas])])


def possible(size, method, heads):
    """Whether the heads allow the method; what is refused is tested elsewhere."""
    if size == 1 or method == "chunk":
        return size > 1 or method == "auto"
    try:
        methods.exchanging(method, heads[0], ["here"] * size)
    except ValueError:
        return False
    return True


SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (8, 1)]


def all_cases():
    """Every way of attention with every number of ranks and replicas, while stages, losses and accumulation take turns;
    and these with each other, where attention stays the same; and some of both in bf16. In fp32 any three values meet
    in some case, where they may."""
    ways = [(stage, loss, times) for stage in range(4) for loss in ("weighted", "vocab") for times in (1, 4)]
    attention = [
        (size, replicas, method, heads, kind)
        for size, replicas in SIZES
        for method in METHODS
        for heads in HEADS
        for kind in MASKS
        if possible(size, method, heads)
    ]
    made = []
    for index, (size, replicas, method, heads, kind) in enumerate(attention):
        stage, loss, times = ways[index * 7 % len(ways)]
        made.append((size, replicas, stage, method, heads, kind, loss, times, "fp32"))
        if index % 7 == 0:
            stage, loss, times = ways[(index // 7 * 5 + 3) % len(ways)]
            made.append((size, replicas, stage, method, heads, kind, loss, times, "bf16"))
    made += [
        (size, replicas, stage, "auto", (5, 1), "packed", loss, times, dtype)
        for size, replicas in [(2, 1), (2, 2), (4, 1)]
        for stage, loss, times in ways
        for dtype in (GAPS if size == replicas else ["fp32"])
    ]
    return made


CASES = all_cases()


def cases_of(world):
    chosen = CASES if every_case() else [CASES[index] for index in sample(CASES, "values")]
    return [case for case in chosen if case[0] * case[1] == world]


def parts():
    """``(ranks, at most 20 cases)``: what one run of ranks does."""
    made = []
    for world in sorted({case[0] * case[1] for case in CASES}):
        cases = cases_of(world)
        made += [(world, cases[at : at + 20]) for at in range(0, len(cases), 20)]
    return made


def check(world, cases, **more):
    for gaps in run_ranks(world, of_cases, train_case, cases, timeout=120 + 30 * len(cases), **more):
        assert not [(case, gap) for case, gap in zip(cases, gaps) if not gap < GAPS[case[-1]]]


@pytest.mark.parametrize("world, cases", parts(), ids=lambda value: str(value) if isinstance(value, int) else "cases")
def test_matrix(world, cases):
    check(world, cases)


def test_over_gloo():
    """Without shared memory."""
    cases = [case for case in CASES if case[:2] == (2, 1)]
    check(2, cases[:: len(cases) // 20] if every_case() else cases[40:41], env={"DS_SHM_COLLECTIVES": "0"})
