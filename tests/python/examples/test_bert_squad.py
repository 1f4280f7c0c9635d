"""BERT's fine-tuning on questions and its port to DeepSpeed: equal weights, resumed runs, answers, files."""

import json
import os
import pathlib
import sys

import pytest
import torch

import example_programs as programs
from refusals import refusing

sys.path.append(os.path.join(programs.EXAMPLES, "common"))

import bert  # noqa: E402
import bert_training  # noqa: E402
import squad  # noqa: E402

NAME = "bert_squad"
FOLDER = pathlib.Path(programs.EXAMPLES, NAME)
SMALL = dict(vocab_size=400, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
             max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
STEPS = 20


def flags(folder, **model):
    """The flags that both programs get: a small model with the questions of the example."""
    own = {"train_batch_size": 8, "max_seq_length": 64, "max_steps": STEPS, "learning_rate": 5e-4, "weight_decay": 0.01}
    found = {"bert_model_config": {**SMALL, **model}, "training": own}
    (folder / "model.json").write_text(json.dumps(found))
    return ["--cf", folder / "model.json", "--output_dir", folder / "out", "--max_query_length", 30]


def config(tmp_path, **changes):
    """A small ds_config.json: 8 samples, 4 in a micro-batch."""
    section = {"type": "Adam", "params": {"lr": 5e-4, "eps": 1e-6, "weight_decay": 0.01}}
    path = programs.config_file(
        NAME, tmp_path, **{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "optimizer": section, **changes}
    )
    return ["--deepspeed", "--deepspeed_config", path]


def scores_of(text):
    return json.loads(text.splitlines()[-1])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """``(weights, losses, text)`` of 20 steps of plain.py with the whole batch, and the predictions."""
    folder = tmp_path_factory.mktemp("plain")
    return *programs.run_plain(NAME, *flags(folder)), json.loads((folder / "out" / "predictions.json").read_text())


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_port_trains_the_same_weights(stage, ranks, plain, tmp_path):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    results = programs.run_on(ranks, NAME, "ds", *flags(tmp_path), *config(tmp_path, zero_optimization=zero))
    for weights, _, _ in results:
        assert programs.farthest(weights, plain[0]) < 1e-5
    means = torch.tensor([losses for _, losses, _ in results]).mean(0)
    assert len(means) == STEPS and (means - torch.tensor(plain[1])).abs().max() < 1e-5
    assert json.loads((tmp_path / "out" / "predictions.json").read_text()) == plain[3]
    assert scores_of(results[0][2]) == scores_of(plain[2]) and '"f1"' not in "".join(text for *_, text in results[1:])


def test_a_resumed_run_has_the_bits_of_one_run(tmp_path):
    argv = [*flags(tmp_path, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1), "--max_steps", 6]
    given = config(tmp_path, zero_optimization={"stage": 1})
    programs.check_resumed(NAME, 4, argv, given, tmp_path / "out")


@pytest.mark.parametrize("preln", [[], ["--preln"]])
def test_both_kinds_of_layers_have_one_loss(preln, tmp_path):
    argv = [*flags(tmp_path), *config(tmp_path), *preln, "--predict_batch_size", 4, "--max_steps", 10]
    programs.check_both_kinds_of_layers(NAME, argv, preln)


def test_predictions_are_at_most_a_batch_of_the_kernel(tmp_path):
    argv = [*flags(tmp_path), *config(tmp_path), "--deepspeed_transformer_kernel"]
    with refusing(SystemExit, "--predict_batch_size 8", "train_micro_batch_size_per_gpu 4"):
        programs.run_on(1, NAME, "ds", *argv)


def test_the_model_learns_the_questions(tmp_path):
    """A file with one text: the program finds all answers, and the epochs are as many as the flag says."""
    data = json.loads((FOLDER / "data" / "questions.json").read_text())["data"][0]["paragraphs"][:1]
    (tmp_path / "dev-v1.1.json").write_text(json.dumps({"data": [{"title": "", "paragraphs": data}]}))
    (tmp_path / "train-v1.1.json").write_bytes((tmp_path / "dev-v1.1.json").read_bytes())
    more = ["--data", tmp_path, "--num_train_epochs", 64, "--learning_rate", 3e-3]
    _, losses, text = programs.run_plain(NAME, *flags(tmp_path), *more)
    questions = questions_of(tmp_path, "--data", tmp_path)
    assert len(losses) == 64 * len(questions.windows) // 8
    assert scores_of(text) == {"exact_match": 100.0, "f1": 100.0}


def test_configurations_under_published_names():
    for name, (kind, batch) in {
        "deepspeed_bsz24_config.json": ("Adam", 24),
        "deepspeed_onebitadam_bsz96_config.json": ("OneBitAdam", 96),
    }.items():
        settings = json.loads((FOLDER / name).read_text())
        assert settings["train_batch_size"] == batch and settings["train_micro_batch_size_per_gpu"] == 3
        assert settings["optimizer"]["type"] == kind and settings["optimizer"]["params"]["lr"] == 3e-5


@pytest.mark.parametrize("name", ["deepspeed_bsz24_config.json", "deepspeed_onebitadam_bsz96_config.json"])
def test_training_with_a_published_configuration(name, tmp_path):
    argv = [*flags(tmp_path), "--deepspeed", "--deepspeed_config", FOLDER / name, "--max_steps", 2]
    for _, losses, _ in programs.run_on(2, NAME, "ds", *argv):
        assert len(losses) == 2 and all(3 < loss < 6 for loss in losses)


@pytest.mark.every("it starts the command of the README")
def test_the_command_of_the_readme(tmp_path):
    given = ["--deepspeed", "--deepspeed_config", "ds_config.json", "--output_dir", tmp_path]
    assert scores_of(programs.launch(NAME, *given, timeout=120))["f1"] > 80


def test_the_readme_explains_the_edits():
    programs.check_edits(NAME)


# ---- samples ---------------------------------------------------------------------------------------------------------


def questions_of(folder, *more):
    parser = squad.get_argument_parser(str(FOLDER), "")
    args = squad.checked(parser.parse_args([str(one) for one in (*flags(folder), *more)]))
    return squad.Questions(bert_training.for_one_process(args))


def test_the_shipped_questions():
    path = FOLDER / "data" / "questions.json"
    questions, _ = squad.read_questions(str(path))
    assert len(questions) >= 40 and path.stat().st_size < 200_000
    assert len({question.id for question in questions}) == len(questions)


def test_windows_over_a_text(tmp_path):
    """Windows overlap by all but ``--doc_stride`` tokens, cover the text, and have the answer where it is whole."""
    questions = questions_of(tmp_path, "--doc_stride", 8)
    words, starts = questions.vocabulary, 0
    for question in questions.train:
        windows = list(questions.windows_of(question))
        text = [piece for window in windows for piece in window.pieces]
        assert text[0][0] == 0 and text[-1][1] == len(question.context)
        for window in windows:
            assert len(window.ids) <= 64 and window.ids.count(words.sep) == 2 and window.ids[0] == words.cls
            if window.start:
                first, last = (window.pieces[place - window.first] for place in (window.start, window.end))
                begin, answer = question.answers[0]
                assert (first[0], last[1]) == (begin, begin + len(answer))
                starts += 1
        assert any(window.start for window in windows)
    assert starts > len(questions.train) and len(questions.windows) > 2 * len(questions.train)
    assert sorted(map(id, map(questions.window, range(len(questions.windows))))) == sorted(map(id, questions.windows))


ONE = {"id": "q", "question": "?", "answers": [{"answer_start": 4, "text": "four"}]}


@pytest.mark.parametrize(
    "qa, texts",
    [
        (dict(ONE, answers=[{"answer_start": 3, "text": "four"}]), ["file.json:9:", '"q"', "character 3", "'four'"]),
        (dict(ONE, answers=[]), ["file.json:9:", '"q" has no answers']),
        ({"id": "q", "question": "?"}, ["file.json:9:", "not SQuAD 1.1", "'answers'"]),
        (None, ["file.json:2", "not JSON"]),
    ],
)
def test_a_wrong_file_of_questions(qa, texts, tmp_path):
    paragraph = {"context": "one four", "qas": [qa]}
    text = json.dumps({"data": [{"paragraphs": [paragraph]}]}, indent=1) if qa else '{"data":\n?}'
    (tmp_path / "file.json").write_text(text)
    assert qa is None or text.splitlines()[8].strip() == '"id": "q",'
    with refusing(SystemExit, *texts):
        squad.read_questions(str(tmp_path / "file.json"))


def test_a_file_without_questions(tmp_path):
    (tmp_path / "file.json").write_text('{"data": []}')
    with refusing(SystemExit, "file.json:1: the file has no questions"):
        squad.read_questions(str(tmp_path / "file.json"))


# ---- pre-trained models ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder with checkpoints of plain.py and ds.py of the example bert_pretraining, and their vocabulary."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "text.txt").write_text("\n\n".join(f"line {one}\nmore of {one}\nof 2 lines" for one in range(20)))
    for program, argv in (("plain", []), ("ds", config(folder))):
        given = ["--data", folder / "text.txt", "--max_steps", 1, "--max_seq_length", 32, *argv]
        made = flags(folder, pre_layer_norm=True)[:4]
        programs.run_on(1, "bert_pretraining", program, *made, *given, env=programs.ALONE)
    return folder / "out"


def model_of(tmp_path, *more):
    """The model with what ``--model_file`` loads."""
    questions = questions_of(tmp_path, *more)
    model = bert.BertForQuestionAnswering(squad.config_of(questions.args, questions.vocabulary))
    bert.load_checkpoint(model, questions.args)
    return model


@pytest.mark.parametrize("name", ["states.pt", "mp_rank_00_model_states.pt"])
def test_a_checkpoint_of_the_pre_training(name, pretrained, tmp_path):
    path = pretrained / "saved_models" / "step1" / name
    given = ["--preln", "--vocab_file", pretrained / "vocab.json", "--model_file", path]
    model, saved = model_of(tmp_path, *given), torch.load(path, **bert.WEIGHTS_ONLY)["module"]
    found = model.bert.state_dict()
    assert len(found) > 20 and all(torch.equal(found[key], saved[f"bert.{key}"]) for key in found)
    # Both programs train from it, and the first loss is that of this model.
    losses = [programs.run_plain(NAME, *flags(tmp_path), *given, "--max_steps", 1)[1]]
    losses += [programs.run_on(1, NAME, "ds", *flags(tmp_path), *config(tmp_path), *given, "--max_steps", 1)[0][1]]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_another_vocabulary(pretrained, tmp_path):
    vocabulary = json.loads((pretrained / "vocab.json").read_text())
    size = 256 + len(vocabulary["merges"]) + 4
    (tmp_path / "vocab.json").write_text(json.dumps({"merges": vocabulary["merges"][:-3]}))
    given = ["--preln", "--model_file", pretrained / "saved_models" / "step1" / "states.pt", "--vocab_file"]
    with refusing(SystemExit, f"a vocabulary of {size} tokens", f"has {size - 3}", "--vocab_file"):
        model_of(tmp_path, *given, tmp_path / "vocab.json")
    with refusing(SystemExit, "do not have the same parameters", "FinalLayerNorm", "--preln"):
        model_of(tmp_path, *given[1:], pretrained / "vocab.json")
    with refusing(SystemExit, "word_embeddings.weight is missing", "--ckpt_type DS"):
        torch.save({}, tmp_path / "empty.pt")
        model_of(tmp_path, "--model_file", tmp_path / "empty.pt", "--vocab_file", pretrained / "vocab.json")
    with refusing(SystemExit, "vocab.json:2", "not a vocabulary"):
        (tmp_path / "vocab.json").write_text("{\n")
        model_of(tmp_path, *given, tmp_path / "vocab.json")


@pytest.mark.parametrize(
    "more, texts",
    [
        (["--model_file", "a.pt"], ["--model_file", "--vocab_file"]),
        (["--ckpt_type", "TF"], ["--ckpt_type TF", "transformers"]),
        (["--ckpt_type", "HF", "--preln"], ["--preln", "behind attention"]),
        (["--max_query_length", 61], ["--max_query_length 61", "--max_seq_length 64"]),
        (["--predict_file", "a.json"], ["a.json: the file cannot be read"]),
    ],
)
def test_flags_that_are_refused(more, texts, tmp_path):
    with refusing(SystemExit, *texts):
        questions_of(tmp_path, *more)
