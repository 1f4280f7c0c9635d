"""Arguments, samples and predictions of questions in the format of SQuAD 1.1."""

import collections
import json
import os
import sys

import torch

import bert_text
import bert_training
import squad_metrics
from bert_training import begin_step, config_of, for_one_process, is_due, new_state, path_of, report  # noqa: F401

Question = collections.namedtuple("Question", "id text context answers")
Window = collections.namedtuple("Window", "question ids segments first pieces start end")


FLAGS = {
    **bert_training.FINE_TUNING,
    "--train_file": dict(help="questions to train with; default: --data, or train-v1.1.json in that folder"),
    "--predict_file": dict(help="questions to answer; default: --data, or dev-v1.1.json in that folder"),
    "--max_query_length": dict(type=int, default=64, help="tokens of a question; the rest is cut off"),
    "--doc_stride": dict(type=int, default=32, help="tokens between the beginnings of two windows of a long text"),
    "--max_answer_length": dict(type=int, default=30, help="tokens of an answer"),
}


def get_argument_parser(folder, description):
    return bert_training.get_argument_parser(folder, description, os.path.join("data", "questions.json"), FLAGS)


def checked(args):
    """The arguments with the model configuration in them."""
    bert_training.read_fine_tuning(args)
    if args.max_query_length + 4 > args.max_seq_length:
        sys.exit(f"--max_query_length {args.max_query_length} leaves no room in --max_seq_length {args.max_seq_length}")
    names = ("train-v1.1.json", "dev-v1.1.json") if os.path.isdir(args.data) else ("", "")
    found = [os.path.join(args.data, name) if name else args.data for name in names]
    args.train_file, args.predict_file = args.train_file or found[0], args.predict_file or found[1]
    return args


def read_questions(path):
    """The questions of a file, and its ``data``. The program ends with file and line where the file is wrong."""
    source, found, last = bert_text.read_text(path), [], "{"
    try:
        dataset = json.loads(source)["data"]
        for paragraph in (paragraph for article in dataset for paragraph in article["paragraphs"]):
            for qa in paragraph["qas"]:
                last = json.dumps(qa["id"])
                answers = [(answer["answer_start"], answer["text"]) for answer in qa["answers"]]
                found.append(Question(qa["id"], qa["question"], paragraph["context"], answers))
                for start, words in answers:
                    if not words or paragraph["context"][start : start + len(words)] != words:
                        raise ValueError(f"question {last}: character {start} of its context does not begin {words!r}")
                if not answers:
                    raise ValueError(f"question {last} has no answers")
    except json.JSONDecodeError as error:
        sys.exit(f"{path}:{error.lineno}: this is not JSON: {error.msg}")
    except (KeyError, TypeError) as error:
        sys.exit(f"{line_of(path, source, last)}: this is not SQuAD 1.1 near {last}: {error!r}")
    except ValueError as error:
        sys.exit(f"{line_of(path, source, last)}: {error}")
    if not found:
        sys.exit(f"{path}:1: the file has no questions")
    return found, dataset


def line_of(path, source, words):
    return f"{path}:{source.count(chr(10), 0, max(0, source.find(words))) + 1}"


class Questions:
    """Windows over the contexts of all questions, as tensors."""

    def __init__(self, args):
        self.args = args
        self.train, _ = read_questions(args.train_file)
        self.predict, self.dataset = read_questions(args.predict_file)
        whole = "\n".join(dict.fromkeys(part for one in self.train for part in (one.context, one.text)))
        self.vocabulary = bert_training.vocabulary_of(args, whole)
        self.windows = [window for question in self.train for window in self.windows_of(question)]

    def steps(self):
        """The steps of ``--num_train_epochs`` passes, where ``--max_steps`` is not given."""
        return bert_training.steps_of(self.args, len(self.windows))

    def windows_of(self, question):
        """Windows of at most ``--max_seq_length`` tokens: the question and a part of its context."""
        args, words, context = self.args, self.vocabulary, question.context
        asked = words.encode(question.text)[: args.max_query_length]
        pieces = [piece.span() for piece in bert_text.PIECE.finditer(context)]
        tokens = [
            (token, piece)
            for piece, (start, end) in enumerate(pieces)
            for token in words.encode(context[start - context[start - 1 : start].isspace() : end])
        ]
        start, answer = question.answers[0]
        inside = [pieces[piece][1] > start and pieces[piece][0] < start + len(answer) for _, piece in tokens]
        first, last = inside.index(True), len(inside) - 1 - inside[::-1].index(True)
        room, head = args.max_seq_length - len(asked) - 3, [words.cls, *asked, words.sep]
        for begin in range(0, max(1, len(tokens) - room + args.doc_stride), args.doc_stride):
            part = tokens[begin : begin + room]
            whole, shift = begin <= first and last < begin + len(part), len(head) - begin
            yield Window(
                question,
                [*head, *(token for token, _ in part), words.sep],
                [0] * len(head) + [1] * (len(part) + 1),
                len(head),
                [pieces[piece] for _, piece in part],
                *((first + shift, last + shift) if whole else (0, 0)),
            )

    def tensors(self, windows):
        """input_ids, segment_ids, input_mask, start_positions and end_positions of windows."""
        room, pad = self.args.max_seq_length, self.vocabulary.pad
        rows = [
            (
                one.ids + [pad] * (room - len(one.ids)),
                one.segments + [0] * (room - len(one.ids)),
                [1] * len(one.ids) + [0] * (room - len(one.ids)),
                one.start,
                one.end,
            )
            for one in windows
        ]
        return [torch.tensor(column, device=self.args.device) for column in zip(*rows)]

    def batch(self, samples, micro_step):
        """The tensors of this rank's part ``micro_step`` of the step that follows ``samples`` samples."""
        return self.tensors(map(self.window, bert_training.micro_batch(self.args, samples, micro_step)))

    def window(self, number):
        return bert_training.in_order(self.args, self.windows, number)


@torch.no_grad()
def predict(args, model, questions):
    """Writes ``predictions.json`` and says how good they are. Every rank calls it and answers all questions."""
    model.eval()
    windows, best = [one for question in questions.predict for one in questions.windows_of(question)], {}
    room = args.max_seq_length
    spans = torch.ones(room, room, dtype=torch.bool).triu().tril(args.max_answer_length - 1)
    for begin in range(0, len(windows), args.predict_batch_size):
        part = windows[begin : begin + args.predict_batch_size]
        for window, start, end in zip(part, *(one.cpu() for one in model(*questions.tensors(part)[:3]))):
            last = window.first + len(window.pieces)
            scores = (start[:, None] + end[None]).masked_fill(~spans, float("-inf"))[window.first : last, : last]
            place = int(scores.argmax())
            start, end, score = place // last, place % last - window.first, float(scores.max())
            words = window.question.context[window.pieces[start][0] : window.pieces[end][1]]
            best[window.question.id] = max(best.get(window.question.id, (float("-inf"), "")), (score, words))
    predictions = {name: words for name, (_, words) in best.items()}
    scores = squad_metrics.evaluate(questions.dataset, predictions)
    if args.rank == 0:
        with open(path_of(args, "predictions.json"), "w", encoding="utf-8") as file:
            json.dump(predictions, file, indent=1)
        print(json.dumps(scores))
    return scores
