"""Engines with a curriculum: the loader that initialize returns, checkpoints at other ranks, callbacks, wrong input."""

import json
import os
import random
import signal

import numpy
import pytest
import torch

import deepspeed
from deepspeed.data.analyzer import DataAnalyzer
from harness import RankError, on_ranks, run_ranks
from logs import logged
from refusals import refused
from runs import settings
from sampling import every_case

SAMPLES, STEP = 96, 8
LENGTHS = numpy.random.default_rng(3).integers(4, 33, SAMPLES)
NAME = "length"


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return {"number": i, "tokens": torch.full((32,), float(i % 7))}


def analysed(folder):
    if not os.path.exists(os.path.join(folder, NAME)):
        functions = [lambda batch: torch.tensor(LENGTHS[batch["number"].numpy()])]
        kind = ["single_value_per_sample"]
        options = {"metric_functions": functions, "metric_types": kind, "metric_dtypes": [torch.int64]}
        analyzer = DataAnalyzer(Sentences(), batch_size=16, metric_names=[NAME], save_path=str(folder), **options)
        analyzer.run_map()
        analyzer.run_reduce()


def section(folder, **more):
    path = os.path.join(folder, NAME, NAME)
    metric = {
        "index_to_sample_path": f"{path}_index_to_sample",
        "index_to_metric_path": f"{path}_index_to_metric",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 12,
        "max_difficulty": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 4},
        **more,
    }
    curriculum = {"enabled": True, "data_cluster_path": os.path.join(folder, "clusters")}
    curriculum["curriculum_metrics"] = {NAME: metric}
    sampling = {"enabled": True, "num_epochs": 5, "curriculum_learning": curriculum}
    return {"enabled": True, "seed": 11, "data_sampling": sampling}


def engine_of(world, folder, stage=1, accumulate=2, **more):
    rows = STEP // world // accumulate
    config = settings(stage, rows, accumulate, data_efficiency=section(folder, **more))
    torch.manual_seed(1)
    model = torch.nn.Linear(32, 1)
    engine, _, loader, _ = deepspeed.initialize(model=model, config=config, training_data=Sentences())
    return engine, loader


def step_of(engine, loader):
    """Trains one step. The numbers of its samples on this rank, by micro-batch."""
    found = []
    for _ in range(engine.gradient_accumulation_steps()):
        batch = next(loader)
        found.append(batch["number"].tolist())
        engine.backward(engine(batch["tokens"]).mean())
        engine.step()
    return found


def trained(rank, world, folder, saved, steps, load, accumulate, stage=1):
    engine, loader = engine_of(world, folder, stage, accumulate)
    if load:
        assert engine.load_checkpoint(saved)[0] is not None
    found = [step_of(engine, loader) for _ in range(steps)]
    engine.save_checkpoint(saved)
    name = "mp_rank_00_model_states.pt" if stage < 3 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    state = torch.load(os.path.join(saved, f"global_step{engine.global_steps}", name))["data_sampler"]
    assert state["curriculum_step"] == engine.global_steps and state["consumed_samples"] == STEP * engine.global_steps
    return found


def in_order(of_ranks):
    """The samples of each step of all ranks, in the order of the run."""
    steps = len(of_ranks[0])
    micro = range(len(of_ranks[0][0]))
    return [[n for i in micro for one in of_ranks for n in one[step][i]] for step in range(steps)]


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_goes_on_at_other_numbers_of_ranks(tmp_path, stage):
    folder = str(tmp_path / "analysis")
    analysed(folder)
    parts = [(2, 4, False, 2), (1, 3, True, 4), (4, 5, True, 1), (2, 6, True, 1)]
    found = []
    for world, steps, load, accumulate in parts:
        args = (folder, str(tmp_path / "saved"), steps, load, accumulate, stage)
        found += in_order(run_ranks(world, trained, *args))
    wanted = in_order(run_ranks(1, trained, folder, str(tmp_path / "other"), 18, False, 2, stage))
    assert found == wanted
    for step, samples in enumerate(found, 1):
        assert max(LENGTHS[samples]) <= min(int(step / 10 * 20 + 12) // 4 * 4, 32)


LAST = 40  # step of a run that is killed


def until_killed(rank, world, folder, saved, accumulate, kill):
    """Goes on after the last checkpoint, up to step LAST, and notes the samples of each step in a file. ``kill``: the
    step, the micro-step and the rank at which the process ends."""
    engine, loader = engine_of(world, folder, accumulate=accumulate)
    engine.load_checkpoint(saved)
    while engine.global_steps < LAST:
        step, found = engine.global_steps, []
        for micro in range(accumulate):
            batch = next(loader)
            if (step, micro, rank) == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            found.append(batch["number"].tolist())
            engine.backward(engine(batch["tokens"]).mean())
            engine.step()
        with open(os.path.join(saved, f"samples_{rank}"), "a", encoding="ascii") as file:
            file.write(json.dumps([step, found]) + "\n")
        if engine.global_steps % 3 == 0:
            engine.save_checkpoint(saved)


def noted(saved, wanted):
    """Reads and removes the notes of a run; the samples of each step are those of ``wanted``. The steps as a set."""
    ranks = []
    for path in sorted(saved.glob("samples_*")):
        ranks.append([json.loads(line) for line in path.read_text(encoding="ascii").splitlines()])
        path.unlink()
    whole = min(map(len, ranks), default=0)  # a step that only some ranks have noted is over as well
    for of_step in zip(*(one[:whole] for one in ranks)):
        step = of_step[0][0]
        assert in_order([[found] for _, found in of_step]) == [wanted[step]], step
    return {step for step, _ in ranks[0][:whole]} if ranks else set()


@pytest.mark.dist
def test_killed_runs_have_the_samples_of_an_undisturbed_one(tmp_path):
    folder, saved = str(tmp_path / "analysis"), tmp_path / "saved"
    analysed(folder)
    saved.mkdir()
    wanted = in_order(run_ranks(1, trained, folder, str(tmp_path / "other"), LAST, False, 2))
    kills, chosen, steps, killed = 20 if every_case() else 3, random.Random(7), set(), 0
    while killed < kills:
        world, accumulate = chosen.choice([(1, 2), (2, 2), (2, 1), (4, 1)])
        done = (
            int(latest.read_text(encoding="ascii")[len("global_step") :])
            if (latest := saved / "latest").exists()
            else 0
        )
        kill = min(LAST - 1, done + chosen.randrange(5)), chosen.randrange(accumulate), chosen.randrange(world)
        with pytest.raises(RankError, match="killed by signal 9"):
            run_ranks(world, until_killed, folder, str(saved), accumulate, kill, grace=0.2)
        steps |= noted(saved, wanted)
        killed += 1
    run_ranks(2, until_killed, folder, str(saved), 2, None)
    assert steps | noted(saved, wanted) == set(range(LAST)) and len(steps) >= kills


@on_ranks(2, init=True)
def test_a_checkpoint_in_the_middle_of_a_step_has_its_beginning(rank, world, folder):
    if rank == 0:
        analysed(folder)
    deepspeed.comm.barrier()
    engine, loader = engine_of(world, folder)
    step_of(engine, loader)
    batch = next(loader)
    engine.backward(engine(batch["tokens"]).mean())
    engine.step()
    engine.save_checkpoint(os.path.join(folder, "saved"))
    other, again = engine_of(world, folder)
    other.load_checkpoint(os.path.join(folder, "saved"))
    assert next(again)["number"].tolist() == batch["number"].tolist()


@on_ranks(1)
def test_callbacks(rank, world, folder):
    analysed(folder)
    engine, loader = engine_of(world, folder, schedule_type="custom")
    refused(RuntimeError, "no function gives the difficulty", next, loader)
    engine.set_custom_curriculum_learning_schedule({NAME: lambda step: min(32, 12 + 2 * step)})
    seen = []

    def cut(batch, state):
        seen.append(state["current_difficulties"][NAME])
        return {**batch, "tokens": batch["tokens"] * 2}

    engine.set_data_post_process_func(cut)
    batch = next(loader)
    assert torch.equal(batch["tokens"][:, 0], batch["number"] % 7 * 2.0)
    for _ in range(5):
        next(loader)
    assert seen == [14, 14, 16, 16, 18, 18]
    refused(ValueError, "'width' is not a metric of the curriculum", engine.set_custom_curriculum_learning_schedule,
            {"width": len})  # fmt: skip


@on_ranks(1)
def test_batch_sizes_that_change_and_loaders_of_other_routes(rank, world, folder):
    analysed(folder)
    engine, loader = engine_of(world, folder)
    assert loader.num_local_io_workers == 0, "data_sampling.num_workers"
    step_of(engine, loader)
    engine.set_train_batch_size(16)
    step_of(engine, loader)
    assert loader.state_dict()["sampler"]["curriculum_step"] == 2
    assert loader.state_dict()["sampler"]["consumed_samples"] == 24
    assert engine.deepspeed_io(Sentences(), route="eval").curriculum is None
    assert len(loader) == 5 * SAMPLES // 16 * 16 // 4


@on_ranks(1)
def test_a_published_checkpoint(rank, world, folder):
    """Its model file has the state of the sampler, and it has no file of ours."""
    analysed(folder)
    engine, loader = engine_of(world, folder, stage=0)
    for _ in range(3):
        step_of(engine, loader)
    engine.save_checkpoint(folder, tag="a")
    path = os.path.join(folder, "a", "mp_rank_00_model_states.pt")
    state = torch.load(path)
    state["data_sampler"] = {
        "batch": [], "consumed_samples": 24, "curriculum_step": 3, "current_difficulties": {NAME: 16},
        "data_cluster_paths": ["x"], "data_cluster_current_position": [24],
        "np_rng_state": ("MT19937", numpy.zeros(624, numpy.uint32), 3, 0, 0.0),
    }  # fmt: skip
    torch.save(state, path)
    for name in os.listdir(os.path.join(folder, "a")):
        if name != os.path.basename(path):
            os.unlink(os.path.join(folder, "a", name))
    other, again = engine_of(world, folder, stage=0)
    with logged() as said:
        other.load_checkpoint(folder, tag="a")
    assert any("step 3 and 24 samples are restored; its random generator" in text for text in said), said
    (samples, _) = step_of(other, again)
    assert max(LENGTHS[samples]) <= 20 and again.state_dict()["sampler"]["curriculum_step"] == 4


@on_ranks(1)
def test_wrong_input(rank, world, folder):
    analysed(folder)
    config = settings(1, 4, 2, data_efficiency=section(folder))
    given = {"model": torch.nn.Linear(32, 1), "config": config}
    refused(ValueError, "has 96 samples, and the training data set has 40", deepspeed.initialize,
            training_data=torch.utils.data.TensorDataset(torch.zeros(40, 32)), **given)  # fmt: skip
    engine = deepspeed.initialize(**given)[0]
    refused(RuntimeError, "needs a training loader of this library, and there is none",
            engine.set_custom_curriculum_learning_schedule, {})  # fmt: skip
    sampler = torch.utils.data.SequentialSampler(Sentences())
    refused(ValueError, "decides the order of samples, and so does a data_sampler", engine.deepspeed_io, Sentences(),
            data_sampler=sampler)  # fmt: skip
    plain = deepspeed.initialize(model=torch.nn.Linear(32, 1), config=settings(1, 4), training_data=Sentences())[0]
    refused(RuntimeError, "needs a curriculum: enable data_efficiency", plain.set_custom_curriculum_learning_schedule,
            {NAME: len})  # fmt: skip
    both = section(folder)
    both["data_sampling"]["dynamic_batching"] = {"enabled": True, "max_tokens": 64}
    told = "dynamic_batching and .*curriculum_learning both choose the samples of a batch: enable only one of them"
    given["config"] = settings(1, 4, 2, data_efficiency=both)
    refused(deepspeed.DeepSpeedConfigError, told, deepspeed.initialize, training_data=Sentences(), **given)
