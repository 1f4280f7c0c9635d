"""Arguments and samples of BERT's pre-training: masked words, and whether one part of a text follows another."""

import os
import random
import sys

import torch

import bert_text
import bert_training
from bert_training import (  # noqa: F401
    begin_step,
    for_one_process,
    is_due,
    new_state,
    path_of,
    report,
    schedule_learning_rate,
)  # fmt: skip

FLAGS = {
    "--lr_schedule": dict(choices=("EE", "LE"), help="warm-up and decay: E exponential, L linear"),
    "--lr_offset": dict(type=float, default=0.0, help="added to the learning rate"),
    "--rewarmup": dict(action="store_true", help="a resumed run warms up again"),
}


def get_argument_parser(folder, description):
    return bert_training.get_argument_parser(folder, description, None, FLAGS)


def checked(args):
    """The arguments with the model configuration in them."""
    bert_training.read_model(args)
    if args.rewarmup and not (args.lr_schedule and args.load_training_checkpoint):
        sys.exit("--rewarmup repeats a warm-up: give --lr_schedule and --load_training_checkpoint, too")
    args.sources = [args.data] if args.data else [
        os.path.join(os.path.dirname(args.cf), path) for path in args.model.get("datasets", {}).values() if path
    ]  # fmt: skip
    if not args.sources:
        sys.exit(f"{args.cf} names no datasets: give --data FILE or DIR")
    return args


class Samples:
    """Samples of the text, each a pure function of the seed and its number."""

    def __init__(self, args):
        documents = [document for path in args.sources for document in bert_text.read_documents(path)]
        whole = "\n".join(line for document in documents for line in document)
        self.args, self.vocabulary = args, bert_training.vocabulary_of(args, whole)
        known = {line: self.vocabulary.encode(line) for line in set(whole.split("\n"))}
        self.documents = [[known[line] for line in document] for document in documents]
        self.starts = [(number, line) for number, one in enumerate(documents) for line in range(len(one) - 1)]

    def batch(self, samples, micro_step):
        """The tensors of this rank's part ``micro_step`` of the step that follows ``samples`` samples."""
        rows = [self.sample(number) for number in bert_training.micro_batch(self.args, samples, micro_step)]
        return [torch.stack(column).to(self.args.device) for column in zip(*rows)]

    def save_vocabulary(self):
        """Writes the vocabulary that fine-tuning needs."""
        if self.args.rank == 0 and not self.args.vocab_file:
            self.vocabulary.save(path_of(self.args, "vocab.json"))

    def sample(self, number):
        epoch, place = divmod(number, len(self.starts))
        draw = random.Random(f"{self.args.seed} {epoch} {place}")
        first, second, is_random = self.pair(*bert_training.in_order(self.args, self.starts, number), draw)
        return masked(self.vocabulary, first, second, is_random, self.args.max_seq_length, draw)

    def pair(self, document, line, draw):
        """Tokens of two parts of the text, and 1 if the second one is from another place, else 0."""
        lines, room = self.documents[document], self.args.max_seq_length - 3
        first = list(lines[line])
        while len(first) < room // 2 and line + 2 < len(lines):
            line += 1
            first += lines[line]
        is_random = draw.randrange(2)
        if is_random:
            count = len(self.documents)
            lines = self.documents[(document + 1 + draw.randrange(count - 1)) % count]
            line = draw.randrange(len(lines)) - 1
        second = [token for following in lines[line + 1 :] for token in following]
        first = first[: max(room - len(second), room // 2)]
        return first, second[: room - len(first)], is_random


def masked(words, first, second, is_random, room, draw):
    """The tensors of a sample of ``room`` tokens with two parts. ``draw`` chooses the words that are masked."""
    most = max(1, round(0.15 * room))
    ids = [words.cls, *first, words.sep, *second, words.sep]
    segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
    places = [place for place, token in enumerate(ids) if token not in (words.cls, words.sep)]
    places = sorted(draw.sample(places, min(most, max(1, round(0.15 * len(ids))))))
    labels = [ids[place] for place in places]
    for place in places:
        kind = draw.random()
        ids[place] = words.mask if kind < 0.8 else ids[place] if kind < 0.9 else words.ordinary(draw.randrange)
    filled = lambda values, length, filler=0: torch.tensor(values + [filler] * (length - len(values)))
    return (
        filled(ids, room, words.pad), filled(segments, room), filled([1] * len(ids), room), filled(places, most),
        filled(labels, most), filled([1.0] * len(places), most, 0.0), torch.tensor(is_random),
    )  # fmt: skip
