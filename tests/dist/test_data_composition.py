"""Curricula, dropped tokens and dynamic batches in one run: which go together, their counts, resumed runs."""

import pytest
import torch

import deepspeed
import test_data_efficiency as curricula
import test_dynamic_batches as dynamic
import test_sequence_curriculum as cuts
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd
from deepspeed.runtime.progressive_layer_drop import convert_to_pld
from harness import on_ranks, run_ranks
from layer_models import Block, Words, batch_of, token_dropping
from runs import engine_of, settings, together

LAYERS, LENGTH, STEP, LAST = 4, 12, 4, 8


def mask_of(number):
    """The length of a sample, which has 1 to 12 tokens."""
    return (torch.arange(LENGTH) < 1 + number * 7 % LENGTH).long()


def effective(tokens, length, kept):
    """Tokens of a micro-batch whose samples are ``length`` long, of which two of four layers keep ``kept``."""
    lengths = [length, min(length, kept), min(length, kept), length]
    return lengths, round(tokens * sum(lengths) / (LAYERS * length))


def kept_at(step):
    return min(4 + 2 * step, LENGTH)  # layer_models.token_dropping


def trained(engine, ids, mask):
    loss = engine(ids, attention_mask=mask).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize("world, accumulate", [(1, 1), (1, 2), (2, 1), (2, 2)])
@on_ranks(init=True)
def test_dropped_tokens_of_sequences_that_a_curriculum_cuts(rank, world, accumulate):
    config = settings(0, 2, accumulate, **token_dropping(), **cuts.section())
    engine = convert_to_random_ltd(engine_of(Words(), config), Block)
    counted = 0
    for step, cut in enumerate(cuts.lengths()):
        for micro in range(accumulate):
            for one in range(world):
                numbers = [2 * (micro * world + one), 2 * (micro * world + one) + 1]
                mask = torch.stack([mask_of(step + number) for number in numbers])
                lengths, tokens = effective(int(mask[:, :cut].sum()), cut, kept_at(step))
                counted += tokens
                if one == rank:
                    trained(engine, batch_of(step, first=numbers[0]), mask)
        report = engine.data_efficiency_report()
        assert (report["sequence_length"], report["layer_lengths"]) == (cut, lengths)
        assert report["consumed_tokens"] == engine.consumed_tokens == counted


@on_ranks(2, init=True)
def test_dropped_tokens_of_dynamic_batches(rank, world):
    more = token_dropping()["data_efficiency"]
    more["data_sampling"] = dynamic.section()["data_efficiency"]["data_sampling"]
    engine = convert_to_random_ltd(engine_of(Words(), settings(0, 2, 2, data_efficiency=more)), Block)
    loader = dynamic.dynamic_loader(dynamic.Sentences(), engine, dynamic.LENGTHS, sample_padding_fn=dynamic.padded)[0]
    counted = 0
    for numbers, ids in loader:
        kept = kept_at(engine.global_steps)
        mask = dynamic.masked(numbers, ids)
        counted += sum(together(effective(int(mask.sum()), ids.shape[1], kept)[1]))
        done = engine.global_steps
        trained(engine, ids, mask)
        if engine.global_steps > done:
            assert engine.consumed_tokens == counted
    assert engine.global_steps > 2


@pytest.mark.parametrize(
    "first, second", [(convert_to_pld, convert_to_random_ltd), (convert_to_random_ltd, convert_to_pld)]
)
@on_ranks(2, init=True)
def test_layers_that_are_left_out_get_no_tokens(rank, world, first, second):
    drop = {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 10.0}}
    engine = second(first(engine_of(Words(), settings(0, 2, **token_dropping(), **drop)), Block), Block)
    counted, dropped, got = 0, set(), {}
    for number, layer in enumerate(engine.module.h):
        layer.norm.register_forward_hook(lambda _, given, made, at=number: got.update({at: made.shape[1]}))
    for step in range(12):
        got.clear()
        trained(engine, batch_of(step, first=2 * rank), torch.stack([mask_of(step), mask_of(step + 1 + rank)]))
        report = engine.data_efficiency_report()
        left_out = report["layers_left_out"]
        lengths = effective(0, LENGTH, kept_at(step))[0]
        lengths = [0 if layer in left_out else length for layer, length in enumerate(lengths)]
        assert got == {layer: length for layer, length in enumerate(lengths) if length}
        known = not {1, 2} <= set(left_out)  # a layer that drops tokens has run
        assert report["layer_lengths"] == (lengths if known else [])
        assert report["effective_length"] == (sum(lengths) / LAYERS if known else None)
        for one in range(world):
            tokens = int(mask_of(step).sum() + mask_of(step + 1 + one).sum())
            counted += round(tokens * sum(lengths) / (LAYERS * LENGTH))
        assert engine.consumed_tokens == counted
        dropped.add(tuple(left_out))
    assert len(dropped) > 4 and any({1, 2} <= set(one) for one in dropped)


class Sentences(curricula.Sentences):
    def __getitem__(self, i):
        return {"number": i, "tokens": batch_of(0, 1, first=i)[0], "mask": mask_of(i)}


def of_all(rank, world, folder, saved, steps, load):
    """Samples and losses of each micro-batch, and what is counted, of a run with both curricula and random-LTD."""
    more = {**token_dropping()["data_efficiency"], **curricula.section(folder)}
    rates = {"type": "WarmupLR", "params": {"warmup_num_steps": 200, "unit": "tokens"}}
    config = settings(1, 2, STEP // 2 // world, data_efficiency=more, scheduler=rates, **cuts.section())
    engine, _, loader, _ = deepspeed.initialize(model=Words(), config=config, training_data=Sentences())
    convert_to_random_ltd(engine, Block)
    if load:
        assert engine.load_checkpoint(saved)[0] is not None
    found = []
    while len(found) < steps:
        step = []
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(loader)
            step += together((batch["number"].tolist(), trained(engine, batch["tokens"], batch["mask"])))
        found.append((step, engine.consumed_tokens, engine.data_efficiency_report()["layer_lengths"], engine.get_lr()))
    engine.save_checkpoint(saved)
    return found, engine.random_ltd_scheduler.state_dict()


def test_a_run_with_all_of_them_goes_on_at_other_numbers_of_ranks(tmp_path):
    folder = str(tmp_path / "analysis")
    curricula.analysed(folder)
    whole, state = run_ranks(1, of_all, folder, str(tmp_path / "a"), LAST, False, init=True)[0]
    found = []
    for world, steps in ((2, 3), (1, 2), (2, 3)):
        arguments = folder, str(tmp_path / "b"), steps, bool(found)
        part, ended = run_ranks(world, of_all, *arguments, init=True)[0]
        found += part
    assert ended == state and len(found) == LAST
    for (mine, *counts), (wanted, *others) in zip(found, whole):
        assert counts == others and [numbers for numbers, _ in mine] == [numbers for numbers, _ in wanted]
        assert [loss for _, loss in mine] == pytest.approx([loss for _, loss in wanted], rel=1e-4)
    counted = 0
    for step, (micro, tokens, lengths, _) in enumerate(whole):
        cut = cuts.lengths(1, step + 1)[0]
        for numbers, _ in micro:
            mask = torch.stack([mask_of(number) for number in numbers])
            wanted, counts = effective(int(mask[:, :cut].sum()), cut, kept_at(step))
            counted += counts
        assert (tokens, lengths) == (counted, wanted)
