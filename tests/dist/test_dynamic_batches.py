"""Batches of equal token counts: which samples they have, gradients, learning rates, tokens, resumed runs."""

import math
import os

import numpy
import pytest
import torch

import deepspeed
import pipe_models
from deepspeed.data.analyzer import DataAnalyzer
from deepspeed.data.token_batches import TokenBatches
from deepspeed.optim.lr_schedules import WarmupLR
from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed as dynamic_loader,
)
from deepspeed.utils import safe_get_full_grad
from harness import on_ranks, run_ranks
from logs import logged
from refusals import refused
from runs import settings, together
from token_models import WORDS, word_engine, words

COUNT, MOST = 60, 40
LENGTHS = numpy.random.default_rng(5).integers(1, 21, COUNT)


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        return number, torch.randint(0, WORDS, (int(LENGTHS[number]),), generator=generator)


def padded(sample, size):
    number, ids = sample
    return number, torch.nn.functional.pad(ids, (0, size - len(ids)))


def masked(numbers, ids):
    return (torch.arange(ids.shape[1]) < torch.from_numpy(LENGTHS)[numbers].unsqueeze(1)).long()


def section(**more):
    dynamic = {"enabled": True, "max_tokens": MOST, "sequence_picking_order": "random", **more}
    return {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": dynamic}}}


def made(accumulate=1, stage=0, given=None, dataset=None, more=None, **keys):
    engine = word_engine(accumulate, stage, **section(**keys), **(more or {}))
    given = {"dataset_seqlens": LENGTHS, "sample_padding_fn": padded, **(given or {})}
    return engine, dynamic_loader(dataset or Sentences(), engine, **given)[0]


# ---- which samples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["random", "seqlen", "dataloader"])
def test_samples_come_once_in_batches_that_fit(order):
    for ranks, steps in ((1, 1), (2, 2), (4, 1)):
        each = [
            TokenBatches(LENGTHS, MOST, order=order, ranks=ranks, rank=rank, steps=steps, max_batch_size=5)
            for rank in range(ranks)
        ]
        orders = []
        for epoch in range(2):
            for one in each:
                one.set_epoch(epoch)
            turns = [batch for turn in zip(*each) for batch in turn]
            assert all(LENGTHS[batch].sum() <= MOST and 1 <= len(batch) <= 5 for batch in turns)
            total = len(each[0].epoch_of(epoch).ends)
            assert len(turns) == math.ceil(total / (ranks * steps)) * ranks * steps == len(each[0]) * ranks
            assert sorted(sum(turns[:total], [])) == list(range(COUNT)) and turns[total:] == turns[: len(turns) - total]
            orders.append(sum(turns[:total], []))
        assert (orders[0] == orders[1]) == (order != "random")
        if order == "dataloader":
            assert orders[0] == list(range(COUNT))
        if order == "seqlen":
            assert (numpy.diff(LENGTHS[orders[0]]) >= 0).all()


def test_no_batch_could_take_the_next_sample():
    made = TokenBatches(LENGTHS, MOST, order="random").epoch_of(3)
    for end, tokens in zip(made.ends[:-1], made.tokens):
        assert tokens + LENGTHS[made.samples[end]] > MOST


def test_small_batches_are_left_out_and_told():
    with logged() as lines:
        found = [sample for batch in TokenBatches(LENGTHS, MOST, min_batch_size=4) for sample in batch]
    assert 0 < COUNT - len(found) and f"{COUNT - len(found)} samples of this epoch are left out" in "".join(lines)
    dropping = TokenBatches(LENGTHS, MOST, ranks=2, steps=2, drop_last=True)
    assert len(dropping) == len(dropping.epoch_of(0).ends) // 4 * 2
    chosen = TokenBatches(LENGTHS, MOST, samples=[7, 3, 9])
    assert sum(chosen, []) == [7, 3, 9]


def test_bad_input():
    longest = LENGTHS.argmax()
    told = f"max_tokens is 15, and sample {longest} has {LENGTHS[longest]} tokens"
    refused(ValueError, told, TokenBatches, LENGTHS, 15)
    refused(ValueError, "no batch of at most 40 tokens has min_batch_size 50", TokenBatches, LENGTHS, 40, None, 50)
    refused(ValueError, "min_batch_size 3 is above max_batch_size 2", TokenBatches, LENGTHS, 40, None, 3, 2)
    refused(ValueError, "the length of sample 1 is 0", TokenBatches, [3, 0], 40)
    refused(ValueError, "from 0 to 59", TokenBatches, LENGTHS, 40, [60])
    refused(ValueError, "has 1 batches of at most 40 tokens, and a step", few_batches)


def few_batches():
    TokenBatches([3, 4], 40, ranks=2, drop_last=True)


# ---- training ------------------------------------------------------------------------------------------------------


def all_at_once(model, numbers):
    """Gradients of one process with all samples."""
    samples = [padded(Sentences()[number], 20) for number in numbers]
    ids = torch.stack([one for _, one in samples])
    model.zero_grad()
    model(ids, masked(torch.tensor(numbers), ids)).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("world, accumulate, stage, plain", [(1, 3, 0, False), (2, 2, 2, True), (4, 1, 1, False)])
@on_ranks(init=True)
def test_gradients_are_those_of_one_process(rank, world, accumulate, stage, plain):
    engine, loader = made(accumulate, stage)
    reference, seen, samples, tokens, worst = words(), [], 0, 0, 0.0
    for numbers, ids in loader:
        loss = engine(ids, attention_mask=masked(numbers, ids))
        loss.backward() if plain else engine.backward(loss)
        seen += numbers.tolist()
        if engine.is_gradient_accumulation_boundary():
            together_seen = sum(together(seen), [])
            reference.load_state_dict(engine.module.state_dict())
            wanted = all_at_once(reference, together_seen)
            for name, param in engine.module.named_parameters():
                found = safe_get_full_grad(param)
                worst = max(worst, ((found - wanted[name]).norm() / wanted[name].norm()).item())
            samples, tokens, seen = samples + len(together_seen), tokens + LENGTHS[together_seen].sum(), []
        engine.step()
    assert worst < 1e-6, worst
    assert (engine.global_samples, engine.consumed_tokens) == (samples, tokens) and engine.global_steps >= 3


@on_ranks(1)
def test_a_loop_that_fetches_ahead_is_told(rank, world):
    engine, loader = made()

    def trained(batch):
        with logged() as said:
            numbers, ids = batch
            engine.backward(engine(ids, attention_mask=masked(numbers, ids)))
            engine.step()
        return "".join(said)

    batches = iter(loader)
    for _ in range(2):
        assert "micro-batches since the last forward" not in trained(next(batches))
    first, _ = next(batches), next(batches)
    assert "has handed out 2 micro-batches since the last forward" in trained(first)


@pytest.mark.parametrize("method", ["linear", "sqrt", "none"])
@on_ranks(2, init=True)
def test_rates_follow_the_samples_of_each_step(rank, world, method):
    warm = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.25}}
    engine, loader = made(2, lr_scaling_method=method, more={"scheduler": warm})
    plain = WarmupLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), **warm["params"])
    scale = {"linear": lambda x: x, "sqrt": math.sqrt, "none": lambda x: 1.0}[method]
    for steps in (3, math.inf, math.inf):  # of an epoch, of which the first one is left
        seen = 0
        for numbers, ids in loader:
            engine.backward(engine(ids, attention_mask=masked(numbers, ids)))
            seen += len(numbers)
            if engine.is_gradient_accumulation_boundary():
                ratio = sum(together(seen)) / engine.train_batch_size()
                assert engine.get_lr()[0] == pytest.approx(plain.get_lr()[0] * scale(ratio), rel=1e-12)
                seen = 0
                plain.step()
            engine.step()
            if engine.global_steps == steps:
                break
    assert engine.global_steps > 6 and engine.get_lr()[0] == engine.lr_scheduler.get_last_lr()[0]


def run(rank, world, folder, first, last, accumulate):
    """The samples of each turn, and what is counted at the end, where a checkpoint is saved."""
    warm = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.25}}
    engine, loader = made(accumulate, 2, more={"scheduler": warm, "train_micro_batch_size_per_gpu": 1})
    if first:
        engine.load_checkpoint(folder)
    found = []
    while engine.global_steps < last:
        for numbers, ids in loader:
            engine.backward(engine(ids, attention_mask=masked(numbers, ids)))
            found += sum(together(numbers.tolist()), [])
            engine.step()
            if engine.global_steps == last:
                break
    engine.save_checkpoint(folder)
    return found, engine.consumed_tokens, engine.global_samples, engine.get_lr()


def test_resumed_runs_have_the_samples_of_undisturbed_ones(tmp_path):
    """Steps of four micro-batches by four ranks, by two with accumulation, and by one."""
    whole = run_ranks(4, run, str(tmp_path / "a"), 0, 12, 1, init=True)[0]
    parts = []
    for world, first, last in ((2, 0, 3), (1, 3, 5), (4, 5, 9), (2, 9, 12)):
        parts.append(run_ranks(world, run, str(tmp_path / "b"), first, last, 4 // world, init=True)[0])
    assert sum((found for found, *_ in parts), []) == whole[0]
    assert parts[-1][1:] == whole[1:]


@on_ranks(2, init=True)
def test_pipelines_weight_micro_batches_too(rank, world):
    """Two stages with two micro-batches and two copies with one each make the same steps."""

    class Pairs(Sentences):
        def __getitem__(self, number):
            ids = super().__getitem__(number)[1] % 11
            return ids, ids.flip(0)

    def losses(stages, steps):
        engine = pipe_models.engine_of("tied", stages, world, stages, **section(max_batch_size=1))
        first = [engine.eval_batch(iter([pair_of(plan.samples[n])]), num_micro_batches=1).item() for n in range(2)]
        dynamic_loader(Pairs(), engine, LENGTHS)
        found = [(engine.train_batch().item(), engine.get_lr()[0], engine.consumed_tokens) for _ in range(steps)]
        return first, found

    def pair_of(number):
        return tuple(one.unsqueeze(0) for one in Pairs()[int(number)])

    plan = TokenBatches(LENGTHS, MOST, max_batch_size=1, order="random", seed=1234, ranks=2).epoch_of(0)
    first, piped = losses(2, 33)  # more than an epoch
    for one, other in zip(piped, losses(1, 33)[1]):
        assert one == pytest.approx(other, rel=1e-5)
    assert piped[0][0] == pytest.approx(numpy.average(first, weights=plan.tokens[:2]), rel=1e-6)
    assert abs(piped[0][0] - sum(first) / 2) > 1e-4
    assert [tokens for *_, tokens in piped[:30]] == plan.tokens.reshape(-1, 2).sum(1).cumsum().tolist()


@on_ranks(2, init=True)
def test_lengths_are_measured_once_and_kept(rank, world, folder):
    calls = []

    def measure(batch):
        calls.append(len(batch))
        return [len(ids) for _, ids in batch]

    def samples():
        given = {"dataset_seqlens": None, "batch_seqlens_fn": measure, "dataloader_collate_fn": list}
        engine, loader = made(given={**given, "sample_padding_fn": None}, metrics_path=folder)
        return [[number for number, _ in batch] for batch in loader]

    first = samples()
    assert sum(calls) == COUNT // world
    deepspeed.comm.barrier()
    assert samples() == first and sum(calls) == COUNT // world
    short = {"dataset_seqlens": LENGTHS[:5]}
    refused(ValueError, "dataset_seqlens has lengths of 5 samples, and the data set has 60", made, given=short)
    refused(ValueError, "pass dataset_seqlens, or batch_seqlens_fn", made, given={"dataset_seqlens": None})
    refused(ValueError, "dynamic batching is not enabled", dynamic_loader, Sentences(), word_engine(), LENGTHS)
    more = {"model": words(), "config": settings(0, **section()), "training_data": Sentences()}
    refused(deepspeed.DeepSpeedConfigError, "do not pass training_data", deepspeed.initialize, **more)


@on_ranks(1, init=True)
def test_lengths_of_an_analysis(rank, world, folder):
    """Under the published name, or in the folder of a metric with another name."""

    def order(path):
        return [numbers.tolist() for numbers, _ in made(given={"dataset_seqlens": None}, metrics_path=path)[1]]

    wanted = [numbers.tolist() for numbers, _ in made()[1]]
    for name in ("seqlen", "width"):
        options = {"metric_types": ["single_value_per_sample"], "metric_dtypes": [torch.int64], "batch_size": 7}
        tokens = [lambda batch: [len(ids) for _, ids in batch]]
        analyzer = DataAnalyzer(
            Sentences(), metric_names=[name], metric_functions=tokens, save_path=folder, collate_fn=list, **options
        )
        analyzer.run_map_reduce()
    for path in (folder, os.path.join(folder, "seqlen"), os.path.join(folder, "width", "")):
        assert order(path) == wanted
    short, none = torch.utils.data.Subset(Sentences(), range(9)), {"dataset_seqlens": None}
    told = "seqlen_sample_to_metric has lengths of 60 samples, and the data set has 9"
    refused(ValueError, told, made, given=none, dataset=short, metrics_path=folder)
    index = os.path.join(folder, "width", "width_sample_to_metric.idx")
    os.truncate(index, os.path.getsize(index) - 30)
    refused(ValueError, r"width_sample_to_metric\.idx, offset", order, os.path.join(folder, "width"))
    told = "elsewhere has neither seqlens.npy nor an analysis of 'seqlen'"
    refused(ValueError, told, made, given=none, metrics_path=os.path.join(folder, "elsewhere"))
    with open(os.path.join(folder, "width", "seqlens.npy"), "w", encoding="ascii") as file:
        file.write("damaged")
    os.unlink(index)
    refused(ValueError, r"seqlens\.npy is damaged", order, os.path.join(folder, "width"))


@on_ranks(2, init=True)
def test_lengths_that_one_rank_cannot_measure_are_an_error_on_all(rank, world, folder):
    def measure(batch):
        if rank == 1:
            raise OverflowError("no such sample")
        return [1] * len(batch[0])

    given = {"dataset_seqlens": None, "batch_seqlens_fn": measure, "dataloader_collate_fn": lambda rows: [rows]}
    kind, words_of = (
        (OverflowError, "no such sample") if rank == 1 else (RuntimeError, "rank 1: OverflowError: no such")
    )
    refused(kind, words_of, made, given=given, metrics_path=folder)
    assert not os.listdir(folder)


@on_ranks(2, init=True)
def test_all_ranks_measure_where_one_of_them_lacks_the_file(rank, world, folder):
    """Otherwise that rank would wait in the exchange of the lengths for the rank that has read them."""
    own = os.path.join(folder, str(rank))  # a drive of each host
    if rank == 0:
        os.makedirs(own)
        numpy.save(os.path.join(own, "seqlens.npy"), numpy.full(COUNT, 9))

    def measure(batch):
        return [len(ids) for _, ids in batch[0]]

    given = {"dataset_seqlens": None, "batch_seqlens_fn": measure, "dataloader_collate_fn": lambda rows: [rows]}
    made(given=given, metrics_path=own)
    assert os.path.isdir(own) == (rank == 0)
    assert rank == 1 or numpy.array_equal(numpy.load(os.path.join(own, "seqlens.npy")), LENGTHS)
