"""Accumulation windows, sizes and counters against plain PyTorch: random runs in which sizes change, evaluation comes
in between, forwards raise and are made again, and the script decides where a step ends."""

import functools
import random
import time

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from harness import on_ranks
from logs import logged
from models import Parts
from plain import Plain
from refusals import refused
from runs import engine_of, raised, settings, weights
from sampling import every_case

RUNS = 1200 if every_case() else 24  # of each world
TOKENS, ROWS = 5, 24


def net():
    def forward(net, input_ids, fails=False):
        hidden = net.words(input_ids).mean(1)
        if fails:
            raise MemoryError("no memory for this forward")
        return net.out(torch.tanh(hidden)).square().mean()

    return Parts(forward, words=torch.nn.Embedding(9, 4), out=torch.nn.Linear(4, 2))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return (torch.arange(TOKENS) * 5 + row * 7) % 9


class Run:
    """An engine on its own loader, and a plain model on the same batches of all ranks."""

    def __init__(self, seed, world):
        draws = random.Random(seed)
        self.stage = draws.choice([0, 1, 2, 3])
        self.managed, self.own = draws.random() < 0.75, draws.random() < 0.4
        self.by_hand = self.managed and draws.random() < 0.3
        self.world, self.draws = world, draws
        self.micro, self.gas = draws.choice([1, 2, 3]), draws.choice([1, 2, 3])
        torch.manual_seed(seed)
        model = net()
        self.plain = Plain(model, functools.partial(torch.optim.SGD, lr=0.05), dtype=None)
        more = {"gradient_clipping": 0.0, "max_train_tokens": 10**9, "managed_gradient_accumulation": self.managed}
        made = settings(self.stage, self.micro, self.gas, optimizer="SGD", rate=0.05, **more)
        self.engine = engine_of(model, made)
        self.loader = self.engine.training_dataloader = self.engine.deepspeed_io(Rows(), num_local_io_workers=0)
        self.steps = self.samples = self.tokens = self.done = 0
        self.seen = []

    def batch(self):
        try:
            found = next(self.loader)
        except StopIteration:
            self.seen = []
            found = next(self.loader)
        self.seen += found[:, 0].tolist()
        assert len(found) <= self.micro
        return found

    def micro_batch(self, ends):
        ids = self.batch()
        engine, draws = self.engine, self.draws
        if draws.random() < 0.2:
            for _ in range(draws.choice([1, 2])):
                refused(MemoryError, "no memory", engine, input_ids=ids, fails=True)
        if self.by_hand:
            engine.set_gradient_accumulation_boundary(ends)
        loss = engine(input_ids=ids)
        loss.backward() if self.own else engine.backward(loss)
        self.plain.add(self.plain.model(input_ids=ids), share=1 / self.gas)
        self.tokens += ids.numel()
        self.done += 1
        if self.managed or ends:
            engine.step()
        if not ends:
            return
        grads = self.plain.sums()
        for grad in grads.values() if self.world > 1 else ():
            dist.all_reduce(grad.div_(self.world))
        self.plain.update(grads)
        self.steps, self.samples = self.steps + 1, self.samples + self.done * self.micro * self.world
        self.done = 0

    def check(self):
        engine = self.engine
        tokens = torch.tensor([self.tokens])
        if self.world > 1:
            dist.all_reduce(tokens)
        found = engine.global_steps, engine.global_samples, engine.consumed_tokens
        assert found == (self.steps, self.samples, tokens.item())
        for (name, value), param in zip(weights(engine).items(), self.plain.params.values()):
            told = lambda text, name=name: f"{name}: {text}"
            torch.testing.assert_close(value, param, rtol=1e-5, atol=1e-6, msg=told)

    def window(self):
        parts = self.gas if not self.by_hand else self.draws.choice([1, 2, 3, 4])
        parts = parts if self.managed else self.draws.choice([1, 2, 3])
        for number in range(parts):
            if number and self.draws.random() < 0.2:
                change, value = self.new_size()
                kind, text = raised(change, value)
                assert kind == "RuntimeError" and "in the middle of an accumulation window" in text, text
            if self.draws.random() < 0.2:
                self.evaluate()
            self.micro_batch(number + 1 == parts)
        self.check()

    def evaluate(self):
        self.engine.eval() if self.draws.random() < 0.7 else None
        with torch.set_grad_enabled(self.draws.random() < 0.5):
            for _ in range(self.draws.choice([1, 4])):
                self.engine(input_ids=torch.ones(7, 3, dtype=torch.int64))
        self.engine.train()

    def new_size(self):
        if self.draws.random() < 0.5:
            return self.engine.set_train_micro_batch_size, self.draws.choice([1, 2, 4])
        return self.engine.set_train_batch_size, self.draws.choice([1, 2, 3]) * self.micro * self.world

    def resize(self):
        change, value = self.new_size()
        change(value)
        if change == self.engine.set_train_micro_batch_size:
            self.micro = value
        else:
            self.gas = value // self.micro // self.world
        engine = self.engine
        sizes = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()
        assert sizes == (self.gas * self.micro * self.world, self.micro)

    def go(self):
        for _ in range(self.draws.choice([2, 3, 4])):
            self.window()
            if self.draws.random() < 0.6:
                self.resize()
        self.engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(init=True, timeout=600)
def test_random_runs(rank, world):
    for seed in range(RUNS):
        try:
            Run(seed, world).go()
        except BaseException as error:
            raise AssertionError(f"run {seed} of {world} ranks: {type(error).__name__}: {error}") from error


@on_ranks(1, init=True)
def test_each_sample_comes_once_in_an_epoch_whose_batches_change(rank, world):
    made = settings(0, 2, optimizer="SGD")
    engine = engine_of(net(), made, training_data=[torch.tensor(float(row)) for row in range(24)])
    loader, seen, sizes = engine.training_dataloader, [], [2, 4, 3, 1]
    for batch in loader:
        seen += batch.tolist()
        engine.set_train_micro_batch_size(sizes[len(seen) % 4])
    assert sorted(seen) == list(range(24)) and loader.batch_size == engine.train_micro_batch_size_per_gpu()
    assert sorted(row for batch in loader for row in batch.tolist()) == list(range(24))
    stream = Stream()
    in_order, seen = engine.deepspeed_io(stream), []
    for batch in in_order:
        seen += batch.tolist()
        engine.set_train_micro_batch_size(sizes[len(seen) % 4])
        if len(seen) > 9:
            break
    again = engine.deepspeed_io(stream, batch_size=5)
    again.load_state_dict(in_order.state_dict())
    assert seen + sum((batch.tolist() for batch in again), []) == list(range(24))
    engine.set_train_micro_batch_size(2)
    other = engine.deepspeed_io(list(range(8)), batch_size=8)
    engine.set_train_micro_batch_size(5)
    assert other.batch_size == 8  # a size of its own stays
    refused(ValueError, "whole number >= 1", engine.set_train_micro_batch_size, 0)
    assert engine.train_micro_batch_size_per_gpu() == loader.batch_size == 5


@on_ranks(1, init=True)
def test_a_pipeline_whose_sizes_change(rank, world):
    rows = [(torch.full((4,), float(row)), torch.zeros(1)) for row in range(24)]
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    plain = Plain(torch.nn.Sequential(*layers), functools.partial(torch.optim.SGD, lr=0.001), dtype=None)
    module = PipelineModule(layers, num_stages=1, loss_fn=lambda out, y: (out - y).square().mean())
    made = settings(0, 2, 2, optimizer="SGD", rate=0.001, gradient_clipping=0.0)
    engine = engine_of(module, made, training_data=rows)
    order = list(engine.training_dataloader.data_sampler)
    sizes = [(2, 2, lambda: None), (2, 3, lambda: engine.set_train_batch_size(6))]
    sizes += [(3, 3, lambda: engine.set_train_micro_batch_size(3))]
    for micro, accumulate, change in sizes:
        change()
        engine.train_batch()
        for _ in range(accumulate):
            ids, order = order[:micro], order[micro:]
            plain.add(plain.model(torch.stack([rows[row][0] for row in ids])).square().mean(), share=1 / accumulate)
        plain.update()
        assert engine.global_samples == 24 - len(order)
        for value, param in zip(weights(engine).values(), plain.params.values()):
            torch.testing.assert_close(value, param.detach())


@on_ranks(1, init=True)
def test_throughput_has_the_samples_of_each_step(rank, world):
    engine = engine_of(net(), settings(0, 2, optimizer="SGD"))
    ids, timer = torch.ones(2, TOKENS, dtype=torch.int64), engine.tput_timer
    for samples in (2, 2, 2, 16):
        engine.set_train_batch_size(samples)
        for _ in range(samples // 2):
            engine.backward(engine(input_ids=ids))
            engine.step()
    assert timer._samples == 18 and timer.batch_size == 16 and engine.step_log()[-1]["samples"] == engine.global_samples
    per_step = [row["samples_per_sec"] * row["wall"] for row in engine.step_log()]
    assert per_step == pytest.approx([2, 2, 2, 16])
    tokens = [row["tokens_per_sec"] * row["wall"] for row in engine.step_log()]
    assert tokens == pytest.approx([2 * TOKENS] * 3 + [16 * TOKENS])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(24))


class Slow(Rows):
    def __getitem__(self, row):
        time.sleep(0.05)
        return super().__getitem__(row)


@pytest.mark.parametrize("own", [True, False])
@on_ranks(1, init=True)
def test_throughput_counts_reading_and_no_evaluation(rank, world, own, tmp_path):
    engine = engine_of(net(), settings(0, 2, optimizer="SGD"))
    loader = engine.deepspeed_io(Slow(), num_local_io_workers=0) if own else torch.utils.data.DataLoader(Slow(), 2)
    for number, ids in zip(range(8), loader):
        engine.backward(engine(input_ids=ids))
        engine.step()
        if number == 4:
            engine.eval()
            engine(input_ids=ids)
            time.sleep(1.0)
            engine.train()
        if number == 5:
            engine.save_checkpoint(tmp_path)
            time.sleep(1.0)  # the script's own work after a save
    assert 2 / 0.3 < engine.tput_timer.avg_samples_per_sec() < 2 / 0.09, engine.tput_timer.avg_samples_per_sec()


@on_ranks(2, init=True)
def test_rank_0_alone_logs_the_throughput(rank, world):
    engine = engine_of(net(), settings(0, 2, optimizer="SGD", steps_per_print=1))
    with logged() as texts:
        for _ in range(4):
            engine.backward(engine(input_ids=torch.ones(2, TOKENS, dtype=torch.int64)))
            engine.step()
    told = [text for text in texts if "RunningAvgSamplesPerSec" in text]
    assert len(told) == 2 * (rank == 0) and all(text.startswith("[Rank 0] ") for text in told)


@pytest.mark.parametrize("managed", [True, False])
@on_ranks(1, init=True)
def test_operations_follow_the_shapes(rank, world, managed):
    """``mfu`` is that of each step, not of the second one; a script's own backward counts, too."""
    more = {"step_log": {"peak_tflops": 1.0}, "managed_gradient_accumulation": managed}
    rows = {}
    for own in (False, True):
        engine = engine_of(torch.nn.Linear(8, 8), settings(0, 2, 1 + managed, optimizer="SGD", **more))
        for size in (2, 2, 4, 2, 8):
            for _ in range(2):
                loss = engine(torch.ones(size, 8)).sum()
                loss.backward() if own else engine.backward(loss)
                engine.step() if managed else None
            engine.step() if not managed else None
        rows[own] = [row["mfu"] and row["mfu"] * row["wall"] * 1e12 for row in engine.step_log()]
        engine.destroy()
    forward = 2 * 8 * 8  # of a row; the input needs no gradient
    assert rows[False] == pytest.approx([None, *(2 * size * 2 * forward for size in (2, 4, 2, 8))])
    assert rows[True] == pytest.approx([None, *(2 * size * 3 * forward for size in (2, 4, 2, 8))])


@on_ranks(1, init=True)
def test_a_curriculum_refuses_a_step_above_the_data_set(rank, world):
    metric = {"clustering_type": "single_cluster", "min_difficulty": 1, "max_difficulty": 4}
    metric |= {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 1}}
    sampling = {"enabled": True, "num_workers": 0, "curriculum_learning": {"enabled": True}}
    sampling["curriculum_learning"]["curriculum_metrics"] = {"cut": metric}
    made = settings(0, 2, optimizer="SGD", data_efficiency={"enabled": True, "data_sampling": sampling})
    engine = engine_of(torch.nn.Linear(1, 1), made, training_data=[torch.ones(1)] * 8)
    for change, value in ((engine.set_train_batch_size, 16), (engine.set_train_micro_batch_size, 16)):
        refused(ValueError, "8 samples, and a step takes 16: lower train_batch_size", change, value)
    assert engine.train_batch_size() == 2 and len(next(engine.training_dataloader)) == 2
    engine.set_train_micro_batch_size(4)
    assert len(next(engine.training_dataloader)) == 4
