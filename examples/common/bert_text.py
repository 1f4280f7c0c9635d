"""Tokens of text: byte pairs that are learned from the text itself, or a vocabulary of WordPiece in a file."""

import importlib.util
import json
import os
import re
import sys

_BPE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "quickstart", "bpe.py")
_SPEC = importlib.util.spec_from_file_location("quickstart_bpe", _BPE)
bpe = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bpe)

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
PIECE = re.compile(r"\w+|[^\w\s]")


class Vocabulary:
    """Byte pairs of the quickstart, and the special tokens behind them."""

    def __init__(self, tokenizer):
        self.tokenizer, self.first_special = tokenizer, tokenizer.vocab_size
        self.pad, self.cls, self.sep, self.mask = (self.first_special + number for number in range(len(SPECIAL)))

    def __len__(self):
        return self.first_special + len(SPECIAL)

    def ordinary(self, choose):
        """A token that is not a special one; ``choose(n)`` is a number below n."""
        return choose(self.first_special)

    def encode(self, text):
        return self.tokenizer.encode(text.encode())

    def save(self, path):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"merges": self.tokenizer.merges}, file)


class WordPiece:
    """The lower-case tokens of a file ``vocab.txt``, one in each line, as published with BERT."""

    def __init__(self, path):
        words = read_text(path).split("\n")
        self.ids = {word: number for number, word in reversed(list(enumerate(words))) if word}
        self.size = len(words) - (words[-1] == "")
        missing = sorted({*SPECIAL, "[UNK]"} - set(self.ids))
        if missing:
            sys.exit(f"{path}: the vocabulary has no {', '.join(missing)}")
        self.pad, self.cls, self.sep, self.mask = (self.ids[word] for word in SPECIAL)
        self.plain = [number for word, number in self.ids.items() if not word.startswith("[")]

    def __len__(self):
        return self.size

    def ordinary(self, choose):
        return self.plain[choose(len(self.plain))]

    def encode(self, text):
        return [number for word in PIECE.findall(text.lower()) for number in self._word(word)]

    def _word(self, word):
        found, start = [], 0
        while start < len(word):
            mark = "##" if start else ""
            end = next((end for end in range(len(word), start, -1) if mark + word[start:end] in self.ids), None)
            if end is None:
                return [self.ids["[UNK]"]]
            found.append(self.ids[mark + word[start:end]])
            start = end
        return found


def vocabulary_of(path, text, size):
    """The vocabulary of the file ``path`` (JSON that ``save`` wrote, else WordPiece); without a path at most ``size``
    tokens that are learned from ``text``."""
    if not path:
        return Vocabulary(bpe.train(text.encode(), max(256, size - len(SPECIAL))))
    if not path.endswith(".json"):
        return WordPiece(path)
    try:
        return Vocabulary(bpe.Tokenizer(json.loads(read_text(path))["merges"]))
    except (ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}:{getattr(error, 'lineno', 1)}: this is not a vocabulary: {error!r}")


def read_text(path):
    """The text of a file of UTF-8; the program ends with its name and line where it has none."""
    try:
        with open(path, "rb") as file:
            data = file.read()
        return data.decode()
    except UnicodeDecodeError as error:
        sys.exit(f"{path}:{data.count(10, 0, error.start) + 1}: this is not UTF-8 text: byte {data[error.start]:#04x}")
    except OSError as error:
        sys.exit(f"{path}: the file cannot be read: {error.strerror}")


def read_documents(path):
    """Documents, each a list of at least two lines. ``path`` is a file or a folder of *.txt and *.md; an empty line
    ends a document."""
    paths = [path]
    if os.path.isdir(path):
        paths = [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith((".txt", ".md"))]
    blocks = (block for one in paths for block in re.split(r"\n\s*\n", read_text(one)))
    documents = [lines for block in blocks if len(lines := [line for line in block.splitlines() if line.strip()]) > 1]
    if len(documents) < 2:
        sys.exit(
            f"{path}:1: pre-training needs two documents of two lines or more, with an empty line between them, and "
            f"found {len(documents)}"
        )
    return documents
