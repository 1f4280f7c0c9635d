"""GPT-2 with layers that are split over ranks, and its port to DeepSpeed: equal weights, resumed runs, flags, files."""

import json
import re

import pytest
import torch

import example_programs as programs
from refusals import refusing

NAME = "megatron_gpt2"
STEPS = 20
SIMILAR = pytest.mark.every("it is like another case of the same test")
WITH_FP16 = pytest.mark.skipif(not hasattr(torch, "compile"), reason="torch 1.13 has no fp16 on CPUs")
SMALL = ["--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 2, "--seq-length", 16, "--log-interval", 5]
SPLIT = {"qkv.weight": 0, "qkv.bias": 0, "up.weight": 0, "up.bias": 0, "out.weight": 1, "down.weight": 1}
LINE = re.compile(r"^iteration (\d+)/20 \| loss (\d\.\d{4}) \| learning rate (\S+) \| loss scale 1\.0$", re.M)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """The flags that both programs get: a small model on a small file."""
    path = tmp_path_factory.mktemp("made") / "text.jsonl"
    texts = [" ".join(f"{one} times {k} is {one * k}." for k in range(8)) for one in range(12)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [*SMALL, "--data", path, "--train-iters", STEPS]


def config(tmp_path, stage=1, **changes):
    path = programs.config_file(NAME, tmp_path, zero_optimization={"stage": stage}, **changes)
    return ["--deepspeed", "--deepspeed_config", path]


@pytest.fixture(scope="module")
def plain(flags):
    """``(weights, losses, text)`` of 20 steps of plain.py on one rank, without dropout."""
    return programs.run_plain(NAME, *flags, "--dropout", 0)


def whole(results, wanted):
    """The weights of a model whose slices the ranks have."""
    dims = {name: next((dim for end, dim in SPLIT.items() if name.endswith(end)), None) for name in wanted}
    slices = [weights for weights, _, _ in results]
    assert all(slices[0][name].shape != wanted[name].shape for name, dim in dims.items() if dim is not None)
    return {
        name: slices[0][name] if dim is None else torch.cat([part[name] for part in slices], dim)
        for name, dim in dims.items()
    }


def same(weights, losses, plain):
    """The results differ from those of ``plain`` by less than 1e-5."""
    assert programs.farthest(weights, plain[0]) < 1e-5
    assert len(losses) == STEPS and (torch.tensor(losses) - torch.tensor(plain[1])).abs().max() < 1e-5


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_port_trains_the_same_weights(stage, ranks, flags, plain, tmp_path):
    results = programs.run_on(ranks, NAME, "ds", *flags, "--dropout", 0, *config(tmp_path, stage))
    for weights, losses, _ in results:
        same(weights, losses, plain)
    assert plain[1][-1] < plain[1][0] - 1
    lines, wanted = ([found[::2] for found in LINE.findall(text)] for text in (results[0][2], plain[2]))
    assert lines == wanted and [int(iteration) for iteration, _ in lines] == [5, 10, 15, 20]
    assert not any(LINE.findall(text) for _, _, text in results[1:])


@pytest.fixture(scope="module")
def clipped(flags):
    """The same with gradients of a small norm."""
    return programs.run_plain(NAME, *flags, "--dropout", 0, "--clip-grad", 0.1)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SIMILAR), pytest.param(1, marks=SIMILAR), 2])
def test_two_ranks_that_share_a_model(stage, flags, plain, clipped, tmp_path):
    """Clipping shows that the norm counts each weight once."""
    given = config(tmp_path, stage, gradient_clipping=0.1)
    results = programs.run_on(2, NAME, "ds", *flags, "--dropout", 0, "--model-parallel-size", 2, *given)
    assert programs.farthest(clipped[0], plain[0]) > 1e-4
    for _, losses, _ in results:
        same(whole(results, clipped[0]), losses, clipped)


@pytest.mark.parametrize("more", [["--model-parallel-size", 2], ["--batch-size", 4]])
def test_the_plain_program_on_two_ranks(more, flags, plain):
    results = programs.run_on(2, NAME, "plain", *flags, "--dropout", 0, *more)
    split = more[0] == "--model-parallel-size"
    for weights, losses, _ in results:
        same(whole(results, plain[0]) if split else weights, losses, plain)


@pytest.mark.parametrize("size", [pytest.param(1, marks=SIMILAR), 2])
def test_a_resumed_run_has_the_bits_of_one_run(size, flags, tmp_path):
    """With dropout, for which the ranks of a model have equal and different random numbers."""
    argv = [*flags, *config(tmp_path, 2), "--model-parallel-size", size, "--checkpoint-activations"]
    last = ["--train-iters", 8, "--lr-decay-iters", STEPS, "--save", tmp_path / "run"]
    whole_run, saved, resumed = (
        programs.run_on(2, NAME, "ds", *argv, *more) for more in ([], last, ["--load", tmp_path / "run"])
    )
    for one, first, more in zip(whole_run, saved, resumed):
        assert programs.farthest(one[0], more[0]) == 0 and programs.farthest(one[0], first[0]) > 0
        assert first[1] + more[1] == one[1]


@pytest.mark.parametrize("more", [[], pytest.param(["--fp16"], marks=WITH_FP16)])
def test_a_resumed_run_of_the_plain_program(more, flags, tmp_path):
    argv = [*flags, "--model-parallel-size", 2, *more]
    saved = programs.run_on(2, NAME, "plain", *argv, "--save", tmp_path / "run", "--train-iters", 8,
                            "--lr-decay-iters", STEPS)  # fmt: skip
    whole_run = programs.run_on(2, NAME, "plain", *argv)
    resumed = programs.run_on(2, NAME, "plain", *argv, "--load", tmp_path / "run")
    for one, first, last in zip(whole_run, saved, resumed):
        assert programs.farthest(one[0], last[0]) == 0 and first[1] + last[1] == one[1]


def test_a_run_resumed_with_whole_layers(flags, plain, tmp_path):
    """Two ranks that share a model save it, and one rank continues."""
    argv = [*flags, "--dropout", 0, *config(tmp_path)]
    first = ["--model-parallel-size", 2, "--train-iters", 8, "--lr-decay-iters", STEPS, "--save", tmp_path / "run"]
    _, losses, _ = programs.run_on(2, NAME, "ds", *argv, *first)[0]
    weights, more, _ = programs.run_on(1, NAME, "ds", *argv, "--load", tmp_path / "run")[0]
    same(weights, losses + more, plain)


@pytest.mark.parametrize("rank, model, data", [(0, [0, 1], [0, 2]), (1, [0, 1], [1, 3]), (2, [2, 3], [0, 2])])
def test_groups_of_four_ranks(rank, model, data, monkeypatch):
    with programs.loaded(NAME, "gpt2_mpu") as mpu:
        monkeypatch.setattr(mpu.dist, "get_world_size", lambda group=range(4): len(group))
        monkeypatch.setattr(mpu.dist, "get_rank", lambda group=range(4): list(group).index(rank))
        monkeypatch.setattr(mpu.dist, "new_group", list)
        mpu.initialize_model_parallel(2)
        assert mpu.get_model_parallel_group() == model and mpu.get_data_parallel_group() == data
        assert mpu.get_model_parallel_rank() == rank % 2 and mpu.get_data_parallel_rank() == rank // 2


@pytest.mark.parametrize("name", ["plain", "ds"])
def test_activations_that_are_computed_again(name, flags, tmp_path):
    """With dropout in the split layers and elsewhere."""
    argv = [*flags, "--model-parallel-size", 2, *(config(tmp_path) if name == "ds" else []), "--train-iters", 5]
    kept = programs.run_on(2, NAME, name, *argv)
    again = programs.run_on(2, NAME, name, *argv, "--checkpoint-activations")
    for one, other in zip(kept, again):
        assert one[1] == other[1] and programs.farthest(one[0], other[0]) == 0


@SIMILAR
def test_partitioned_activations(flags, plain, tmp_path):
    given = config(tmp_path, activation_checkpointing={"partition_activations": True})
    argv = ["--dropout", 0, "--model-parallel-size", 2, "--checkpoint-activations"]
    results = programs.run_on(2, NAME, "ds", *flags, *argv, *given)
    same(whole(results, plain[0]), results[0][1], plain)


def test_the_loss_scale_is_in_the_line(flags, tmp_path):
    given = config(tmp_path, bf16={"enabled": True})
    (_, losses, text), _ = programs.run_on(2, NAME, "ds", *flags, *given)
    assert len(LINE.findall(text)) == 4 and losses[-1] < losses[0] - 0.5


@WITH_FP16
def test_half_precision_of_the_plain_program(flags, plain):
    _, losses, text = programs.run_plain(NAME, *flags, "--dropout", 0, "--fp16")
    assert (torch.tensor(losses) - torch.tensor(plain[1])).abs().max() < 0.05
    assert "| loss scale 65536.0" in text


def test_text_of_the_tutorials():
    _, losses, _ = programs.run_plain(NAME, *SMALL, "--train-iters", 30)
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("line", ['{"text": 3}', '["text"]', '{"words": "a"}', '{"text": "a"', "", "\xff"])
def test_a_wrong_line_is_named(line, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + line.encode("latin-1") + b"\n")
    with programs.loaded(NAME, "gpt2_parts") as parts, refusing(SystemExit, f"{path}: line 2 ", "JSON"):
        parts.read_texts(path)


@pytest.mark.parametrize(
    "more, texts",
    [
        (["--hidden-size", 33], ["--hidden-size 33", "--num-attention-heads 2"]),
        (["--num-attention-heads", 1, "--model-parallel-size", 2], ["--num-attention-heads 1"]),
        (["--seq-length", 100000], ["too few", "--seq-length 100000"]),
        (["--batch-size", 3], ["--batch-size 3", "says 8"]),
        (["--clip-grad", 0.5], ["--clip-grad 0.5", "says 1.0"]),
        (["--fp16"], ["--fp16 True", "says False"]),
        (["--model-parallel-size", 2], ["--model-parallel-size 2", "1 ranks"]),
    ],
)
def test_flags_that_contradict(more, texts, flags, tmp_path):
    with refusing(SystemExit, *texts):
        programs.run_on(1, NAME, "ds", *flags, *config(tmp_path), *more)


@pytest.mark.parametrize("name", ["plain", "ds"])
def test_a_folder_without_checkpoint(name, flags, tmp_path):
    with refusing(SystemExit, "--load", "this folder has no checkpoint"):
        programs.run_on(1, NAME, name, *flags, *(config(tmp_path) if name == "ds" else []), "--load", tmp_path)


def test_the_edits_are_few_and_in_the_readme():
    programs.check_edits(NAME)


@pytest.mark.every("it starts the command of the README, as the test of cifar does")
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("more", [[], ["--model-parallel-size", 2]])
def test_the_command_of_the_readme(more):
    """Without ``--train-iters`` this takes ten seconds."""
    options = ("--deepspeed", "--deepspeed_config", "ds_config.json", "--train-iters", 20, *more)
    assert len(LINE.findall(programs.launch(NAME, *options))) == 1
