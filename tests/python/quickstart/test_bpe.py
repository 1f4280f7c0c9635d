"""The tokenizer against a slow, obvious one; every byte string survives the round trip."""

import random
from collections import Counter

import bpe

TEXT = (
    b"""
def merge(left, right):
    result = []
    while left and right:
        result.append(left.pop(0) if left[0] < right[0] else right.pop(0))
    return result + left + right

class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
"""
    * 3
)


def slow_merges(data, count):
    """BPE as in the paper, recounting everything at each step."""
    words = [list(word) for word in bpe.WORD.findall(data)]
    merges = []
    for _ in range(count):
        pairs = Counter(pair for ids in words for pair in zip(ids, ids[1:]))
        pair = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(pair)
        words = [bpe._join(ids, pair, 255 + len(merges)) for ids in words]
    return merges


def test_training_equals_the_slow_one():
    assert bpe.train(TEXT, 256 + 40).merges == slow_merges(TEXT, 40)


def test_words_cover_every_byte():
    data = bytes(range(256)) * 2 + b"\r\n\t  x\n\n    y\x85\xa0"
    assert b"".join(bpe.WORD.findall(data)) == data


def test_round_trip_of_any_bytes():
    tokenizer = bpe.train(TEXT, 320)
    shuffled = random.Random(0)
    for length in (0, 1, 2, 7, 500):
        data = bytes(shuffled.randrange(256) for _ in range(length))
        ids = tokenizer.encode(data)
        assert b"".join(tokenizer.pieces[i] for i in ids) == data and all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(tokenizer.encode("naïve → ok".encode())) == "naïve → ok"


def test_encoding_is_shorter_and_repeats_training():
    tokenizer = bpe.train(TEXT, 400)
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 2.5
    again = bpe.Tokenizer([list(pair) for pair in tokenizer.merges])  # as read back from JSON
    assert again.encode(TEXT) == tokenizer.encode(TEXT)


def test_a_text_with_few_pairs_ends_early():
    tokenizer = bpe.train(b"aaaa", 1000)
    assert tokenizer.vocab_size < 260 and tokenizer.decode(tokenizer.encode(b"aaaaa")) == "aaaaa"
