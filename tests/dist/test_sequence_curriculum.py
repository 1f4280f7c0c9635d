"""A curriculum over sequence length: what the model sees, what is cut, the tokens that count, resumed runs."""

import pytest
import torch

import deepspeed
import pipe_models
from deepspeed.data.truncation import truncated
from harness import on_ranks
from models import two_layers
from refusals import refused
from runs import engine_of, settings
from token_models import LENGTH, rows, tokens_of, train_step, word_engine, words

STEPS = 6
LINEAR = {"total_curriculum_step": 4, "difficulty_step": 2}


def lengths(steps=STEPS, first=1):
    """From 2 to 12 in four steps, by multiples of 2."""
    return [min(12, (2 + step * 10 // 4) // 2 * 2) for step in range(first, first + steps)]


def section(**more):
    levels = {"curriculum_type": "seqlen", "min_difficulty": 2, "max_difficulty": 12, "schedule_type": "fixed_linear"}
    return {"curriculum_learning": {"enabled": True, **levels, "schedule_config": LINEAR, **more}}


@pytest.mark.parametrize("world, accumulate", [(1, 2), (2, 1), (4, 2)])
@on_ranks(init=True)
def test_the_length_of_each_step_reaches_the_model(rank, world, accumulate):
    engine, counts = word_engine(accumulate, **section()), 0
    assert engine.curriculum_scheduler_legacy.get_current_difficulty() == lengths()[0]
    for step, length in enumerate(lengths()):
        train_step(engine, step, rank)
        assert engine.module.lengths == [length] * accumulate
        counts += tokens_of(step, world, accumulate, cut=length)
        assert engine.consumed_tokens == counts
        engine.module.lengths.clear()
        engine.eval()
        engine(rows(0, 0, 0)[0])  # an evaluation sees whole sequences
        assert engine.module.lengths == [LENGTH]
        engine.train()
        engine.module.lengths.clear()


@on_ranks(2, init=True)
def test_a_resumed_run_has_the_lengths_of_its_steps(rank, world, folder):
    engine = word_engine(2, **section())
    for step in range(2):
        train_step(engine, step, rank)
    engine.save_checkpoint(folder)
    for step in range(2, STEPS):
        train_step(engine, step, rank)
    for one in (engine, word_engine(2, **section())):  # back from the maximum, and in a new process
        one.load_checkpoint(folder)
        one.module.lengths.clear()
        for step in range(2, STEPS):
            train_step(one, step, rank)
        assert one.module.lengths == [length for length in lengths()[2:] for _ in range(2)]


class Plain(torch.nn.Module):
    """Does not know the keyword."""

    def __init__(self):
        super().__init__()
        self.inner, self.lengths = words(), []

    def forward(self, input_ids, attention_mask):
        self.lengths.append(input_ids.shape[1])
        return self.inner(input_ids, attention_mask)


@on_ranks(2, init=True)
def test_the_loader_cuts_for_a_model_that_does_not(rank, world):
    drawn = [rows(0, 0, number, count=1) for number in range(32)]
    samples = [{"input_ids": ids[0], "attention_mask": mask[0]} for ids, mask in drawn]
    cut = {"input_ids": 1, "attention_mask": [1]}
    config = settings(0, accumulate=2, **section(truncate=cut))
    engine, _, loader, _ = deepspeed.initialize(model=Plain(), config=config, training_data=samples)
    batches, counts = iter(loader), 0
    for _ in range(2 * 4):
        batch = next(batches)
        counts += batch["attention_mask"].sum()
        engine.backward(engine(**batch))
        engine.step()
    assert engine.module.lengths == [length for length in lengths(4) for _ in range(2)]
    deepspeed.comm.all_reduce(counts)
    assert engine.consumed_tokens == counts.item()
    whole = next(iter(engine.deepspeed_io(samples, route="eval")))
    assert whole["input_ids"].shape[1] == LENGTH


@pytest.mark.parametrize("world", [2, 4])
@on_ranks(init=True)
def test_batches_of_a_pipeline_are_cut(rank, world):
    """By positions in pairs of the user's own iterator; losses are those of an engine whose data are shorter."""
    grow = {"min_difficulty": 1, "max_difficulty": 4, "schedule_config": {**LINEAR, "difficulty_step": 1}}
    engine = pipe_models.engine_of("tied", 2, world, 2, **section(truncate={"0": 1, "1": 1}, **grow))
    plain = pipe_models.engine_of("tied", 2, world, 2)
    copy = engine.grid.get_data_parallel_rank()
    for batch, length in enumerate((1, 2, 3, 4, 4)):
        pairs = [pipe_models.micro_batch("tied", batch, micro, copy) for micro in range(2)]
        short = iter([(x[:, :length], y[:, :length]) for x, y in pairs])
        assert engine.train_batch(iter(pairs)) == plain.train_batch(short)
    assert engine.consumed_tokens == (1 + 2 + 3 + 4 + 4) * 2 * pipe_models.MICRO * world // 2
    unaided = pipe_models.engine_of("tied", 2, world, 2, **section(**grow))
    for length in (1, 2, 3, 4):
        assert unaided.curriculum_scheduler_legacy.get_current_difficulty() == length
        unaided.train_batch(iter(pairs))


def test_truncation_of_any_batch():
    a, b, c = torch.arange(12).view(2, 6), torch.arange(72).view(2, 6, 6), torch.ones(2, 3)
    made = truncated({"x": a, "more": (b, c), "text": ["as", "is"]}, {"x": [1], "1": [1, -1], "2": [1]}, 4)
    assert torch.equal(made["x"], a[:, :4]) and torch.equal(made["more"][0], b[:, :4, :4])
    assert made["more"][1].shape == (2, 3) and made["text"] == ["as", "is"] and made["x"].is_contiguous()
    lacks = "names 'y', and the batch does not have it: its tensors have the names 'x', the positions 0 to 0"
    refused(ValueError, lacks, truncated, {"x": a}, {"y": [1]}, 4)
    flat = r"truncate.x names dimension 2, and that tensor has the shape \(2, 6\)"
    refused(ValueError, flat, truncated, {"x": a}, {"x": [2]}, 4)


@on_ranks(1, init=True)
def test_bad_input(rank, world):
    def engine(model=words, **more):
        return engine_of(model(), settings(0, **section(**more)))

    error = deepspeed.DeepSpeedConfigError
    refused(error, r"Sequential.forward does not take the keyword .*let the loader cut", engine, two_layers)
    refused(error, "min_difficulty 20 is above max_difficulty 12", engine, min_difficulty=20)
    refused(error, "schedule_config.total_curriculum_step is missing", engine, schedule_config={})
    refused(error, "curriculum_type is missing", engine, curriculum_type=None)
    coarse = {"total_curriculum_step": 400, "difficulty_step": 8}
    one = engine(schedule_config=coarse)
    assert one.curriculum_scheduler_legacy.get_difficulty(1) == one.curriculum_params_legacy()["min_difficulty"]
    none = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [0, 12], "max_step": [4]}}
    refused(error, "sequences of 0 tokens at step 1. Raise min_difficulty", engine, **none)
    refused(error, r"truncate.input_ids is 'one'", engine, truncate={"input_ids": "one"})
    one = engine(schedule_type="custom", schedule_config={})
    refused(RuntimeError, "no function gives the difficulty", train_step, one, 0, rank)
    one.curriculum_scheduler_legacy.set_custom_get_difficulty(lambda step: 3 * step)
    for step in range(4):
        train_step(one, step, rank)
    assert one.module.lengths == [3, 6, 9, 12]
