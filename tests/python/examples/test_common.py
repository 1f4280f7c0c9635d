"""Parts that the examples share: exact match and F1, vocabularies, checkpoints of transformers."""

import json
import math
import os
import pathlib
import random
import re
import sys

import pytest
import torch

from places import ROOT
from refusals import refusing

COMMON = os.path.join(ROOT, "examples", "common")
sys.path.append(COMMON)

import bert  # noqa: E402
import bert_text  # noqa: E402
import squad_metrics  # noqa: E402

# ---- exact match and F1 ----------------------------------------------------------------------------------------------


def test_answers_are_compared_without_case_articles_and_punctuation():
    assert squad_metrics.normalize_answer("The  Cat, (an) A.B. theory!") == "cat ab theory"
    assert squad_metrics.exact_match_score("the ZeRO-3 stage.", "A zero3  Stage") == 1.0
    assert squad_metrics.exact_match_score("stage 3", "stage 2") == 0.0


@pytest.mark.parametrize(
    "prediction, answer, f1",
    [
        ("one two three", "two three four five", 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)),
        ("a rank", "the rank", 1.0),
        ("rank rank", "rank", 2 * 0.5 * 1.0 / 1.5),
        ("rank", "stage", 0.0),
        ("the", "the", 0.0),
    ],
)
def test_f1(prediction, answer, f1):
    assert squad_metrics.f1_score(prediction, answer) == pytest.approx(f1)


def question(name, *answers):
    return {"id": name, "question": "?", "answers": [{"answer_start": 0, "text": text} for text in answers]}


DATA = [
    {"paragraphs": [{"context": "", "qas": [question("a", "two ranks", "ranks"), question("b", "one shard")]}]},
    {"paragraphs": [{"context": "", "qas": [question("c", "stage 3", "3"), question("d", "x")]}]},
]


def test_evaluation(tmp_path, capsys):
    """Best over the answers: a is exact, b has precision 1/2 and recall 1/2, c is exact, d is unanswered."""
    predictions = {"a": "The ranks", "b": "each shard", "c": "3"}
    wanted = {"exact_match": 50.0, "f1": 100 * (1 + 0.5 + 1 + 0) / 4}
    assert squad_metrics.evaluate(DATA, predictions) == pytest.approx(wanted)
    assert "1 of 4 questions have no prediction" in capsys.readouterr().err
    (tmp_path / "dev.json").write_text(json.dumps({"data": DATA}))
    (tmp_path / "predictions.json").write_text(json.dumps(predictions))
    squad_metrics.main([tmp_path / "dev.json", tmp_path / "predictions.json"])
    assert json.loads(capsys.readouterr().out) == pytest.approx(wanted)
    assert squad_metrics.evaluate([], {}) == {"exact_match": 0.0, "f1": 0.0}


def test_the_metrics_are_those_of_transformers():
    others = pytest.importorskip("transformers.data.metrics.squad_metrics")
    draw = random.Random(0)
    words = ["the", "a", "ZeRO", "zero,", "rank", "Ranks", "3", "(an)", "shard.", "U.S."]
    for _ in range(500):
        one, two = (" ".join(draw.choices(words, k=draw.randrange(1, 6))) for _ in range(2))
        assert squad_metrics.exact_match_score(one, two) == others.compute_exact(two, one)
        if squad_metrics.normalize_answer(one) and squad_metrics.normalize_answer(two):
            assert squad_metrics.f1_score(one, two) == pytest.approx(others.compute_f1(two, one))


# ---- vocabularies ----------------------------------------------------------------------------------------------------

TEXT = "Ranks hold shards, and a rank holds one shard of each of 3 parameters: größer.\n" * 3


def test_byte_pairs(tmp_path):
    words = bert_text.vocabulary_of(None, TEXT, 290)
    ids = words.encode(TEXT)
    assert words.tokenizer.decode(ids) == TEXT and max(ids) < words.pad and len(ids) < len(TEXT) / 2
    assert len(words) == 290 and sorted([words.pad, words.cls, words.sep, words.mask]) == [286, 287, 288, 289]
    words.save(tmp_path / "vocab.json")
    again = bert_text.vocabulary_of(str(tmp_path / "vocab.json"), "", 0)
    assert again.encode(TEXT) == ids and len(again) == 290


WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] rank shard ##s hold ##er , : a 3 of ##f one par ##a ##meter".split()


@pytest.fixture
def vocabulary_file(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return str(tmp_path / "vocab.txt")


def test_word_pieces(vocabulary_file):
    words = bert_text.vocabulary_of(vocabulary_file, "", 0)
    pieces = [WORDS[token] for token in words.encode("Ranks hold: 3 parameters, off holders??")]
    wanted = "rank ##s hold : 3 par ##a ##meter ##s , of ##f hold ##er ##s [UNK] [UNK]"
    assert pieces == wanted.split()
    assert len(words) == len(WORDS) and words.mask == 4
    assert sorted(words.ordinary(lambda count, place=place: place) for place in range(15)) == [*range(5, len(WORDS))]


def test_word_pieces_are_those_of_transformers(vocabulary_file):
    transformers = pytest.importorskip("transformers")
    other = transformers.BertTokenizer(vocabulary_file, do_lower_case=True)
    words = bert_text.vocabulary_of(vocabulary_file, "", 0)
    for text in ("A rank, a shard: 3 of one!", "RANKS holders  off\tparameters paramx", "one-shard (rank)"):
        assert words.encode(text) == other.encode(text, add_special_tokens=False)


def test_a_vocabulary_without_special_tokens(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\none\n")
    with refusing(SystemExit, "vocab.txt", "has no [CLS], [MASK], [SEP], [UNK]"):
        bert_text.vocabulary_of(str(tmp_path / "vocab.txt"), "", 0)


# ---- the model -------------------------------------------------------------------------------------------------------

SMALL = bert.BertConfig(50, 32, 2, 4, 64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def test_the_loss_before_training_is_that_of_guessing():
    torch.manual_seed(0)
    model = bert.BertForPreTraining(SMALL)
    ids, places = torch.randint(0, 50, (4, 16)), torch.tensor([[1, 5, 0]]).repeat(4, 1)
    weights = torch.tensor([[1.0, 1.0, 0.0]]).repeat(4, 1)
    given = [ids, torch.zeros_like(ids), torch.ones_like(ids), places, ids.gather(1, places), weights]
    loss = model(*given, torch.tensor([0, 1, 0, 1]))
    assert loss.item() == pytest.approx(math.log(50) + math.log(2), abs=0.2)
    # Each sample counts the same: the loss is the mean over the samples.
    each = [model(*(one[k : k + 1] for one in given), torch.tensor([k % 2])).item() for k in range(4)]
    assert loss.item() == pytest.approx(sum(each) / 4, abs=1e-5)


def test_padding_changes_nothing():
    torch.manual_seed(0)
    model = bert.BertForQuestionAnswering(SMALL).eval()
    ids = torch.randint(0, 50, (2, 12))
    mask = (torch.arange(12) < 9).long().repeat(2, 1)
    short = model(ids[:, :9], torch.zeros_like(ids[:, :9]), mask[:, :9])[0]
    torch.testing.assert_close(model(ids, torch.zeros_like(ids), mask)[0][:, :9], short, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_checkpoint_of_transformers(kernel, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    other = transformers.BertForQuestionAnswering(transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    )).eval()  # fmt: skip
    torch.save(other.state_dict(), tmp_path / "model.bin")
    make = kernel_layer if kernel else bert.Layer
    model = bert.BertForQuestionAnswering(SMALL, make).eval()
    args = type("", (), {"model_file": str(tmp_path / "model.bin"), "ckpt_type": "HF"})
    bert.load_checkpoint(model, args)
    model.qa_outputs.weight.data = other.qa_outputs.weight.data
    ids, segments = torch.randint(0, 50, (2, 12)), torch.randint(0, 2, (2, 12))
    mask = (torch.arange(12) < 9).long().repeat(2, 1)
    found, wanted = model(ids, segments, mask), other(ids, token_type_ids=segments, attention_mask=mask)
    for mine, theirs in zip(found, (wanted.start_logits, wanted.end_logits)):
        torch.testing.assert_close(mine[:, :9], theirs[:, :9], rtol=1e-4, atol=1e-5)
    args.ckpt_type = "DS"
    with refusing(SystemExit, "do not have the same parameters"):
        bert.load_checkpoint(model, args)


def kernel_layer(config):
    import bert_kernel

    names = {name: False for name in bert_kernel.MEMORY}
    settings = type("", (), {"train_micro_batch_size_per_gpu": 2})
    args = type("", (), {**names, "deepspeed_transformer_kernel": True, "settings": settings, "max_seq_length": 12,
                         "local_rank": -1})  # fmt: skip
    return bert_kernel.make_layer(args)(config)


PLAIN = sorted(pathlib.Path(ROOT, "examples").glob("*/plain.py"))


@pytest.mark.parametrize("plain", PLAIN, ids=lambda path: path.parent.name)
def test_plain_programs_import_no_deepspeed(plain):
    folders, paths, seen = [plain.parent, pathlib.Path(COMMON), plain.parent.parent / "quickstart"], [plain], set()
    while paths:
        modules = {*re.findall(r"^ *(?:import|from) (\w+)", paths.pop().read_text(), re.M)} - seen
        seen |= modules
        paths += [path for module in modules for folder in folders if (path := folder / f"{module}.py").is_file()]
    assert len(PLAIN) >= 7 and "torch" in seen and not {"deepspeed", "bert_kernel"} & seen
