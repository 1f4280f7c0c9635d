"""The programs that train from easy to hard: analysis, curricula, consumed tokens, equal weights, resumed runs."""

import json
import os
import pathlib
import random
import re
import sys

import numpy
import pytest
import torch

import example_programs as programs
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset
from harness import run_ranks
from refusals import refusing

NAME = "pile_curriculum"
FOLDER = pathlib.Path(programs.EXAMPLES, NAME)
sys.path.append(str(FOLDER))

import pile_parts  # noqa: E402

SIZES = ["--seq-length", 32, "--vocab-size", 512]
SMALL = ["--hidden-size", 32, "--num-attention-heads", 2, "--log-interval", 5, "--lr-warmup-tokens", 500]
TOKENS = {"bert": 4500, "gpt": 5120}  # 20 steps or more
SIMILAR = pytest.mark.every("it is like the other stages, ranks and models")
BOTH = pytest.mark.parametrize("model", ["bert", "gpt"])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folder of a text in the format of the Pile, and of the analyses for both models by one worker."""
    folder, draw = tmp_path_factory.mktemp("pile"), random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(300)]
    paragraph = lambda: " ".join(words[min(int(draw.expovariate(0.02)), 299)] for _ in range(draw.randint(4, 20)))
    for name in ("a.jsonl", "b.jsonl"):
        texts = ["\n\n".join(paragraph() for _ in range(10)) for _ in range(10)]
        lines = [json.dumps({"text": text, "meta": {"pile_set_name": "Made"}}) for text in texts]
        (folder / name).write_text("\n".join(lines) + "\n")
    for model in ("bert", "gpt"):
        analyse(folder, folder / "out", 1, model)
    return folder


def analyse(folder, out, workers, model):
    argv = ["--model", model, "--data", folder, "--out", out, "--workers", workers]
    return programs.run_program(NAME, "analyse", [*argv, *SIZES])


def flags(folder, model, *more):
    argv = ["--model", model, "--data", folder, *SIZES, *SMALL, "--train-tokens", TOKENS[model], *more]
    return [*argv, *(["--dropout", 0] if model == "bert" and "--dropout" not in more else [])]


def config(tmp_path, **changes):
    """A ds_config.json with 8 samples in a step."""
    zero = {"stage": changes.pop("stage", 1), "stage3_param_persistence_threshold": 0}
    changes = {"train_batch_size": 8, "zero_optimization": zero, **changes}
    return ["--deepspeed_config", programs.config_file(NAME, tmp_path, **changes)]


def lines_of(text):
    return [line for line in text.splitlines() if line.startswith("step ")]


def curriculum(tmp_path, folder, model, steps=10):
    """The shipped curriculum of a model for short samples, with the analysis of the fixture."""
    text = (FOLDER / f"ds_config_{model}_curriculum.json").read_text()
    section = json.loads(text.replace("out/", f"{folder}/out/"))["data_efficiency"]
    metrics = section["data_sampling"]["curriculum_learning"]["curriculum_metrics"]
    metrics["seqlen"].update(min_difficulty=16, max_difficulty=32)
    metrics["vocabularyrarity"].update(min_difficulty=50)
    for metric in metrics.values():
        metric["schedule_config"]["total_curriculum_step"] = steps
    return config(tmp_path, data_efficiency=section), section


# ---- equal weights, resumed runs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(files):
    """``(weights, losses, text)`` of plain.py. As many samples are left out at the end of a pass as in ds.py."""
    batch = ["--batch-size", 8, "--gradient-accumulation-steps", 2]
    return {model: programs.run_plain(NAME, *flags(files, model, *batch)) for model in TOKENS}


MAIN = [("bert", 1, 2), ("gpt", 3, 2), ("gpt", 0, 1)]
CASES = [(model, stage, ranks) for model in TOKENS for stage in range(4) for ranks in (1, 2)]


@pytest.mark.parametrize(
    ("model", "stage", "ranks"), [case if case in MAIN else pytest.param(*case, marks=SIMILAR) for case in CASES]
)
def test_the_port_trains_the_same_weights(model, stage, ranks, plain, files, tmp_path):
    more = {"train_micro_batch_size_per_gpu": 4 // ranks}
    results = programs.run_on(ranks, NAME, "ds", *flags(files, model), *config(tmp_path, stage=stage, **more))
    for weights, _, _ in results:
        assert programs.farthest(weights, plain[model][0]) < 1e-5
    means = torch.tensor([losses for _, losses, _ in results]).mean(0)
    assert len(means) >= 20 and (means - torch.tensor(plain[model][1])).abs().max() < 1e-5
    told = [re.sub(r"loss \S+", "", line) for line in lines_of(plain[model][2])]
    assert [re.sub(r"loss \S+", "", line) for line in lines_of(results[0][2])] == told
    assert not any(lines_of(text) for *_, text in results[1:])


@pytest.mark.parametrize("model", ["bert", pytest.param("gpt", marks=SIMILAR)])
def test_a_resumed_run_has_the_bits_of_one_run(model, files, tmp_path):
    argv = [*flags(files, model, *(["--dropout", 0.1] if model == "bert" else [])), "--save-interval", 6]
    given, _ = curriculum(tmp_path, files, model)
    whole = programs.run_on(2, NAME, "ds", *argv, *given, "--save", tmp_path / "saved")
    (tmp_path / "saved" / "latest").write_text("global_step6")
    resumed = programs.run_on(2, NAME, "ds", *argv, *given, "--load", tmp_path / "saved")
    for (weights, losses, text), (more, last, end) in zip(whole, resumed):
        assert programs.farthest(weights, more) == 0 and losses[6:] == last
        assert lines_of(text)[1:] == lines_of(end)


@BOTH
def test_a_resumed_run_of_plain(model, files, tmp_path):
    argv = [*flags(files, model, *(["--dropout", 0.1] if model == "bert" else [])), "--batch-size", 8]
    argv += ["--lr-decay-tokens", 3000]
    first = programs.run_plain(NAME, *argv, "--train-tokens", 1000, "--save", tmp_path / "states.pt")
    last = programs.run_plain(NAME, *argv, "--train-tokens", 3000, "--load", tmp_path / "states.pt")
    whole = programs.run_plain(NAME, *argv, "--train-tokens", 3000)
    assert programs.farthest(whole[0], last[0]) == 0 and whole[1] == first[1] + last[1]


# ---- the analysis ----------------------------------------------------------------------------------------------------


def read_metric(folder, name):
    """The values of the samples, and ``{value: samples}``."""
    one = lambda what: MMapIndexedDataset(str(folder / name / f"{name}_{what}"))
    values = [int(value) for (value,) in one("sample_to_metric")]
    return values, {int(v): list(map(int, s)) for (v,), s in zip(one("index_to_metric"), one("index_to_sample"))}


def test_a_wrong_number_of_workers(files, tmp_path):
    with refusing(SystemExit, "--workers 0"):
        analyse(files, tmp_path, 0, "bert")


def samples_of(folder, model):
    parser = pile_parts.get_argument_parser("", pile_parts.TRAINING)
    given = ["--model", model, "--data", folder, *SIZES]
    return pile_parts.read_data(parser.parse_args([str(one) for one in given]))


@pytest.mark.parametrize(("model", "names"), [("bert", ["seqlen", "vocabularyrarity"]), ("gpt", ["vocabularyrarity"])])
def test_the_analysis(model, names, files):
    words, tokens, samples = samples_of(files, model)
    assert {one.name for one in (files / "out" / model).iterdir()} - {"clusters"} == {"counts", *names}
    for name in names:
        values, found = read_metric(files / "out" / model, name)
        assert len(values) == len(samples) and sum(map(len, found.values())) == len(samples)
        assert all(values[number] == value for value, numbers in found.items() for number in numbers)
        assert list(found) == sorted(found)
        if name == "seqlen":
            assert values == [int(samples[number][2].sum()) for number in range(len(samples))]
    counts = numpy.bincount(torch.cat(samples.texts).numpy())
    weights = numpy.round(-100 * numpy.log(numpy.maximum(counts, 1) / counts.sum()))
    wanted = numpy.array([weights[text.numpy()].sum() for text in samples.texts])
    assert wanted.tolist() == values


def test_the_result_does_not_depend_on_the_workers(files, tmp_path):
    analyse(files / "out" / "tokens", tmp_path, 3, "bert")
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.suffix in (".bin", ".idx"))
    assert pathlib.Path("bert/seqlen/seqlen_index_to_sample.idx") in made and pathlib.Path("tokens.idx") in made
    for path in made:
        if "worker" not in str(path):
            assert (tmp_path / path).read_bytes() == (files / "out" / path).read_bytes(), path


@BOTH
def test_the_indexed_tokens_have_the_same_samples(model, files):
    words, tokens, samples = samples_of(files, model)
    again, read, others = samples_of(files / "out" / "tokens", model)
    assert tokens.equal(read) and len(words) == len(again) and len(samples) == len(others) > 60
    assert all(a.equal(b) for number in range(60) for a, b in zip(samples[number], others[number]))
    documents = MMapIndexedDataset(str(files / "out" / "tokens"))
    assert len(documents) == int((tokens == words.sep).sum()) and documents.sizes.sum() == len(tokens)


# ---- the curriculum --------------------------------------------------------------------------------------------------


def watched(rank, world_size, argv):
    """The batches of a rank with their difficulties, the numbers of tokens, and the printed text."""
    batches, counts = [], []
    with programs.loaded(NAME, "ds") as module:
        cut, count = module.pile_parts.cut, module.pile_parts.count_tokens
        note = lambda batch, state: batches.append((batch, dict(state["current_difficulties"])))
        module.pile_parts.cut = lambda batch, state: note(batch, state) or cut(batch, state)
        module.pile_parts.count_tokens = lambda batch: counts.append((batch[0].shape[1], count(batch))) or count(batch)
        model, _ = module.main([str(one) for one in argv])
    return batches, counts, model.consumed_tokens


@BOTH
def test_no_sample_is_above_the_difficulty_of_its_step(model, files, tmp_path):
    given, section = curriculum(tmp_path, files, model)
    results = run_ranks(2, watched, [*flags(files, model), *given])
    samples = samples_of(files, model)[2]
    _, found = read_metric(files / "out" / model, "vocabularyrarity")
    easy = [number for numbers in found.values() for number in numbers]
    steps = len(results[0][0])
    for step in range(steps):
        level = results[0][0][step][1]
        assert level["seqlen"] == max(16, min(32, (16 + 16 * (step + 1) // 10) // 8 * 8))
        assert level == results[1][0][step][1]
        allowed = easy[: len(samples) * level["vocabularyrarity"] // 100]
        texts = {tuple(samples.texts[number].tolist()) for number in allowed}
        for batches, counts, _ in results:
            batch = batches[step][0]
            assert counts[step][0] == level["seqlen"]
            if model == "gpt":
                assert all((*x.tolist(), int(y[-1])) in texts for x, y in zip(*batch))
                assert counts[step][1] == 4 * level["seqlen"]
            else:
                assert batch[2].sum(1).max() <= level["seqlen"] and counts[step][1] == batch[2].sum()
                assert {int(one) for one in batch[2].sum(1)} <= {len(text) + 3 for text in texts}
    each = [sum(counts[step][1] for _, counts, _ in results) for step in range(steps)]
    assert sum(each[:-1]) < TOKENS[model] <= sum(each) and all(total == sum(each) for *_, total in results)
    assert results[0][0][0][1] == {"seqlen": 16, "vocabularyrarity": 65} and len(easy) > 80


def test_a_missing_analysis(files, tmp_path):
    given, _ = curriculum(tmp_path, tmp_path, "bert")
    with refusing(SystemExit, "seqlen_index_to_sample", "is missing", "python analyse.py --model bert"):
        programs.run_on(1, NAME, "ds", *flags(files, "bert"), *given)


def test_a_folder_without_a_checkpoint(files, tmp_path):
    with refusing(SystemExit, f"--load {tmp_path}: this folder has no checkpoint"):
        programs.run_on(1, NAME, "ds", *flags(files, "bert"), *config(tmp_path), "--load", tmp_path)


# ---- learning rates, flags, files ------------------------------------------------------------------------------------


def test_learning_rates_follow_the_tokens(plain):
    lines = lines_of(plain["gpt"][2])
    told = [re.fullmatch(r"step (\d+): loss (\S+), lr (\S+), seqlen 32, consumed_tokens (\d+)", one) for one in lines]
    assert [int(one[1]) for one in told] == [5, 10, 15, 20]
    assert [int(one[4]) for one in told] == [256 * step for step in (5, 10, 15, 20)]
    share = (256 * 9 - 500) / (5120 - 500)
    assert abs(float(told[1][3]) - 3e-3 * (0.5 + 0.5 * numpy.cos(numpy.pi * share))) < 1e-5
    args = pile_parts.argparse.Namespace(lr=2.0, lr_warmup_tokens=100, lr_decay_tokens=300)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    for consumed, rate in ((0, 0.0), (50, 1.0), (100, 2.0), (200, 1.0), (300, 0.0), (900, 0.0)):
        pile_parts.set_learning_rate(args, optimizer, consumed)
        assert abs(optimizer.param_groups[0]["lr"] - rate) < 1e-9


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--hidden-size", 30, "--num-attention-heads", 4], "--hidden-size"),
        (["--model", "gpt", "--dropout", 0.5], "--dropout"),
        (["--lr-decay-tokens", 500], "--lr-decay-tokens must be more"),
        (["--load", "nowhere.pt"], "--load nowhere.pt"),
        (["--seq-length", 8], "--seq-length 8"),
        (["--log-interval", 0], "--log-interval"),
        (["--batch-size", 8, "--gradient-accumulation-steps", 3], "--batch-size"),
        (["--batch-size", 100000], "--batch-size"),
    ],
)
def test_flags_that_contradict_each_other(more, text, files):
    with refusing(SystemExit, text):
        programs.run_program(NAME, "plain", [*flags(files, "bert"), *more])


@pytest.mark.parametrize("line", ["{", '{"meta": 1}', '{"text": 5}', '["text"]', ""])
def test_a_wrong_line(line, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one", "meta": {}}\n')
    (tmp_path / "b.jsonl").write_text(f'{{"text": "two", "meta": {{}}}}\n{line}\n{{"text": "x"}}\n')
    with refusing(SystemExit, f"{tmp_path / 'b.jsonl'}:2: this is not a JSON object with a text"):
        list(pile_parts.read_texts(str(tmp_path)))


def test_other_wrong_files(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "\xff"}\n')
    with refusing(SystemExit, "a.jsonl:2: this is not UTF-8"):
        list(pile_parts.read_texts(str(tmp_path)))
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "no.jsonl", tmp_path / "empty"):
        with refusing(SystemExit, str(path)):
            samples_of(path, "gpt")


@BOTH
def test_the_shipped_configurations(model):
    whole = json.loads((FOLDER / "ds_config.json").read_text())
    other = json.loads((FOLDER / f"ds_config_{model}_curriculum.json").read_text())
    found = other["data_efficiency"]["data_sampling"].pop("curriculum_learning")["curriculum_metrics"]
    assert found["seqlen"]["clustering_type"] == {"bert": "schedule_based", "gpt": "single_cluster"}[model]
    assert found["vocabularyrarity"]["difficulty_type"] == "percentile"
    assert {**whole, "data_efficiency": 0} == {**other, "data_efficiency": 0}


@pytest.mark.every("it starts the commands of the README")
@BOTH
def test_the_commands_of_the_readme(model):
    programs.run_program(NAME, "analyse", ["--model", model])
    for name in ("ds_config.json", f"ds_config_{model}_curriculum.json"):
        text = programs.launch(NAME, "--model", model, "--deepspeed", "--deepspeed_config", name, timeout=120)
        assert int(re.findall(r"consumed_tokens (\d+)", text)[-1]) >= 400_000
    assert os.path.exists(FOLDER / "out" / model / "clusters")


def test_the_readme_explains_the_edits():
    programs.check_edits(NAME)
