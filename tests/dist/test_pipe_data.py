"""The origin of a pipeline's micro-batches: loaders, evaluations in between, positions in checkpoints."""

import pytest
import torch

import pipe_models as models
from deepspeed.utils import RepeatingLoader
from harness import on_ranks
from models import samples
from refusals import refused
from runs import engine_of, load_into, together

MICRO_BATCHES = 2


SAMPLES = samples(24, lambda draws: tuple(torch.randn(4, models.WIDTH, generator=draws) for _ in range(2)))


def started(kind, world):
    """An engine that trains from a loader."""
    module = models.module_of("plain", 2, world)
    given = SAMPLES if kind == "training_data" else None
    engine = engine_of(module, models.config_of(MICRO_BATCHES), training_data=given)
    if kind == "loader":
        engine.set_dataloader(engine.deepspeed_io(SAMPLES, num_local_io_workers=0))
    if kind == "repeating":
        engine.set_dataloader(RepeatingLoader(engine.deepspeed_io(SAMPLES, num_local_io_workers=0)))
    if kind == "iterator":
        engine.set_dataiterator(iter(engine.deepspeed_io(SAMPLES, num_local_io_workers=0)))
    return engine


@pytest.mark.parametrize("kind", ["training_data", "loader", "repeating", "iterator"])
@on_ranks(2, init=True)
def test_an_evaluation_leaves_the_loader_and_its_position(rank, world, kind, folder):
    engine = started(kind, world)
    evaluated = list(models.batches("plain", 1, MICRO_BATCHES, 0))
    loader = engine.training_dataloader
    engine.train_batch()
    engine.eval_batch(iter(evaluated))
    refused(RuntimeError, r"eval_batch\(\) on stage . has no data", engine.eval_batch, None)
    assert engine.training_dataloader is loader and engine.module.training
    engine.train_batch()
    engine.save_checkpoint(folder)
    engine.eval_batch(iter(evaluated))
    expected = [engine.train_batch().item() for _ in range(3)]
    again = load_into(started(kind, world), folder)
    again.eval_batch(iter(evaluated))
    assert [again.train_batch().item() for _ in range(3)] == expected


@pytest.mark.parametrize("kind", ["training_data", "loader", "repeating"])
@on_ranks(2, init=True)
def test_a_function_for_batches_after_an_evaluation(rank, world, kind):
    engine = started(kind, world)
    engine.eval_batch(models.batches("plain", 1, MICRO_BATCHES, 0))
    seen = []
    engine.set_data_post_process_func(lambda batch, state: seen.append(state) or batch)
    engine.train_batch()
    assert len(seen) == MICRO_BATCHES


class Drawn(torch.utils.data.Dataset):
    """Inputs and labels that a worker has drawn together."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info() is not None
        noise = torch.randn(4, models.WIDTH)
        return noise, noise


@on_ranks(4, init=True)
def test_stages_draw_the_same_numbers_and_copies_others(rank, world):
    """Ranks 0 and 2 are the stages of one copy, 1 and 3 those of the other; each rank has a seed of its own."""
    torch.manual_seed(rank)
    engine = engine_of(models.module_of("plain", 2, world), models.config_of(MICRO_BATCHES), training_data=None)
    loader = engine.deepspeed_io(Drawn(), num_local_io_workers=2)
    found = together([[inputs.tolist() for inputs, _ in loader] for _ in range(2)])
    assert found[0] == found[2] and found[1] == found[3] and found[0] != found[1] and found[0][0] != found[0][1]


@on_ranks(2, init=True)
def test_a_loader_that_applies_no_function(rank, world):
    engine = started("none", world)
    change, hook = engine.set_data_post_process_func, lambda batch, state: batch
    refused(RuntimeError, "needs a training loader of this library, and there is none", change, hook)
    engine.set_dataloader([(torch.ones(1), torch.ones(1))])
    refused(RuntimeError, "there is a list: pass training_data", change, hook)
