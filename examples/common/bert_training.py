"""Flags, learning rates and output that the BERT programs have in common."""

import argparse
import functools
import os
import random
import sys
import zlib

import torch

import bert
import bert_text

FLAGS = {
    "--vocab_file": dict(help="vocab.json of a run, or vocab.txt of WordPiece; default: learned from the text"),
    "--max_seq_length": dict(type=int, help="tokens of a sample"),
    "--max_steps": dict(type=int, help="steps of the optimizer"),
    "--print_steps": dict(type=int, default=10, help="steps between two lines of output"),
    "--seed": dict(type=int, default=0, help="of first values, samples and dropout"),
    "--train_batch_size": dict(type=int, help="samples of a step, of all ranks together"),
    "--gradient_accumulation_steps": dict(type=int, help="parts of a step"),
    "--learning_rate": dict(type=float, help="default: that of the model configuration"),
    "--max_grad_norm": dict(type=float, help="largest norm of the gradient"),
    "--fp16": dict(action="store_true", help="train in half precision"),
    "--loss_scale": dict(type=float, help="of --fp16; 0: dynamic"),
    "--delay_allreduce": dict(action="store_true", help="exchange gradients when the backward pass has ended"),
    "--load_training_checkpoint": dict(metavar="DIR", help="folder of the checkpoint to resume from"),
    "--load_checkpoint_id": dict(metavar="TAG", help="the checkpoint in it"),
    "--save_steps": dict(type=int, default=0, help="steps between two checkpoints; one is saved at the end, too"),
}
FINE_TUNING = {
    "--predict_batch_size": dict(type=int, default=8, help="samples of a forward pass without training"),
    "--num_train_epochs": dict(type=float, help="passes over the samples, instead of --max_steps"),
    "--preln": dict(action="store_true", help="layers have the norm in front, as those of bert_pretraining"),
    "--model_file": dict(help="checkpoint of a pre-trained BERT"),
    "--ckpt_type": dict(choices=("DS", "HF", "TF"), default="DS", help="DS: of bert_pretraining; HF: of transformers"),
}


def get_argument_parser(folder, description, data, flags):
    """A parser with the published flags of all programs and ``flags``. ``folder`` is that of the program, and ``data``
    the default of ``--data``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    paths = {"--cf": ("bert_tiny.json", "model configuration"), "--output_dir": ("out", "folder of results")}
    for name, (default, text) in paths.items():
        parser.add_argument(name, default=os.path.join(folder, default), help=text)
    parser.add_argument("--data", default=data and os.path.join(folder, data), help="file or folder of the data")
    return add_flags(parser, {**FLAGS, **flags})


def add_flags(parser, flags):
    for name, options in flags.items():
        parser.add_argument(name, **options)
    return parser


def given(args, name):
    """Whether a flag is on the command line."""
    return getattr(args, name) is not None and getattr(args, name) is not False


def for_one_process(args):
    """The rest of the arguments of a program without DeepSpeed; flags of several ranks and of fp16 are refused."""
    for name, reason in (
        ("fp16", "plain.py trains in fp32"),
        ("loss_scale", "plain.py trains in fp32, which needs no loss scale"),
        ("delay_allreduce", "plain.py is one process, which exchanges no gradients"),
    ):
        if given(args, name):
            sys.exit(f"--{name}: {reason}. Use ds.py, or leave the flag out.")
    args.rank, args.world_size, args.device = 0, 1, "cuda" if torch.cuda.is_available() else "cpu"
    args.train_batch_size = args.train_batch_size or args.model["training"]["train_batch_size"]
    args.gradient_accumulation_steps = args.gradient_accumulation_steps or 1
    args.max_grad_norm = 1.0 if args.max_grad_norm is None else args.max_grad_norm
    args.learning_rate = args.learning_rate or args.model["training"]["learning_rate"]
    if args.train_batch_size % args.gradient_accumulation_steps:
        sys.exit(
            f"--train_batch_size {args.train_batch_size} is not a multiple of --gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps}"
        )
    return args


def read_model(args):
    """Reads the model configuration of ``--cf`` into ``args.model``, and fills in what flags leave open."""
    args.model = bert.read_model_file(args.cf)
    own = args.model["training"]
    args.max_seq_length = args.max_seq_length or own["max_seq_length"]
    places = bert.BertConfig(**args.model["bert_model_config"]).max_position_embeddings
    if not 8 <= args.max_seq_length <= places:
        sys.exit(f"--max_seq_length {args.max_seq_length}: {args.cf} allows 8 to {places} (max_position_embeddings)")
    folder, tag = args.load_training_checkpoint, args.load_checkpoint_id
    if bool(folder) != bool(tag):
        sys.exit("--load_training_checkpoint DIR and --load_checkpoint_id TAG belong together")
    if folder and not os.path.isdir(os.path.join(folder, tag)):
        sys.exit(f"--load_training_checkpoint {folder} --load_checkpoint_id {tag}: this folder does not exist")
    args.max_steps = args.max_steps or own["max_steps"]


def read_fine_tuning(args):
    """``read_model`` for a program that may start from a checkpoint. ``args.max_steps`` is None where epochs count."""
    epochs_alone = args.num_train_epochs and not args.max_steps
    read_model(args)
    if epochs_alone:
        args.max_steps = None
    if args.ckpt_type == "TF":
        sys.exit("--ckpt_type TF: convert the checkpoint with transformers, save its state dict, and use type HF")
    if args.ckpt_type == "HF" and args.preln:
        sys.exit("--preln: models of transformers have the norm behind attention. Leave the flag out.")
    if bool(args.model_file) and not args.vocab_file:
        sys.exit("--model_file: give --vocab_file the vocabulary that belongs to the checkpoint")


def config_of(args, vocabulary):
    return bert.config_of(args.model, vocabulary, **({"pre_layer_norm": True} if args.preln else {}))


def vocabulary_of(args, text):
    """The vocabulary of ``--vocab_file``; without it one of the size of the model configuration, learned from ``text``."""
    return bert_text.vocabulary_of(args.vocab_file, text, bert.BertConfig(**args.model["bert_model_config"]).vocab_size)


def steps_of(args, count):
    """The steps of ``--num_train_epochs`` passes over ``count`` samples, where ``--max_steps`` is not given."""
    return args.max_steps or max(1, round(args.num_train_epochs * count / args.train_batch_size))


def new_state():
    """The state of the program in checkpoints: how far it is."""
    return {"last_global_step": 0, "last_global_data_samples": 0}


def is_due(args, step):
    """Whether a checkpoint is saved when ``step`` steps are done."""
    return step == args.max_steps or bool(args.save_steps) and step % args.save_steps == 0


def micro_batch(args, samples, micro_step):
    """Numbers of the samples of this rank's part ``micro_step`` of the step that follows ``samples`` samples."""
    rows = args.train_batch_size // (args.gradient_accumulation_steps * args.world_size)
    first = samples + (micro_step * args.world_size + args.rank) * rows
    return range(first, first + rows)


@functools.lru_cache(maxsize=2)
def order(seed, epoch, count):
    """The numbers below ``count`` in the order of pass ``epoch`` over the samples."""
    return random.Random(f"{seed} {epoch}").sample(range(count), count)


def in_order(args, samples, number):
    """Sample ``number`` of an endless row of passes over ``samples``."""
    epoch, place = divmod(number, len(samples))
    return samples[order(args.seed, epoch, len(samples))[place]]


def begin_step(args, step):
    """Dropout depends on seed, step and rank alone, so a resumed run drops what an uninterrupted one does."""
    torch.manual_seed(zlib.crc32(f"{args.seed} {step} {args.rank}".encode()))


def schedule_learning_rate(args, optimizer, step):
    """Writes the learning rate of ``--lr_schedule`` for ``step`` into the groups; step 0 is the first one.

    The rate grows over the share ``warmup_proportion`` of all steps, with the square of the step (EE) or in proportion
    to it (LE). From then on it is multiplied by ``decay_rate`` over each ``decay_step`` steps. ``--lr_offset`` is added
    to it. With ``--rewarmup`` a resumed run counts steps from where it resumes.
    """
    if not args.lr_schedule and not args.lr_offset:
        return
    own, factor = args.model["training"], 1.0
    if args.lr_schedule:
        first = args.first_step if args.rewarmup else 0
        warm, at = max(1.0, own["warmup_proportion"] * (args.max_steps - first)), step - first + 1
        after = max(0.0, at - warm) / own["decay_step"]
        factor = min(1.0, at / warm) ** (2 if args.lr_schedule == "EE" else 1) * own["decay_rate"] ** after
    for group in optimizer.param_groups:
        group["lr"] = args.learning_rate * factor + args.lr_offset


def report(args, step, loss, optimizer):
    """One line of output in each ``--print_steps`` steps, with the loss of this rank."""
    if args.rank == 0 and ((step + 1) % args.print_steps == 0 or step + 1 == args.max_steps):
        rate = optimizer.param_groups[0]["lr"]
        print(f"step {step + 1}/{args.max_steps}: loss {loss:.4f}, lr {rate:.2e}", flush=True)


def path_of(args, name):
    """A path in the folder of results; folders above it are made."""
    path = os.path.join(args.output_dir, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path
