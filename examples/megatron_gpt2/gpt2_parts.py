"""Parts of both GPT-2 programs: flags, text, learning rates, lines of output."""

import argparse
import functools
import glob
import json
import math
import os
import random

import torch

import gpt2_mpu as mpu

TUTORIALS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "tutorials", "*.md")
FLAGS = {
    "--data": dict(metavar="FILE", help='JSON lines {"text": ...}; default: the tutorials of this project'),
    "--model-parallel-size": dict(type=int, default=1, help="ranks that share a model"),
    "--num-layers": dict(type=int, default=2),
    "--hidden-size": dict(type=int, default=128),
    "--num-attention-heads": dict(type=int, default=4),
    "--seq-length": dict(type=int, default=64, help="bytes of a sequence"),
    "--dropout": dict(type=float, default=0.1),
    "--batch-size": dict(type=int, help="sequences of a step on each data-parallel rank"),
    "--train-iters": dict(type=int, default=200, help="steps"),
    "--lr": dict(type=float, default=2e-3, help="largest learning rate"),
    "--lr-decay-iters": dict(type=int, help="steps until the learning rate is zero; default: --train-iters"),
    "--clip-grad": dict(type=float, help="largest norm of the gradient"),
    "--fp16": dict(action="store_true", default=None, help="train in half precision"),
    "--checkpoint-activations": dict(action="store_true", help="compute activations again in the backward pass"),
    "--save": dict(metavar="DIR", help="folder for checkpoints"),
    "--save-interval": dict(type=int, default=0, help="steps between two checkpoints; one is saved at the end, too"),
    "--load": dict(metavar="DIR", help="continue from the last checkpoint in this folder"),
    "--log-interval": dict(type=int, default=20, help="steps between two lines of output"),
    "--seed": dict(type=int, default=1234),
    "--local_rank": dict(type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help="set by the launcher"),
}


def get_argument_parser(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, options in FLAGS.items():
        parser.add_argument(name, **options)
    return parser


def checked(args):
    """The arguments. SystemExit with one line if they contradict each other."""
    heads, size = args.num_attention_heads, args.model_parallel_size
    if args.hidden_size % heads:
        raise SystemExit(f"--hidden-size {args.hidden_size} is not a multiple of --num-attention-heads {heads}")
    if heads % size:
        raise SystemExit(f"--num-attention-heads {heads} is not a multiple of --model-parallel-size {size}")
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    return args


def agree(args, batch_size, clip_grad, fp16):
    """Writes the settings of the configuration into the arguments. SystemExit if a flag has another value."""
    for name, value in (("batch_size", batch_size), ("clip_grad", clip_grad), ("fp16", fp16)):
        if getattr(args, name) not in (None, value):
            flag = "--" + name.replace("_", "-")
            raise SystemExit(f"{flag} {getattr(args, name)}: the configuration says {value}. Leave out the flag.")
        setattr(args, name, value)


def with_defaults(args):
    """The arguments of `plain.py`, which has no configuration."""
    args.batch_size = args.batch_size or 8
    args.clip_grad = 1.0 if args.clip_grad is None else args.clip_grad
    return args


def read_texts(path):
    """The texts of a file of JSON lines. SystemExit with file and line if a line is not one."""
    texts = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                texts.append(json.loads(line)["text"].encode())
            except (ValueError, TypeError, KeyError, AttributeError):
                raise SystemExit(f'{path}: line {number} is not a JSON object with a text: {{"text": "..."}}') from None
    return texts


def made_texts():
    """The tutorials of this project, each a text."""
    texts = []
    for path in sorted(glob.glob(TUTORIALS)):
        with open(path, "rb") as file:
            texts.append(file.read())
    return texts


class Samples:
    """Sequences of bytes of all texts; a zero byte ends a text. Each pass has another order of the sequences."""

    def __init__(self, args):
        texts = read_texts(args.data) if args.data else made_texts()
        data = bytearray(b"\0".join(texts) + b"\0")
        self.args, self.count = args, (len(data) - 1) // args.seq_length
        if not self.count:
            raise SystemExit(f"{args.data}: {len(data)} bytes are too few for --seq-length {args.seq_length}")
        self.tokens = torch.frombuffer(data, dtype=torch.uint8).long()

    def batch(self, iteration):
        """Tokens of a step and their followers on this data-parallel rank."""
        rows, length = self.args.batch_size, self.args.seq_length
        first = (iteration * mpu.get_data_parallel_world_size() + mpu.get_data_parallel_rank()) * rows
        passes = [divmod(number, self.count) for number in range(first, first + rows)]
        places = [order(self.args.seed, epoch, self.count)[place] * length for epoch, place in passes]
        both = torch.stack([self.tokens[place : place + length + 1] for place in places]).to(self.args.device)
        return both[:, :-1], both[:, 1:]


@functools.lru_cache(maxsize=2)
def order(seed, epoch, count):
    """The numbers below ``count`` in the order of a pass over the sequences."""
    return random.Random(f"{seed} {epoch}").sample(range(count), count)


def get_learning_rate_scheduler(args, optimizer):
    """The learning rate grows for a tenth of the steps, then it falls like a cosine."""
    warm = max(1, args.lr_decay_iters // 10)

    def factor(step):
        share = min(1.0, max(0, step - warm) / max(1, args.lr_decay_iters - warm))
        return min(1.0, (step + 1) / warm) * (0.5 + 0.5 * math.cos(math.pi * share))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def begin_step(args, iteration):
    """Dropout depends on seed, step and rank alone, so a resumed run drops what an uninterrupted one does."""
    seed = args.seed + 1000003 * iteration + 100 * mpu.get_data_parallel_rank()
    with mpu.get_cuda_rng_tracker().fork():
        torch.manual_seed(seed + 50 + mpu.get_model_parallel_rank())
    torch.manual_seed(seed)


def report(args, iteration, loss, rate, scale):
    """One line of output in each ``--log-interval`` steps, on rank 0."""
    if torch.distributed.get_rank() == 0 and (iteration % args.log_interval == 0 or iteration == args.train_iters):
        line = f"iteration {iteration}/{args.train_iters} | loss {loss:.4f} | learning rate {rate:.2e} | "
        print(f"{line}loss scale {scale:.1f}", flush=True)


def is_due(args, iteration):
    """Whether a checkpoint is saved after ``iteration`` steps."""
    interval = args.save_interval
    return bool(args.save) and (iteration == args.train_iters or bool(interval) and iteration % interval == 0)


def check_load(folder, found):
    """SystemExit if a checkpoint was not ``found``."""
    if not found:
        raise SystemExit(f"--load {folder}: this folder has no checkpoint")


# ---- checkpoints of plain.py -----------------------------------------------------------------------------------------


def path_of(folder):
    """The path of this rank's slice of the model."""
    return os.path.join(folder, f"mp_rank_{mpu.get_model_parallel_rank():02d}.pt")


def save(folder, state):
    """Writes a slice of the model on one of the ranks that have it."""
    if mpu.get_data_parallel_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save(state, path_of(folder))


def load(folder, device):
    check_load(folder, os.path.isfile(path_of(folder)))
    return torch.load(path_of(folder), map_location=device)
