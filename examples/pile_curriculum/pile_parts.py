"""Parts of the programs: flags, tokens of a text in the format of the Pile, samples, models, learning rates."""

import argparse
import glob
import itertools
import json
import math
import os
import random
import re
import sys

import numpy
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLES = os.path.dirname(HERE)
sys.path += [os.path.join(EXAMPLES, name) for name in ("common", "quickstart")]

import bert  # noqa: E402
import bert_text  # noqa: E402
import pretraining  # noqa: E402
from bert import groups_of  # noqa: E402, F401
from bert_training import add_flags, begin_step  # noqa: E402, F401
from model import GPT, Shape  # noqa: E402

DATA = {
    "--model": dict(choices=("bert", "gpt"), default="bert"),
    "--data": dict(metavar="PATH", help='JSON lines {"text": ...}: a file, or a folder of *.jsonl; or out/tokens'),
    "--out": dict(metavar="DIR", default=os.path.join(HERE, "out"), help="folder for tokens and the analysis"),
    "--seq-length": dict(type=int, default=64, help="tokens of the longest sample"),
    "--vocab-size": dict(type=int, default=1024, help="tokens of the vocabulary, which is learned from the text"),
}
TRAINING = {
    "--num-layers": dict(type=int, default=2),
    "--hidden-size": dict(type=int, default=64),
    "--num-attention-heads": dict(type=int, default=4),
    "--dropout": dict(type=float, help="of BERT; default: 0.1"),
    "--lr": dict(type=float, default=3e-3, help="largest learning rate"),
    "--train-tokens": dict(type=int, default=400_000, help="the training ends when it has consumed these tokens"),
    "--lr-warmup-tokens": dict(type=int, default=40_000, help="tokens in which the learning rate grows from zero"),
    "--lr-decay-tokens": dict(type=int, help="tokens until the learning rate is zero; default: --train-tokens"),
    "--save": dict(metavar="PATH", help="save checkpoints: a file, or a folder of ds.py"),
    "--save-interval": dict(type=int, default=100, help="steps between two checkpoints; one is saved at the end, too"),
    "--load": dict(metavar="PATH", help="continue from a checkpoint"),
    "--log-interval": dict(type=int, default=20, help="steps between two lines of output"),
    "--seed": dict(type=int, default=1234),
    "--local_rank": dict(type=int, default=-1, help="set by the launcher"),
}
PLAIN = {
    "--batch-size": dict(type=int, default=32, help="samples of a step"),
    "--gradient-accumulation-steps": dict(type=int, default=1, help="parts of a step"),
    "--clip-grad": dict(type=float, default=1.0, help="largest norm of the gradient"),
}


def get_argument_parser(description, flags):
    kind = argparse.RawDescriptionHelpFormatter
    return add_flags(argparse.ArgumentParser(description=description, formatter_class=kind), {**DATA, **flags})


def checked(args):
    """The arguments of a training. SystemExit with one line if they contradict each other."""
    args.lr_decay_tokens = args.lr_decay_tokens or args.train_tokens
    for wrong, text in (
        (args.hidden_size % args.num_attention_heads, "--hidden-size must be a multiple of --num-attention-heads"),
        (args.dropout and args.model == "gpt", "--dropout: the GPT of the quickstart has none. Leave the flag out."),
        (args.lr_decay_tokens <= args.lr_warmup_tokens, "--lr-decay-tokens must be more than --lr-warmup-tokens"),
        (min(args.log_interval, args.save_interval) < 1, "--log-interval and --save-interval must be 1 or more"),
        (args.load and not os.path.exists(args.load), f"--load {args.load}: this checkpoint does not exist"),
    ):
        if wrong:
            sys.exit(text)
    return args


# ---- tokens and samples ----------------------------------------------------------------------------------------------


def read_texts(path):
    """The texts of files in the format of the Pile. SystemExit with file and line if a line does not have one."""
    for name in sorted(glob.glob(os.path.join(glob.escape(path), "*.jsonl"))) if os.path.isdir(path) else [path]:
        for number, line in enumerate(bert_text.read_text(name).rstrip("\n").split("\n"), 1):
            try:
                yield json.loads(line)["text"].strip()
            except (ValueError, TypeError, KeyError, AttributeError):
                sys.exit(f'{name}:{number}: this is not a JSON object with a text: {{"text": "...", "meta": ...}}')


def read_data(args):
    """The vocabulary, the tokens of all paragraphs of the text, and the samples. The token [SEP] ends a paragraph."""
    if os.path.exists(f"{args.data}.bin"):  # analyse.py has written it
        words = bert_text.vocabulary_of(f"{args.data}.json", "", 0)
        tokens = torch.from_numpy(numpy.fromfile(f"{args.data}.bin", "<u2").astype(numpy.int64))
    else:
        tutorials = sorted(glob.glob(os.path.join(EXAMPLES, "..", "docs", "tutorials", "*.md")))
        texts = read_texts(args.data) if args.data else map(bert_text.read_text, tutorials)
        parts = [part for text in texts for part in re.split(r"\n\s*\n", text) if part.strip()]
        words = bert_text.vocabulary_of(None, "\n".join(parts)[:2_500_000], args.vocab_size)
        tokens = torch.tensor([token for part in parts for token in (*words.encode(part), words.sep)])
    if not 16 <= args.seq_length < len(tokens):
        bound = f"the {len(tokens)} tokens of --data {args.data}"
        sys.exit(f"--seq-length {args.seq_length} must be 16 or more, and less than {bound}")
    return words, tokens, Samples(args, words, tokens)


def paragraphs_of(words, tokens):
    return tokens.tensor_split((tokens == words.sep).nonzero().flatten() + 1)[:-1]


class Samples(torch.utils.data.Dataset):
    """Samples of one of the models; ``texts`` has their tokens.

    BERT gets paragraphs, in pieces that fit into ``--seq-length``. It guesses masked words, and whether the two halves
    of a piece have changed places. GPT gets sequences of ``--seq-length`` tokens, and the tokens that follow them.
    """

    def __init__(self, args, words, tokens):
        self.args, self.words, room = args, words, args.seq_length - 3
        if args.model == "gpt":
            self.texts = list(tokens.unfold(0, args.seq_length + 1, args.seq_length))
        else:
            pieces = (piece for paragraph in paragraphs_of(words, tokens) for piece in paragraph[:-1].split(room))
            self.texts = [piece for piece in pieces if len(piece) >= 8]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, number):
        text, draw = self.texts[number], random.Random(f"{self.args.seed} {number}")
        if self.args.model == "gpt":
            return text[:-1], text[1:]
        halves, swapped = [half.tolist() for half in text.tensor_split(2)], draw.randrange(2)
        return pretraining.masked(self.words, halves[swapped], halves[1 - swapped], swapped, self.args.seq_length, draw)


def order(args, count, steps):
    """Numbers of the samples of each batch after ``steps`` steps, in the order of DeepSpeed's loader: each pass
    shuffles all samples, and leaves out those that do not fill a batch."""
    rows = args.batch_size // args.gradient_accumulation_steps
    if args.batch_size % args.gradient_accumulation_steps or not 0 < rows <= count:
        sys.exit(f"--batch-size must be a multiple of --gradient-accumulation-steps; the text has {count} samples")
    for epoch, place in (divmod(number, count // rows) for number in itertools.count(steps * args.batch_size // rows)):
        whole = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        yield whole[place * rows :][:rows].tolist()


def cut(batch, state):
    """The batch with the length that a curriculum over ``seqlen`` has reached."""
    length = state.get("current_difficulties", {}).get("seqlen")
    return [one[:, :length] for one in batch[:3]] + batch[3:]


def count_tokens(batch):
    """The effective length of a batch: its tokens without padding."""
    return batch[0].numel() if len(batch) == 2 else int(batch[2].sum())


# ---- training --------------------------------------------------------------------------------------------------------


def model_of(args, words):
    layers, heads, width = args.num_layers, args.num_attention_heads, args.hidden_size
    if args.model == "gpt":
        return GPT(Shape(len(words), args.seq_length, layers, heads, width))
    rates = [0.1 if args.dropout is None else args.dropout] * 2
    sizes = len(words), width, layers, heads, 4 * width, "gelu", *rates, args.seq_length
    return bert.BertForPreTraining(bert.BertConfig(*sizes, pre_layer_norm=True))


def set_learning_rate(args, optimizer, consumed):
    """The learning rate grows in proportion to the consumed tokens, then it falls like a cosine."""
    warm = max(1, args.lr_warmup_tokens)
    share = min(1.0, max(0, consumed - warm) / (args.lr_decay_tokens - warm))
    for group in optimizer.param_groups:
        group["lr"] = args.lr * min(1.0, consumed / warm) * (0.5 + 0.5 * math.cos(math.pi * share))


def report(args, state, loss, optimizer, batch):
    """One line of output in each ``--log-interval`` steps, with the loss of this rank. Returns whether a checkpoint is
    due."""
    step, tokens, rate = state["steps"], state["consumed_tokens"], optimizer.param_groups[0]["lr"]
    ended, length = tokens >= args.train_tokens, batch[0].shape[1]
    if args.rank == 0 and (ended or step % args.log_interval == 0):
        print(f"step {step}: loss {loss:.4f}, lr {rate:.2e}, seqlen {length}, consumed_tokens {tokens}", flush=True)
    return args.save and (ended or step % args.save_interval == 0)
