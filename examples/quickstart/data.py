"""The corpus: the source of Python's standard library, as found on this machine, as token ids.

Whole files are held out for evaluation (about one in sixteen, by a checksum of the file's name, so the choice is the
same on every machine and in every run). Tokenizer and tokens are cached; another Python release makes a new cache.
"""

import glob
import hashlib
import json
import os
import sysconfig
import time
import zlib

import numpy
import torch

import bpe

VOCAB_SIZE = 4096
SAMPLE_BYTES = 2_500_000  # the tokenizer learns from this much of the training text
HELD_OUT_ONE_IN = 16
# Tables, generated text and other programs' tests: nothing a model of Python code should spend its time on.
LEFT_OUT = ("/test/", "/tests/", "/encodings/", "/pydoc_data/", "/lib2to3/", "/site-packages/", "/dist-packages/")
LEFT_OUT += ("/stringprep.py", "/html/entities.py", "/re/_casefix.py", "/_sysconfigdata_", "/locale.py")


def corpus_files():
    """Paths of the corpus, sorted: Debian's newest standard library, else that of the running Python."""
    folders = [f for f in glob.glob("/usr/lib/python3.*") if os.path.exists(os.path.join(f, "typing.py"))]
    folder = max(folders, key=lambda f: int(f.rsplit(".", 1)[1])) if folders else sysconfig.get_paths()["stdlib"]
    found = glob.glob(os.path.join(glob.escape(folder), "**", "*.py"), recursive=True)
    return folder, sorted(path for path in found if not any(part in path[len(folder) :] for part in LEFT_OUT))


def is_held_out(name):
    return zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0


def read(path):
    with open(path, "rb") as file:
        return file.read()


class Corpus:
    """``train`` and ``held_out``: one-dimensional uint16 arrays of token ids; ``tokenizer``; ``text_bytes``."""

    def __init__(self, folder):
        with open(os.path.join(folder, "corpus.json"), encoding="utf-8") as file:
            self.about = json.load(file)
        self.tokenizer = bpe.Tokenizer(self.about["merges"])
        self.train = numpy.load(os.path.join(folder, "train.npy"), mmap_mode="r")
        self.held_out = numpy.load(os.path.join(folder, "held_out.npy"), mmap_mode="r")

    def batch(self, step, rank, rows, context):
        """Inputs and targets, int64 [rows, context], of this rank's micro-batch number ``step``.

        A pure function of (step, rank): a resumed run sees exactly the data that an uninterrupted one would.
        """
        random = numpy.random.default_rng([1234, rank, step])
        return self._windows(self.train, random.integers(0, len(self.train) - context - 1, rows), context)

    def held_out_batches(self, rank, ranks, rows, context, batches):
        """The evaluation windows of this rank: evenly spread over the held-out text, the same in every run."""
        starts = numpy.linspace(0, len(self.held_out) - context - 2, ranks * batches * rows).astype(int)[rank::ranks]
        for i in range(batches):
            yield self._windows(self.held_out, starts[i * rows : (i + 1) * rows], context)

    @staticmethod
    def _windows(tokens, starts, context):
        rows = numpy.stack([tokens[s : s + context + 1] for s in starts]).astype(numpy.int64)
        rows = torch.from_numpy(rows)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def cache_folder(root):
    """The file in which the corpus of this machine's Python is cached: the name changes with the files and with this
    code."""
    folder, paths = corpus_files()
    key = hashlib.sha256()
    for path in paths:
        key.update(f"{path[len(folder) :]}:{os.path.getsize(path)}\n".encode())
    for source in (__file__, bpe.__file__):
        key.update(read(source))
    return os.path.join(root, key.hexdigest()[:16])


def build(target, say):
    """Trains the tokenizer, encodes the corpus and writes the folder ``target`` (all of it, or nothing)."""
    folder, paths = corpus_files()
    if len(paths) < 100:
        raise SystemExit(
            f"quickstart trains on the source of Python's standard library and found only {len(paths)} files of it in "
            f"{folder}. On Debian: apt-get install libpython3-stdlib."
        )
    train = [path for path in paths if not is_held_out(path[len(folder) + 1 :])]
    held_out = [path for path in paths if is_held_out(path[len(folder) + 1 :])]
    started = time.time()
    # A sample from all over the library: every k-th file, for the smallest k that stays under SAMPLE_BYTES.
    stride = max(1, -(-sum(os.path.getsize(path) for path in train) // SAMPLE_BYTES))
    tokenizer = bpe.train(b"\n".join(read(path) for path in train[::stride]), VOCAB_SIZE)
    say(f"tokenizer: {tokenizer.vocab_size} tokens learned in {time.time() - started:.1f} s")
    started = time.time()
    about = {"folder": folder, "merges": tokenizer.merges}
    scratch = f"{target}.{os.getpid()}"
    os.makedirs(scratch, exist_ok=True)
    for name, part in (("train", train), ("held_out", held_out)):
        text = b"\n\n".join(read(path) for path in part)
        ids = numpy.array(tokenizer.encode(text), dtype=numpy.uint16)
        numpy.save(os.path.join(scratch, name + ".npy"), ids)
        about[name] = {"files": len(part), "bytes": len(text), "tokens": len(ids)}
    with open(os.path.join(scratch, "corpus.json"), "w", encoding="utf-8") as file:
        json.dump(about, file)
    os.replace(scratch, target)
    say(f"corpus: {about['train']['bytes'] / 1e6:.1f} MB of {folder} encoded in {time.time() - started:.1f} s")
