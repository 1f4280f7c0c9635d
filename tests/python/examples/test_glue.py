"""BERT's fine-tuning on tasks of GLUE and its port to DeepSpeed: equal weights, resumed runs, predictions, files."""

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
import bert_training  # noqa: E402
import glue  # noqa: E402

NAME = "glue"
FOLDER = pathlib.Path(programs.EXAMPLES, NAME)
SMALL = dict(vocab_size=600, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
             max_position_embeddings=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
             initializer_range=0.1)  # fmt: skip
STEPS = 20
LEARNING = 180
SENTENCES = {"SST-2": [("good", 1), ("not good", 0), ("bad", 0), ("not bad", 1)],
             "MRPC": [("1\t2\ta film\ta movie", 1), ("3\t4\ta film\ta house", 0), ("5\t6\tone\tone", 1)]}  # fmt: skip


def flags(folder, **model):
    """The flags that both programs get: a small model with the sentences of the example."""
    own = {"train_batch_size": 8, "max_seq_length": 24, "max_steps": STEPS, "learning_rate": 1e-3, "weight_decay": 0.01}
    found = {"bert_model_config": {**SMALL, **model}, "training": own}
    (folder / "model.json").write_text(json.dumps(found))
    return ["--cf", folder / "model.json", "--output_dir", folder / "out", "--predict_batch_size", 50]


def config(tmp_path, base="ds_config.json", **changes):
    """A small configuration: 8 samples, 2 in a micro-batch."""
    changes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, **changes}
    settings = json.loads((FOLDER / base).read_text())
    path = programs.config_file(NAME, tmp_path, **{**dict.fromkeys(["zero_optimization"]), **settings, **changes})
    return ["--deepspeed", "--deepspeed_config", path]


def scores_of(text):
    return json.loads(text.splitlines()[-1])


def means_of(results):
    return torch.tensor([losses for _, losses, _ in results]).mean(0)


def predictions_of(folder):
    header, *lines = (folder / "out" / "predictions.tsv").read_text().splitlines()
    assert header == "index\tprediction" and [line.split("\t")[0] for line in lines] == [*map(str, range(len(lines)))]
    return [int(line.split("\t")[1]) for line in lines]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """``(weights, losses, text)`` of 20 steps of plain.py with the whole batch, and the predictions."""
    folder = tmp_path_factory.mktemp("plain")
    return *programs.run_plain(NAME, *flags(folder)), predictions_of(folder)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_port_trains_the_same_weights(stage, ranks, plain, tmp_path):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    results = programs.run_on(ranks, NAME, "ds", *flags(tmp_path), *config(tmp_path, zero_optimization=zero))
    for weights, _, _ in results:
        assert programs.farthest(weights, plain[0]) < 1e-5
    means = means_of(results)
    assert len(means) == STEPS and (means - torch.tensor(plain[1])).abs().max() < 1e-5
    assert predictions_of(tmp_path) == plain[3]
    assert scores_of(results[0][2]) == scores_of(plain[2]) and '"acc"' not in "".join(text for *_, text in results[1:])


def test_a_resumed_run_has_the_bits_of_one_run(tmp_path):
    argv = [*flags(tmp_path, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1), "--max_steps", 6]
    given = config(tmp_path, zero_optimization={"stage": 2})
    plain = ["--gradient_accumulation_steps", 2]
    for text, again in programs.check_resumed(NAME, 4, argv, given, tmp_path / "out", plain):
        assert text.splitlines()[-1:] == again.splitlines()[-1:]


@pytest.mark.parametrize("preln", [[], ["--preln"]])
def test_both_kinds_of_layers_have_one_loss(preln, tmp_path):
    argv = [*flags(tmp_path), *config(tmp_path), *preln, "--predict_batch_size", 2, "--max_steps", 5]
    programs.check_both_kinds_of_layers(NAME, argv, preln)


@pytest.mark.every("it starts the commands of the README")
@pytest.mark.parametrize("more, least", [([], 0.85), (["--task_name", "MRPC", "--max_steps", 800], 0.8)])
def test_the_commands_of_the_readme(more, least, tmp_path):
    given = ["--deepspeed", "--deepspeed_config", "ds_config.json", "--output_dir", tmp_path]
    scores = scores_of(programs.launch(NAME, *given, *more, timeout=200))
    assert all(score > least for score in scores.values()) and len(scores) == (3 if more else 1)


def test_the_readme_explains_the_edits():
    programs.check_edits(NAME)


# ---- other configurations --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A run of ds.py on two ranks that is long enough for the small model."""
    folder = tmp_path_factory.mktemp("learned")
    return learn(folder)


def learn(folder, *more, base="ds_config.json", steps=LEARNING, rate=2e-3, **changes):
    """``(weights, losses, text)`` of both ranks; the batch is that of the configuration. Bounds on what is
    learned leave room for other seeds: the 12 seeds 0 to 11 stay far below them."""
    optimizer = json.loads((FOLDER / base).read_text())["optimizer"]
    optimizer["params"]["lr"] = rate
    batch = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 16}
    given = config(folder, base, **batch, **changes, optimizer=optimizer)
    return programs.run_on(2, NAME, "ds", *flags(folder), "--max_steps", steps, *given, *more)


def test_the_model_learns_what_is_good(learned):
    means = means_of(learned)
    assert scores_of(learned[0][2])["acc"] > 0.85 and means[-20:].mean() < 0.5 * means[:10].mean()


def test_progressive_layer_dropping(tmp_path):
    """Layers are left out, and the loss falls. The first step runs all layers."""
    more = ["--preln", "--progressive_layer_drop"]
    dropped, kept = (
        means_of(learn(tmp_path, *flags_of_run, base=base, steps=steps))
        for flags_of_run, base, steps in ((more, "ds_config_pld.json", LEARNING), (more[:1], "ds_config.json", 10))
    )
    assert abs(dropped[0] - kept[0]) < 1e-6 and (dropped[1:10] - kept[1:]).abs().max() > 1e-4
    assert dropped[-20:].mean() < 0.8 * dropped[:10].mean()


def test_zenflow_with_all_columns_has_the_bits_of_plain_offload(tmp_path):
    settings = json.loads((FOLDER / "zf_config.json").read_text())["zero_optimization"]
    flow = {**settings.pop("zenflow"), "topk_ratio": 1.0, "update_interval": 1, "overlap_step": False}
    whole, offload = (
        learn(tmp_path, base="zf_config.json", steps=6, zero_optimization={**settings, **more})
        for more in ({"zenflow": flow}, {})
    )
    for (weights, losses, _), (wanted, others, _) in zip(whole, offload):
        assert programs.farthest(weights, wanted) == 0 and losses == others


def test_zenflow_trains(learned, tmp_path):
    """The other columns move once in 4 steps, so the loss falls more slowly. The first losses are those of the plain
    configuration within 0.1, and after twice as many steps the loss has fallen to three quarters or less."""
    results = learn(tmp_path, base="zf_config.json", steps=2 * LEARNING)
    flow, whole = means_of(results), means_of(learned)
    assert flow[0] == whole[0] and (flow[:10] - whole[:10]).abs().max() < 0.1
    assert flow[-20:].mean() < 0.75 * flow[:10].mean() and scores_of(results[0][2])["acc"] > 0.65


def test_zero_one_adam_trains(tmp_path):
    means = means_of(learn(tmp_path, base="deepspeed_bsz32_01adam_config.json", rate=1e-3))
    assert means[-20:].mean() < 0.8 * means[:10].mean()


@pytest.mark.parametrize("path", FOLDER.glob("*config*.json"), ids=lambda path: path.name)
def test_every_key_of_a_configuration_has_an_effect(path):
    found = DeepSpeedConfig(str(path), world_size=2)
    assert not found.without_effect and found.train_batch_size == 32


# ---- metrics and samples ---------------------------------------------------------------------------------------------


def test_metrics():
    """4 of 6 samples are right. Class 1: 2 right, 1 predicted wrongly, 1 not found, so precision and recall are 2/3."""
    labels, predictions = [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0]
    assert glue.metrics_of("SST-2", labels, predictions) == {"acc": 4 / 6}
    wanted = {"acc": 4 / 6, "f1": 2 / 3, "acc_and_f1": 2 / 3}
    assert glue.metrics_of("MRPC", labels, predictions) == pytest.approx(wanted)
    # Precision 1/4, recall 1/1.
    found = glue.metrics_of("MRPC", [0, 0, 1, 0], [1, 1, 1, 1])
    assert found == pytest.approx({"acc": 0.25, "f1": 2 * 0.25 * 1 / (0.25 + 1), "acc_and_f1": (0.25 + 0.4) / 2})
    assert glue.metrics_of("MRPC", [0, 0], [0, 0]) == {"acc": 1.0, "f1": 0.0, "acc_and_f1": 0.5}


def write(folder, task, train=None, dev=None):
    """A folder of GLUE with a task; an argument is the text of a file instead of a correct one."""
    header, place, _ = glue.TASKS[task]
    rows = [f"{label}\t{text}" if place == 0 else f"{text}\t{label}" for text, label in SENTENCES[task]]
    (folder / task).mkdir()
    for name, text in (("train.tsv", train), ("dev.tsv", dev)):
        whole = "\n".join([header, *rows, ""]).encode()
        (folder / task / name).write_bytes(whole if text is None else text)
    return folder


def samples_of(folder, *more):
    parser = glue.get_argument_parser(str(FOLDER), "")
    args = glue.checked(parser.parse_args([str(one) for one in (*flags(folder), *more)]))
    return glue.Samples(bert_training.for_one_process(args))


@pytest.mark.parametrize("task", glue.TASKS)
def test_the_shipped_sentences(task):
    train, dev = (glue.read_samples(str(FOLDER / "data" / task / name), task) for name in ("train.tsv", "dev.tsv"))
    assert all(path.stat().st_size < 200_000 for path in (FOLDER / "data" / task).iterdir())
    assert len(train) >= 800 and len(dev) > 200 and not {str(one) for one in train} & {str(one) for one in dev}
    for samples in (train, dev):
        assert 0.45 < sum(sample.label for sample in samples) / len(samples) < 0.55


@pytest.mark.parametrize("task", glue.TASKS)
def test_samples(task, tmp_path):
    """The folder of the task and that of GLUE are the same data; segments tell both sentences apart."""
    write(tmp_path, task)
    samples = samples_of(tmp_path, "--data", tmp_path, "--task_name", task)
    assert samples_of(tmp_path, "--data", tmp_path / task, "--task_name", task).train == samples.train
    words = samples.vocabulary
    ids, segments, mask, labels = (one.cpu() for one in samples.tensors(samples.train))
    assert labels.tolist() == [label for _, label in SENTENCES[task]] and ids.shape == (len(labels), 24)
    assert (ids[:, 0] == words.cls).all() and (mask == (ids != words.pad)).all() and (segments <= mask).all()
    assert ((ids == words.sep).sum(1) == len(samples.train[0].sentences)).all()
    assert segments.any() == (task == "MRPC")
    for sample, row, parts in zip(samples.train, ids.tolist(), segments.tolist()):
        ends = [place for place, token in enumerate(row) if token == words.sep]
        assert row[1 : ends[0]] == words.encode(sample.sentences[0]) and not any(parts[: ends[0] + 1])
        if task == "MRPC":
            assert row[ends[0] + 1 : ends[1]] == words.encode(sample.sentences[1]) and all(parts[ends[0] + 1 : ends[1]])
    # Each pass has every sample once.
    numbers = [samples.args.train_batch_size * step + place for step in range(2) for place in range(8)]
    seen = [bert_training.in_order(samples.args, samples.train, number) for number in numbers[: len(labels)]]
    assert sorted(map(str, seen)) == sorted(map(str, samples.train))


def test_a_long_sentence_loses_its_end(tmp_path):
    samples = samples_of(tmp_path, "--task_name", "MRPC", "--max_seq_length", 12)
    words, long = samples.vocabulary, "abc " * 30
    short = words.encode("A")
    ids, segments, mask, _ = samples.row(glue.Sample(["A", long], 1))
    assert ids == [words.cls, *short, words.sep, *words.encode(long)[: 9 - len(short)], words.sep] and all(mask)
    assert segments.count(0) == 2 + len(short)
    # Two long ones keep an equal part.
    ids, segments, _, _ = samples.row(glue.Sample([long, long], 0))
    assert len(ids) == 12 and ids.count(words.sep) == 2 and abs(segments.count(0) - 1 - segments.count(1)) <= 1


def test_the_real_form_of_the_files(tmp_path):
    """A mark of UTF-8, lines that end as on Windows, and quotation marks that are ordinary characters."""
    header = glue.TASKS["MRPC"][0]
    text = f'\ufeff{header}\r\n1\t7\t8\t"One" said so.\t" Two\u2028\r\n0\t7\t8\tOne\tTwo\r\n'
    write(tmp_path, "MRPC", text.encode())
    found = glue.read_samples(str(tmp_path / "MRPC" / "train.tsv"), "MRPC")
    assert found == [glue.Sample(['"One" said so.', '" Two'], 1), glue.Sample(["One", "Two"], 0)]


@pytest.mark.parametrize(
    "task, text, texts",
    [
        ("SST-2", b"sentence\tlabel\na\t1\nb\n", ["train.tsv:3: the line has 1 columns; SST-2 has 2"]),
        ("SST-2", b"sentence\tlabel\na\t2\n", ["train.tsv:2: the label is '2'; it is 0 or 1"]),
        ("SST-2", b"sentence\tlabel\na\t1\n \t0\n", ["train.tsv:3: a sentence is empty"]),
        ("SST-2", b"text\tlabel\na\t1\n", ["train.tsv:1: the header is 'text\\tlabel'; SST-2 has"]),
        ("SST-2", b"sentence\tlabel\n", ["train.tsv:1: the file has no sentences"]),
        ("SST-2", b"", ["train.tsv:1: the header is ''"]),
        ("SST-2", b"sentence\tlabel\na\t1\n\xff\t1\n", ["train.tsv:3", "not UTF-8"]),
        ("MRPC", b"sentence\tlabel\na\t1\n", ["train.tsv:1: the header", "Quality"]),
        ("MRPC", b"Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t2\t3\ta\tb\tc\n", ["train.tsv:2", "6 columns", "5"]),
        ("MRPC", b"Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t2\t3\ta\t\n", ["train.tsv:2: a sentence is empty"]),
    ],
)
def test_a_wrong_file(task, text, texts, tmp_path):
    write(tmp_path, task, text)
    with refusing(SystemExit, *texts):
        samples_of(tmp_path, "--data", tmp_path, "--task_name", task)


# ---- pre-trained models ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder with checkpoints of plain.py and ds.py of the example bert_pretraining, and their vocabulary."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "text.txt").write_text("\n\n".join(f"line {one}\nmore of {one}\nof 2 lines" for one in range(20)))
    for program, argv in (("plain", []), ("ds", config(folder))):
        given = ["--data", folder / "text.txt", "--max_steps", 1, *flags(folder, pre_layer_norm=True)[:4], *argv]
        programs.run_on(1, "bert_pretraining", program, *given, env=programs.ALONE)
    return folder / "out"


@pytest.mark.parametrize("name", ["states.pt", "mp_rank_00_model_states.pt"])
def test_a_checkpoint_of_the_pre_training(name, pretrained, tmp_path):
    """Both programs start from the BERT and the pooler of the checkpoint."""
    path = pretrained / "saved_models" / "step1" / name
    given = ["--preln", "--vocab_file", pretrained / "vocab.json", "--model_file", path]
    samples, saved = samples_of(tmp_path, *given), torch.load(path, **bert.WEIGHTS_ONLY)["module"]
    model = bert.BertForSequenceClassification(glue.config_of(samples.args, samples.vocabulary))
    bert.load_checkpoint(model, samples.args)
    found = {key: value for key, value in model.state_dict().items() if not key.startswith("classifier")}
    assert len(found) > 20 and "pooler.weight" in found and all(torch.equal(found[key], saved[key]) for key in found)
    losses = [programs.run_plain(NAME, *flags(tmp_path), *given, "--max_steps", 1)[1]]
    losses += [programs.run_on(1, NAME, "ds", *flags(tmp_path), *config(tmp_path), *given, "--max_steps", 1)[0][1]]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_checkpoint_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    other = transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=2,
    )).eval()  # fmt: skip
    torch.save(other.state_dict(), tmp_path / "model.bin")
    model = bert.BertForSequenceClassification(bert.BertConfig(50, 32, 2, 4, 64)).eval()
    bert.load_checkpoint(model, type("", (), {"model_file": str(tmp_path / "model.bin"), "ckpt_type": "HF"}))
    model.classifier.load_state_dict(other.classifier.state_dict())
    ids, segments = torch.randint(0, 50, (3, 12)), torch.randint(0, 2, (3, 12))
    mask = (torch.arange(12) < 9).long().repeat(3, 1)
    wanted = other(ids, token_type_ids=segments, attention_mask=mask).logits
    torch.testing.assert_close(model(ids, segments, mask), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "more, texts",
    [
        (["--model_file", "a.pt"], ["--model_file", "--vocab_file"]),
        (["--ckpt_type", "TF"], ["--ckpt_type TF", "transformers"]),
        (["--ckpt_type", "HF", "--preln"], ["--preln", "behind attention"]),
        (["--data", "a"], ["SST-2", "train.tsv: the file cannot be read"]),
        (["--fp16"], ["--fp16", "ds.py"]),
    ],
)
def test_flags_that_are_refused(more, texts, tmp_path):
    with refusing(SystemExit, *texts):
        samples_of(tmp_path, *more)


def test_epochs():
    parser = glue.get_argument_parser(str(FOLDER), "")
    args = bert_training.for_one_process(glue.checked(parser.parse_args(["--num_train_epochs", "3"])))
    assert glue.steps_of(args, 160) == 15
