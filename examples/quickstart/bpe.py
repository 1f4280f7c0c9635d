"""A byte-level BPE tokenizer, trained on the spot, in plain Python.

Byte pair encoding after Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (ACL 2016):
start from bytes, repeatedly join the most frequent neighbouring pair. Pairs never cross the borders of a "word",
so counting and joining happen once for each distinct word and not once for each place where it stands.
"""

import heapq
import re
from collections import Counter, defaultdict

# A line break keeps the indentation that follows it: "\n        " is one word and soon one token, so that the model
# sees the depth of a line as one symbol. The five branches together match every byte.
WORD = re.compile(rb"\n+ *| ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z_0-9]+|[ \t\r\f\v]+")


class Tokenizer:
    """Bytes to token ids (0..vocab_size-1) and back.

    ``merges[k]`` is the pair of ids that token ``256 + k`` joins; the order is the order of learning.
    """

    def __init__(self, merges):
        self.merges = [tuple(pair) for pair in merges]
        self.ranks = {pair: 256 + k for k, pair in enumerate(self.merges)}
        self.pieces = [bytes([b]) for b in range(256)]
        for left, right in self.merges:
            self.pieces.append(self.pieces[left] + self.pieces[right])
        self._known = {}

    @property
    def vocab_size(self):
        return len(self.pieces)

    def _encode_word(self, word):
        ids = list(word)
        while len(ids) > 1:
            # The pair that was learned first is joined first, everywhere: the order in which training saw it.
            rank, pair = min((self.ranks.get(pair, 1 << 30), pair) for pair in zip(ids, ids[1:]))
            if rank == 1 << 30:
                break
            ids = _join(ids, pair, rank)
        return ids

    def encode(self, data):
        """Token ids (list of int) of ``data`` (bytes)."""
        ids = []
        known = self._known
        for word in WORD.findall(data):
            part = known.get(word)
            if part is None:
                part = known[word] = self._encode_word(word)
            ids += part
        return ids

    def decode(self, ids):
        """Text of ``ids``; bytes that are no UTF-8 (a character cut in two) become the replacement character."""
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def _join(ids, pair, new):
    out = []
    i = 0
    last = len(ids) - 1
    while i <= last:
        if i < last and ids[i] == pair[0] and ids[i + 1] == pair[1]:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


def train(data, vocab_size, progress=None):
    """A Tokenizer of ``vocab_size`` tokens (256 or more) learned from ``data`` (bytes).

    ``progress(done, total)`` is called now and then. Deterministic: ties go to the pair with the smaller ids.
    """
    counts = Counter(WORD.findall(data))
    words = [list(word) for word in counts]
    weights = list(counts.values())
    pair_count = defaultdict(int)
    pair_words = defaultdict(set)
    for index, ids in enumerate(words):
        for pair in zip(ids, ids[1:]):
            pair_count[pair] += weights[index]
            pair_words[pair].add(index)
    heap = [(-count, pair) for pair, count in pair_count.items()]
    heapq.heapify(heap)
    merges = []
    total = vocab_size - 256
    while len(merges) < total and heap:
        negative, pair = heapq.heappop(heap)
        count = pair_count[pair]
        if count != -negative:  # the heap keeps old counts: put the current one back and look again
            if count > 0:
                heapq.heappush(heap, (-count, pair))
            continue
        new = 256 + len(merges)
        merges.append(pair)
        grown = set()
        for index in pair_words.pop(pair):
            old = words[index]
            ids = _join(old, pair, new)
            weight = weights[index]
            for gone in zip(old, old[1:]):
                pair_count[gone] -= weight
            for come in zip(ids, ids[1:]):
                pair_count[come] += weight
                pair_words[come].add(index)
                if new in come:
                    grown.add(come)
            words[index] = ids
        for come in grown:
            heapq.heappush(heap, (-pair_count[come], come))
        if progress and len(merges) % 64 == 0:
            progress(len(merges), total)
    return Tokenizer(merges)
