"""The corpus: held-out files stay out, batches are a pure function of step and rank."""

import os

import pytest

import bpe
import data


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus of a small made-up library, built by the code that builds the real one."""
    library = tmp_path_factory.mktemp("library")
    for i in range(300):
        (library / f"module_{i}.py").write_text(f"def function_{i}(x):\n    return x + {i}\n" * 5)
    target = tmp_path_factory.mktemp("cache") / "corpus"
    patch = pytest.MonkeyPatch()
    paths = sorted(str(path) for path in library.iterdir())
    patch.setattr(data, "corpus_files", lambda: (str(library), paths))
    patch.setattr(data, "VOCAB_SIZE", 300)
    data.build(str(target), lambda text: None)
    patch.undo()
    return data.Corpus(str(target)), [p for p in paths if data.is_held_out(os.path.basename(p))]


def test_split_is_by_whole_files(corpus):
    corpus, held_out = corpus
    assert corpus.about["held_out"]["files"] == len(held_out) > 5
    text = corpus.tokenizer.decode(corpus.train.tolist())
    for path in held_out:
        number = path.rsplit("_", 1)[1][:-3]
        assert f"function_{number}(" not in text
        assert f"function_{number}(" in corpus.tokenizer.decode(corpus.held_out.tolist())


def test_batches_repeat_and_differ(corpus):
    corpus, _ = corpus
    x, y = corpus.batch(3, 1, 4, 16)
    assert x.shape == y.shape == (4, 16) and (x[:, 1:] == y[:, :-1]).all()
    again, _ = corpus.batch(3, 1, 4, 16)
    assert (x == again).all()
    assert not any((x == other).all() for other in (corpus.batch(4, 1, 4, 16)[0], corpus.batch(3, 0, 4, 16)[0]))


def test_held_out_windows_are_shared_out(corpus):
    corpus, _ = corpus
    alone = [x for x, _ in corpus.held_out_batches(0, 1, 4, 16, 2)]
    both = [x for rank in (0, 1) for x, _ in corpus.held_out_batches(rank, 2, 4, 16, 1)]
    rows = lambda batches: sorted(tuple(row.tolist()) for batch in batches for row in batch)
    assert rows(alone) == rows(both)


def test_the_real_corpus_of_this_machine_is_there():
    folder, paths = data.corpus_files()
    assert len(paths) > 200, folder
    assert not any("/test/" in path[len(folder) :] or "site-packages" in path[len(folder) :] for path in paths)
    assert 0.02 < len([path for path in paths if data.is_held_out(path[len(folder) + 1 :])]) / len(paths) < 0.15


def test_the_cache_follows_the_code(tmp_path, monkeypatch):
    before = data.cache_folder(str(tmp_path))
    assert before == data.cache_folder(str(tmp_path))
    source = tmp_path / "bpe.py"
    source.write_text("# other code")
    monkeypatch.setattr(bpe, "__file__", str(source))
    assert data.cache_folder(str(tmp_path)) != before
