"""Arguments, samples, predictions and metrics of two tasks of GLUE: SST-2 (one sentence) and MRPC (two sentences)."""

import collections
import json
import os
import sys

import torch

import bert_text
import bert_training
from bert_training import begin_step, config_of, for_one_process, is_due, path_of, report, steps_of  # noqa: F401

# The header of the files of each task, and the columns of the label and of the sentences.
TASKS = {
    "SST-2": ("sentence\tlabel", 1, [0]),
    "MRPC": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", 0, [3, 4]),
}
FLAGS = {
    "--task_name": dict(choices=TASKS, default="SST-2", help="SST-2: good or bad; MRPC: the same meaning or not"),
    **bert_training.FINE_TUNING,
}
Sample = collections.namedtuple("Sample", "sentences label")


def get_argument_parser(folder, description):
    return bert_training.get_argument_parser(folder, description, "data", FLAGS)


def checked(args):
    """The arguments with the model configuration in them, and the folder of the task in ``args.data``."""
    bert_training.read_fine_tuning(args)
    inside = "" if os.path.isfile(os.path.join(args.data, "train.tsv")) else args.task_name
    args.data = os.path.join(args.data, inside)
    return args


def read_samples(path, task):
    """The samples of a file. The program ends with file and line where the file is wrong."""
    header, label, places = TASKS[task]
    lines = bert_text.read_text(path).lstrip("\ufeff").replace("\r\n", "\n").rstrip("\n").split("\n")
    rows, count = [[part.strip() for part in line.split("\t")] for line in lines], header.count("\t") + 1
    for number, parts in enumerate(rows, 1):
        wrong = (
            number == 1 and lines[0] != header and f"the header is {lines[0]!r}; {task} has {header!r}"
            or len(lines) == 1 and "the file has no sentences"
            or len(parts) != count and f"the line has {len(parts)} columns; {task} has {count}"
            or number > 1 and parts[label] not in ("0", "1") and f"the label is {parts[label]!r}; it is 0 or 1"
            or not all(parts[place] for place in places) and "a sentence is empty"
        )  # fmt: skip
        if wrong:
            sys.exit(f"{path}:{number}: {wrong}")
    return [Sample([parts[place] for place in places], int(parts[label])) for parts in rows[1:]]


class Samples:
    """The samples of both files of the task, as tensors."""

    def __init__(self, args):
        self.args = args
        self.train, self.dev = (
            read_samples(os.path.join(args.data, name), args.task_name) for name in ("train.tsv", "dev.tsv")
        )
        whole = "\n".join(sentence for sample in self.train for sentence in sample.sentences)
        self.vocabulary = bert_training.vocabulary_of(args, whole)

    def row(self, sample):
        """Tokens, segments and mask of a sample. The longest sentence loses its end where the sample is too long."""
        words, room = self.vocabulary, self.args.max_seq_length
        parts = [words.encode(sentence) + [words.sep] for sentence in sample.sentences]
        while sum(map(len, parts)) >= room:
            del max(parts, key=len)[-2]
        ids = [words.cls, *(token for part in parts for token in part)]
        first, padding = 1 + len(parts[0]), [0] * (room - len(ids))
        segments = [0] * first + [1] * (len(ids) - first) + padding
        return ids + [words.pad] * len(padding), segments, [1] * len(ids) + padding, sample.label

    def tensors(self, samples):
        """input_ids, segment_ids, input_mask and labels of samples."""
        return [torch.tensor(column, device=self.args.device) for column in zip(*map(self.row, samples))]

    def batch(self, step, micro_step):
        """The tensors of this rank's part ``micro_step`` of a step."""
        return self.tensors(
            bert_training.in_order(self.args, self.train, number)
            for number in bert_training.micro_batch(self.args, step * self.args.train_batch_size, micro_step)
        )


def metrics_of(task, labels, predictions):
    """The share of right predictions and, for MRPC, the F1 of class 1: the harmonic mean of precision and recall."""
    acc = sum(label == found for label, found in zip(labels, predictions)) / len(labels)
    f1 = 2 * sum(label * found for label, found in zip(labels, predictions)) / max(1, sum(labels) + sum(predictions))
    return {"acc": acc} if task == "SST-2" else {"acc": acc, "f1": f1, "acc_and_f1": (acc + f1) / 2}


@torch.no_grad()
def predict(args, model, samples, all_reduce=None):
    """Writes ``predictions.tsv`` and says how good they are. Every rank calls it and predicts its share of ``dev.tsv``.
    ``all_reduce`` adds the shares up. A rank whose share has ended repeats a sample, so that all ranks call the model
    equally often."""
    model.eval()
    found = torch.zeros(len(samples.dev), dtype=torch.long, device=args.device)
    rows = args.predict_batch_size * args.world_size
    for begin in range(0, len(found), rows):
        share = range(begin + args.rank, min(begin + rows, len(found)), args.world_size)
        scores = model(*samples.tensors(samples.dev[place] for place in share or [0])[:3])
        found[list(share)] = scores.argmax(1)[: len(share)]
    if all_reduce:
        all_reduce(found)
    predictions = found.tolist()
    scores = metrics_of(args.task_name, [sample.label for sample in samples.dev], predictions)
    if args.rank == 0:
        with open(path_of(args, "predictions.tsv"), "w", encoding="utf-8") as file:
            file.writelines(["index\tprediction\n", *(f"{place}\t{one}\n" for place, one in enumerate(predictions))])
        print(json.dumps(scores))
    return scores
