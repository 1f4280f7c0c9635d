"""Peak bytes before a run: the parts that have them, what ranks, tiles and chunks change, and the longest length."""

import pytest
import torch

import deepspeed
import toy_transformers
from deepspeed.planner import Machine
from deepspeed.planner.lengths import PARTS, Setup, peaks
from deepspeed.sequence import explain, longest
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils.init_on_device import copy_on_meta
from refusals import refused


@pytest.fixture
def toy():
    with toy_transformers.installed():
        yield toy_transformers.ToyForCausalLM


def config_of(stage=0, **section):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        **({"sequence_parallel": section} if section else {}),
    }


def peaks_of(model, tokens, ranks=1, checkpointing=False, inputs=None, **section):
    """Bytes by part of each moment."""
    setup = Setup(model, config_of(size=ranks, **section), ranks, inputs, None).changed(recompute=checkpointing)
    return {moment: dict(zip(("states", *PARTS), found)) for moment, found in peaks(setup, tokens).items()}


def whole(found):
    """Bytes at the peak."""
    return max(sum(parts.values()) for parts in found.values())


def peak_of(*args, **how):
    """Without states."""
    return max(sum(parts.values()) - parts["states"] for parts in peaks_of(*args, **how).values())


class Alive(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x):  # 512 bytes
        first = self.linear(x)  # 256 bytes
        second = first * 2  # 256
        del first
        third = second.exp()  # 256, kept for backward; and its input goes
        del second
        return third.sum()


def test_bytes_of_a_step_belong_to_its_parts_while_they_are_alive():
    inputs = lambda batch, tokens: torch.empty(batch, tokens, 8, device="meta")
    found = peaks_of(Alive(), 16, inputs=inputs)
    assert found.keys() == {"forward", "forward of linear", "backward", "backward of linear", "step"}
    rows = {moment: {part: size // 256 for part, size in parts.items()} for moment, parts in found.items()}
    assert (rows["forward of linear"]["head and loss"], rows["forward of linear"]["other"]) == (2, 1)  # the input first
    assert (rows["forward"]["kept for backward"], rows["forward"]["head and loss"]) == (3, 1)
    assert (rows["backward"]["kept for backward"], rows["backward"]["head and loss"]) == (3, 1)  # and a gradient
    assert not any(size for part, size in rows["step"].items() if part != "states")


def test_what_makes_longer_sequences_fit(toy):
    layers = 8
    model = toy(heads=4, kv=2, hidden=32, layers=layers, intermediate=128, vocabulary=300)
    plain = peak_of(model, 512)
    assert all(param.grad is None and not param.is_meta for param in model.parameters())  # nothing has happened to it
    again = peak_of(model, 512, checkpointing=True)
    elsewhere = peak_of(model, 512, checkpointing=True, offload="file", folder="unused")
    chunks = peak_of(model, 512, chunk=64)
    loss = peak_of(model, 512, chunk=64, tile_loss=True)
    halves = peak_of(model, 512, ranks=2)
    assert plain > 1.8 * again and chunks < plain / 2 and loss < chunks
    # One copy is on its way, one input is in use.
    assert again - elsewhere >= (layers - 3) * 512 * 32 * 4
    assert peak_of(model, 512, checkpointing=True, offload="host") == again  # no other place than the CPU's memory
    assert 0.45 < halves / plain < 0.6  # scores of half of the heads, half of the tokens for everything else
    assert peak_of(model, 512, ranks=2, method="ring") < halves


def test_the_longest_length_is_the_last_that_fits(toy):
    model = toy(hidden=32, layers=3, vocabulary=100)
    report = explain(model, config_of(), memory=64 << 20, ranks=1)
    tokens = longest(model, config_of(), memory=64 << 20, ranks=1)
    assert tokens == report.longest > 500 and report.peak(tokens).bytes <= 64 << 20 < report.peak(tokens + 1).bytes
    assert set(report.peak(tokens).parts) == {"states", *PARTS} and "attention" in str(report)
    # At a length that was no sample the polynomial is what the step says.
    found = whole(peaks_of(model, tokens))
    assert abs(report.peak(tokens).bytes - found) <= 0.01 * found
    assert longest(model, config_of(), memory=1000, ranks=1) == 0
    assert longest(copy_on_meta(model), config_of(), memory=64 << 20, ranks=1) == tokens


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.every("forecasts like those of one rank"))])
def test_chunks_that_wait_elsewhere_are_a_polynomial_of_long_sequences(ranks, toy):
    model = toy(heads=4, hidden=128, layers=2, vocabulary=1000)
    model.gradient_checkpointing_enable()
    config = config_of(size=ranks, chunk=64, tile_loss=True, offload="file", folder="unused")
    peak = Setup(model, config, ranks, None, None).curve().peak(4096)  # as explain does
    how = {"chunk": 64, "tile_loss": True, "checkpointing": True, "offload": "file", "folder": "unused"}
    found = whole(peaks_of(model, 4096, ranks=ranks, **how))
    assert abs(peak.bytes - found) <= 0.05 * found


def test_the_next_step_is_the_cheapest_that_helps(toy):
    model = toy(heads=1, kv=1, hidden=64, layers=1, vocabulary=4000)
    report = explain(model, config_of(), memory=64 << 20, ranks=1)
    assert report.next_step[0] == "sequence_parallel.tile_loss: true" and report.next_step[1] > 1.1 * report.longest
    names = [what for what, _ in report.steps]
    assert any("gradient_checkpointing_enable" in what for what in names) and "2 ranks" in names[-1]
    tiled = explain(model, config_of(tile_loss=True), memory=64 << 20, ranks=1)
    assert tiled.longest == report.next_step[1] and "tile_loss" not in str(tiled.steps)


@pytest.mark.every("forty curves; one rank is in make test")
def test_the_next_step_of_several_ranks(toy):
    model = toy(heads=1, kv=1, hidden=64, layers=1, vocabulary=4000)
    tiled = explain(model, config_of(tile_loss=True), memory=64 << 20, ranks=1)
    four = explain(model, config_of(stage=2, size=2, tile_loss=True), memory=64 << 20, ranks=4)
    assert four.longest % 2 == 0 and four.longest > 1.3 * tiled.longest
    assert [what for what, _ in four.steps if "zero_optimization.stage: 3" in what]


def test_what_exchanges_keep_is_counted(toy):
    """Shared memory up to a slot, and three large results for the next ones."""
    model = toy(heads=4, kv=4, hidden=128, layers=1, intermediate=128, vocabulary=100)
    found = lambda tokens: peaks_of(model, tokens, ranks=2, chunk=4096).values()
    buffers = lambda tokens: max(parts["buffers"] for parts in found(tokens))
    assert buffers(512) == 4 * 3 * 256 * 64 * 4  # queries, keys and values of a part, half of their heads, four slots
    assert buffers(4000) == 4 << 19  # slots are full; results are smaller than what is kept
    assert buffers(4096) == (4 << 19) + (3 << 20)


class Bends(torch.nn.Module):
    """Above ``limit`` tokens it needs ``extra`` more bytes for each of them than below."""

    def __init__(self, limit, extra):
        super().__init__()
        self.first, self.limit, self.extra = torch.nn.Linear(16, 16), limit, extra

    def forward(self, x):
        hidden = self.first(x)
        waste = torch.empty(max(0, x.shape[1] - self.limit) * self.extra // 4, device=x.device)
        return (hidden * hidden).sum() + waste.sum() * 0


def test_a_further_sample_checks_the_curve():
    inputs = lambda batch, tokens: torch.empty(batch, tokens, 16, device="meta")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    report = lambda *bend: explain(Bends(*bend), config, memory=8 << 20, ranks=1, inputs=inputs)
    plain, bent = report(1 << 30, 0), report(400, 1000)
    assert "checked with 512 tokens: 0.0 % off" in str(plain)
    assert "no polynomial: with 512 tokens three samples were" in str(bent) and "0.0 % off at the last" in str(bent)
    for found, model in (
        (plain, Bends(1 << 30, 0)),
        (bent, Bends(400, 1000)),
    ):  # what was predicted is what the step says, below the bend and above
        for tokens in (100, 300, found.longest, 2 * found.longest):
            says = max(map(sum, peaks(Setup(model, config, 1, inputs, None), tokens).values()))
            assert abs(found.peak(tokens).bytes - says) <= 0.02 * says
        assert found.peak(found.longest).bytes <= 8 << 20 < found.peak(found.longest + 1).bytes


class Jumps(Bends):
    """Needs twice as much at each further power of two: no polynomial, however long the samples are."""

    def forward(self, x):
        return super().forward(x) + torch.empty(4 ** x.shape[1].bit_length() * 16, device=x.device).sum() * 0


def test_a_curve_that_stays_off_says_so():
    inputs = lambda batch, tokens: torch.empty(batch, tokens, 16, device="meta")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    found = str(explain(Jumps(1 << 30, 0), config, memory=1 << 30, ranks=1, inputs=inputs))
    assert "do not trust what is said of more than" in found


def test_a_plan_tiles_what_a_run_tiles(toy):
    """Modules without values are believed to treat tokens alone, since the run will prove it."""
    ids = torch.zeros(1, 512, dtype=torch.int64)
    plain, tiled = (
        deepspeed.plan(
            toy(hidden=32, intermediate=2048, vocabulary=4000),
            config_of(**section),
            1,
            sample={"input_ids": ids, "labels": ids},
            machine=Machine("none", {"float32": 1e12}, 1e11, 1000, (1000, 1e10), (1000, 1e10), 0, 0, 0),
        ).peak_bytes
        for section in ({}, {"tile_mlp": True, "tile_loss": True})
    )
    assert plain - tiled > 512 * 2048 * 4


class Own(torch.nn.Module):
    """Not of transformers: attention is wrapped, the loss is its own."""

    def __init__(self):
        super().__init__()
        self.qkv, self.back = torch.nn.Linear(16, 48), torch.nn.Linear(16, 1)
        self.shared = DistributedAttention(self.attend, None)

    @staticmethod
    def attend(query, key, value):
        return torch.einsum("bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", query, key).softmax(-1), value)

    def forward(self, x):
        parts = [one.unflatten(-1, (4, 4)) for one in self.qkv(x).chunk(3, -1)]
        return self.back(self.shared(*parts, 0).flatten(2))


def test_models_of_ones_own():
    inputs = lambda batch, tokens: torch.empty(batch, tokens, 16, device="meta")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}
    found = [
        longest(Own(), {**config, "sequence_parallel_size": size}, 32 << 20, ranks=size, inputs=inputs)
        for size in (1, 2, 4)
    ]
    assert 1.3 < found[1] / found[0] < 1.5 < 1.9 < found[2] / found[0] < 2.1  # scores grow with the square


def test_what_is_wrong_is_named(toy):
    for memory in (0, -5, "80GB", True):
        refused(ValueError, "memory is .*: it must be bytes of one rank", longest, toy(), config_of(), memory=memory)
    refused(ValueError, "does not divide", longest, toy(), config_of(size=2), memory=1 << 20, ranks=3)
