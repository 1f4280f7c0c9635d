"""BERT's pre-training and its port to DeepSpeed: equal weights, resumed runs, layers of both kinds, flags, files."""

import argparse
import json
import os
import pathlib
import sys

import pytest
import torch

import example_programs as programs
from deepspeed.runtime.config import DeepSpeedConfig
from refusals import refusing

sys.path.append(os.path.join(programs.EXAMPLES, "common"))

import bert  # noqa: E402
import bert_training as training  # noqa: E402
import pretraining  # noqa: E402

NAME = "bert_pretraining"
ZERO = {"stage3_param_persistence_threshold": 0}
SMALL = dict(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
             max_position_embeddings=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
STEPS = 20
PUBLISHED = {
    "deepspeed_bsz4096_adam_config.json": ("Adam", 4096),
    "deepspeed_bsz4k_progressive_layer_drop_config_seq128.json": ("Adam", 4096),
    "deepspeed_bsz4k_onebit_config_seq128_bf16.json": ("OneBitAdam", 4096),
    "deepspeed_bsz64k_onebitlamb_config_seq128_bf16.json": ("OneBitLamb", 65536),
    "deepspeed_bsz32k_onebitlamb_config_seq512_bf16.json": ("OneBitLamb", 32768),
    "deepspeed_bsz4k_01adam_config_seq128_bf16.json": ("ZeroOneAdam", 4096),
    "deepspeed_bsz4k_01adam_config_seq512_bf16.json": ("ZeroOneAdam", 4096),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a text of 12 documents."""
    folder = tmp_path_factory.mktemp("made")
    line = "document {} says in line {} that {} times {} is {}"
    documents = ["\n".join(line.format(one, k, one, k, one * k) for k in range(4)) for one in range(12)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    return folder


def flags(made, tmp_path, weight_decay=0.01, **model):
    """The flags that both programs get: a small model on a small text."""
    own = {"train_batch_size": 8, "max_seq_length": 32, "max_steps": STEPS, "learning_rate": 5e-4,
           "weight_decay": weight_decay, "warmup_proportion": 0.25, "decay_rate": 0.5, "decay_step": 5}  # fmt: skip
    found = {"bert_model_config": {**SMALL, "pre_layer_norm": True, **model}, "training": own}
    (tmp_path / "model.json").write_text(json.dumps(found))
    return ["--cf", tmp_path / "model.json", "--data", made / "text.txt", "--output_dir", tmp_path / "out",
            "--print_steps", 5]  # fmt: skip


def config(tmp_path, optimizer="Adam", rate=5e-4, params=(), **changes):
    """A small ds_config.json: 8 samples, 2 in a micro-batch."""
    section = {"type": optimizer, "params": {"lr": rate, "eps": 1e-6, "weight_decay": 0.01, **dict(params)}}
    path = programs.config_file(
        NAME, tmp_path, **{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "optimizer": section, **changes}
    )
    return ["--deepspeed", "--deepspeed_config", path]


def lines_of(text):
    """The lines that the program prints, without the log of the engine."""
    return [line for line in text.splitlines() if line.startswith("step ")]


def losses_of(ranks, *argv):
    """The means over the ranks of the losses of ds.py."""
    return torch.tensor([losses for _, losses, _ in programs.run_on(ranks, NAME, "ds", *argv)]).mean(0)


@pytest.fixture(scope="module")
def plain(made, tmp_path_factory):
    """``(weights, losses, text)`` of 20 steps of plain.py with the whole batch."""
    return programs.run_plain(NAME, *flags(made, tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_port_trains_the_same_weights(stage, ranks, made, plain, tmp_path):
    given = config(tmp_path, zero_optimization={"stage": stage, **ZERO})
    results = programs.run_on(ranks, NAME, "ds", *flags(made, tmp_path), *given)
    for weights, _, _ in results:
        assert programs.farthest(weights, plain[0]) < 1e-5
    means = torch.tensor([losses for _, losses, _ in results]).mean(0)
    assert len(means) == STEPS and (means - torch.tensor(plain[1])).abs().max() < 1e-5
    assert plain[1][-1] < plain[1][0] - 0.3
    assert len(lines_of(results[0][2])) == 4 and not any(lines_of(text) for _, _, text in results[1:])


def test_a_resumed_run_has_the_bits_of_one_run(made, tmp_path):
    """With dropout, a schedule and clipping."""
    given = config(tmp_path, zero_optimization={"stage": 2})
    argv = flags(made, tmp_path, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    argv += ["--max_steps", 10, "--lr_schedule", "EE"]
    for text, again in programs.check_resumed(NAME, 6, argv, given, tmp_path / "out"):
        assert lines_of(text)[1:] == lines_of(again)


@pytest.mark.parametrize("pre_layer_norm", [True, False])
def test_both_kinds_of_layers_have_one_loss(pre_layer_norm, made, tmp_path):
    argv = [*flags(made, tmp_path, pre_layer_norm=pre_layer_norm), *config(tmp_path), "--max_steps", 12]
    flag = "--deepspeed_transformer_kernel"
    own = programs.run_on(1, NAME, "ds", *argv, flag)[0]
    without, with_memory_flags = (
        programs.run_on(1, NAME, "ds", *argv, *more)[0]
        for more in ([], [flag, "--attention_dropout_checkpoint", "--gelu_checkpoint", "--normalize_invertible"])
    )
    for other in (without, with_memory_flags):
        assert own[0].keys() == other[0].keys()
        assert (torch.tensor(own[1]) - torch.tensor(other[1])).abs().max() < 1e-4


@pytest.mark.parametrize("more", [[], ["--deepspeed_transformer_kernel"]])
def test_progressive_layer_dropping(more, made, tmp_path):
    section = {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 10.0}}
    argv = [*flags(made, tmp_path), *more]
    dropped = losses_of(2, *argv, "--progressive_layer_drop", *config(tmp_path, **section))
    kept = losses_of(2, *argv, *config(tmp_path))
    assert (dropped[0] - kept[0]).abs() < 1e-6, "the first step runs all layers"
    assert (dropped[1:] - kept[1:]).abs().max() > 1e-3 and dropped[-1] < dropped[0] - 0.3


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_positions_without_gradient_do_not_move(name, made, tmp_path):
    """Signs move elements whose gradient is always zero, unless the group of the table has a mask."""
    freeze = {"var_freeze_step": 3} if name == "ZeroOneAdam" else {"freeze_step": 3}
    given = config(tmp_path, name, params={**freeze, "weight_decay": 0.0}, zero_optimization=None)
    argv = flags(made, tmp_path, weight_decay=0.0)
    table = "bert.embeddings.position_embeddings.weight"
    (first, _, _), (last, losses, _) = (
        programs.run_on(2, NAME, "ds", *argv, *given, "--max_steps", steps)[0] for steps in (1, 12)
    )
    assert torch.equal(first[table][32:], last[table][32:]) and losses[-1] < losses[0]
    assert (first[table][:32] - last[table][:32]).abs().max() > 1e-4


def test_configurations_under_published_names():
    folder = pathlib.Path(programs.EXAMPLES, NAME)
    assert {path.name for path in folder.glob("deepspeed_*.json")} == {*PUBLISHED}
    for name, (optimizer, batch) in PUBLISHED.items():
        settings = json.loads((folder / name).read_text())
        found = DeepSpeedConfig(settings, world_size=64)
        assert settings["train_batch_size"] == batch and settings["optimizer"]["type"] == optimizer
        assert found.pld_enabled == ("layer_drop" in name) and not found.without_effect, found.without_effect
    large = bert.read_model_file(str(folder / "bert_large_adam_seq128.json"))
    assert set(large["datasets"]) == {"wiki_pretrain_dataset", "bc_pretrain_dataset"}
    assert bert.BertConfig(**large["bert_model_config"]).num_hidden_layers == 24


@pytest.mark.every("it starts the command of the README")
def test_the_command_of_the_readme(tmp_path):
    given = ["--deepspeed", "--deepspeed_config", "ds_config.json", "--output_dir", tmp_path]
    text = programs.launch(NAME, *given, timeout=120)
    assert "step 200/200: loss" in text and (tmp_path / "vocab.json").is_file()


def test_the_readme_explains_the_edits():
    programs.check_edits(NAME)


# ---- learning rates --------------------------------------------------------------------------------------------------


def rates(kind, first=0, rewarmup=False, offset=0.0):
    """The learning rate at all of 20 steps with 5 steps of warm-up."""
    own = {"warmup_proportion": 0.25, "decay_rate": 0.5, "decay_step": 5}
    args = argparse.Namespace(
        lr_schedule=kind, lr_offset=offset, rewarmup=rewarmup, first_step=first, max_steps=20, learning_rate=0.1,
        model={"training": own},
    )  # fmt: skip
    optimizer, found = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3), []
    for step in range(first, 20):
        training.schedule_learning_rate(args, optimizer, step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_schedules():
    assert rates(None) == [0.3] * 20 and rates(None, offset=0.2) == [pytest.approx(0.3)] * 20
    rising = [0.1 * (step / 5) ** 2 for step in range(1, 6)]
    falling = [0.1 * 0.5 ** (step / 5) for step in range(1, 16)]
    assert rates("EE") == pytest.approx(rising + falling)
    assert rates("LE")[:5] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1]) and rates("LE")[5:] == rates("EE")[5:]
    assert rates("EE", offset=0.01) == pytest.approx([rate + 0.01 for rate in rising + falling])
    assert rates("EE", first=12) == rates("EE")[12:]
    assert rates("EE", first=12, rewarmup=True)[:2] == pytest.approx([0.1 * 0.25, 0.1])


# ---- samples ---------------------------------------------------------------------------------------------------------


def samples_of(made, tmp_path, *more):
    parser = pretraining.get_argument_parser(os.path.join(programs.EXAMPLES, NAME), "")
    given = parser.parse_args([str(one) for one in (*flags(made, tmp_path), *more)])
    return pretraining.Samples(training.for_one_process(pretraining.checked(given)))


def test_samples(made, tmp_path):
    """15 % of the tokens are guessed, most of them hidden; half of the second parts are from other documents."""
    samples = samples_of(made, tmp_path, "--train_batch_size", 400)
    words = samples.vocabulary
    ids, segments, mask, places, labels, weights, is_random = (one.cpu() for one in samples.batch(0, 0))
    assert ids.shape == (400, 32) and ids.max() < len(words) and (mask.sum(1) == (ids != words.pad).sum(1)).all()
    assert (ids[:, 0] == words.cls).all() and ((ids == words.sep).sum(1) == 2).all()
    assert ((segments == 1).sum(1) > 1).all() and (segments <= mask).all()
    assert (weights.sum(1) == (0.15 * mask.sum(1)).round()).all()
    found = ids.gather(1, places)[weights > 0]
    hidden, kept = (found == words.mask).float().mean(), (found == labels[weights > 0]).float().mean()
    assert 0.75 < hidden < 0.85 and 0.07 < kept < 0.15 and 0.4 < is_random.float().mean() < 0.6
    again = samples_of(made, tmp_path, "--train_batch_size", 4).batch(8, 0)
    assert all(torch.equal(one.cpu(), other[8:12]) for one, other in zip(again, (ids, segments, mask, places)))
    assert not torch.equal(samples_of(made, tmp_path, "--seed", 1).batch(0, 0)[0].cpu(), ids[:8])


def test_the_default_text_is_that_of_the_tutorials():
    parser = pretraining.get_argument_parser(os.path.join(programs.EXAMPLES, NAME), "")
    args = pretraining.checked(parser.parse_args([]))
    assert [os.path.realpath(path) for path in args.sources] == [os.path.join(programs.ROOT, "docs", "tutorials")]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data, texts",
    [
        (b"one\ntwo\n\nthree\n\xff\n", ["text.txt:5", "not UTF-8"]),
        (b"one\n\ntwo\n", ["text.txt:1", "two documents of two lines", "found 0"]),
        (None, ["text.txt: the file cannot be read"]),
    ],
)
def test_a_wrong_text(data, texts, made, tmp_path):
    if data is not None:
        (tmp_path / "text.txt").write_bytes(data)
    with refusing(SystemExit, *texts):
        samples_of(made, tmp_path, "--data", tmp_path / "text.txt")


@pytest.mark.parametrize(
    "model, texts",
    [
        ('{\n"a": 1,\n}', ["model.json:3", "not JSON"]),
        ('{"bert_model_config": {"hidden": 1}}', ["does not know hidden", "hidden_size"]),
        ("{}", ["bert_model_config is missing"]),
    ],
)
def test_a_wrong_model_configuration(model, texts, tmp_path):
    (tmp_path / "model.json").write_text(model)
    with refusing(SystemExit, *texts):
        bert.read_model_file(str(tmp_path / "model.json"))


@pytest.mark.parametrize(
    "more, texts",
    [
        (["--fp16"], ["--fp16", "fp32", "ds.py"]),
        (["--loss_scale", 0], ["--loss_scale"]),
        (["--delay_allreduce"], ["--delay_allreduce", "one process"]),
        (["--max_seq_length", 41], ["--max_seq_length 41", "8 to 40"]),
        (["--rewarmup"], ["--rewarmup", "--lr_schedule"]),
        (["--load_checkpoint_id", "step1"], ["--load_training_checkpoint", "belong together"]),
        (["--load_training_checkpoint", ".", "--load_checkpoint_id", "x"], ["this folder does not exist"]),
        (["--gradient_accumulation_steps", 3], ["--train_batch_size 8", "3"]),
    ],
)
def test_flags_that_plain_refuses(more, texts, made, tmp_path):
    with refusing(SystemExit, *texts):
        samples_of(made, tmp_path, *more)


DROP = {"progressive_layer_drop": {"enabled": True}}
WARM = {"scheduler": {"type": "WarmupLR", "params": {}}}


@pytest.mark.parametrize(
    "more, changes, texts",
    [
        (["--train_batch_size", 64], {}, ["--train_batch_size 64", "says 8"]),
        (["--gradient_accumulation_steps", 1], {}, ["--gradient_accumulation_steps 1", "says 4"]),
        (["--max_grad_norm", 2.0], {}, ["--max_grad_norm 2.0", "says 1.0"]),
        (["--learning_rate", 0.1], {}, ["--learning_rate 0.1", "says 0.0005"]),
        (["--max_grad_norm", 0], {}, ["--max_grad_norm 0.0", "says 1.0"]),
        (["--fp16"], {}, ["--fp16 True", "says False"]),
        (["--loss_scale", 2], {}, ["--loss_scale 2.0", "says 0"]),
        (["--delay_allreduce"], {"zero_optimization": {"stage": 2, "overlap_comm": True}}, ["--delay_allreduce"]),
        (["--lr_schedule", "EE"], WARM, ["--lr_schedule", "scheduler"]),
        (["--progressive_layer_drop"], {}, ["--progressive_layer_drop is given", "enabled is false"]),
        ([], DROP, ["--progressive_layer_drop is not given", "enabled is true"]),
        (["--gelu_checkpoint"], {}, ["--gelu_checkpoint", "--deepspeed_transformer_kernel"]),
    ],
)
def test_flags_and_configuration_that_differ(more, changes, texts, made, tmp_path):
    with refusing(SystemExit, *texts):
        programs.run_on(1, NAME, "ds", *flags(made, tmp_path), *config(tmp_path, **changes), *more)


def test_flags_and_configuration_that_agree(made, tmp_path):
    more = ["--train_batch_size", 8, "--max_grad_norm", 1.0, "--learning_rate", 5e-4, "--delay_allreduce"]
    changes = {"zero_optimization": {"stage": 2, "overlap_comm": False}}
    assert len(losses_of(2, *flags(made, tmp_path), *config(tmp_path, **changes), *more, "--max_steps", 1)) == 1


def test_layers_that_are_dropped_have_the_norm_in_front(made, tmp_path):
    argv = [*flags(made, tmp_path, pre_layer_norm=False), "--progressive_layer_drop", *config(tmp_path, **DROP)]
    with refusing(SystemExit, "--progressive_layer_drop", "pre_layer_norm"):
        programs.run_on(1, NAME, "ds", *argv)
    with refusing(SystemExit, "--deepspeed_config"):
        programs.run_on(1, NAME, "ds", *flags(made, tmp_path))
