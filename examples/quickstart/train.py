"""Trains a small GPT on the source of Python's standard library, on as many processes as the launcher starts.

    deepspeed --num_accelerators 2 examples/quickstart/train.py --deepspeed_config examples/quickstart/ds_config.json

What makes it a DeepSpeed program are the lines that say `deepspeed` or `engine`; the rest is any training script.
A second call goes on from the checkpoint of the first.
"""

import argparse
import json
import logging
import os
import shutil
import sys
import time

import psutil
import torch

import data
import deepspeed
import deepspeed.comm as dist
import progress
import report
from model import GPT, Shape, parameter_groups

HERE = os.path.dirname(os.path.abspath(__file__))
REPORT_EVERY = 5  # steps between two points of the loss curve: each costs one small all-reduce


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, help="train up to this step; default: the schedule's total_num_steps")
    parser.add_argument("--more", type=int, default=100, help="steps to add when a finished run is resumed")
    parser.add_argument("--save_every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--heads", type=int, default=Shape.heads)
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=os.path.join(HERE, "out"), help="folder for checkpoints and results")
    parser.add_argument("--cache", default=os.path.join(HERE, "cache"), help="folder for the encoded corpus")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--resume", action="store_true", help="go on from the checkpoint without asking")
    choice.add_argument("--restart", action="store_true", help="begin anew without asking; removes the old results")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if not args.deepspeed_config:
        parser.error("name a configuration: --deepspeed_config examples/quickstart/ds_config.json")
    return args


def scheduled_steps(path):
    """The length of the schedule in the configuration file, or None where it has no such schedule."""
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    return config.get("scheduler", {}).get("params", {}).get("total_num_steps")


def load_corpus(cache, say):
    """The corpus; rank 0 builds it where the cache does not have it yet, the others wait."""
    folder = data.cache_folder(cache)
    if dist.get_rank() == 0 and not os.path.exists(folder):
        data.build(folder, say)
    dist.barrier()
    return data.Corpus(folder)


def finished_steps(checkpoints):
    """The step of the newest checkpoint, or 0."""
    try:
        with open(os.path.join(checkpoints, "latest"), encoding="utf-8") as file:
            return int(file.read().strip().replace("global_step", ""))
    except FileNotFoundError:
        return 0


def wants_resume(args, done, total):
    """Whether to go on from the checkpoint at step ``done``: rank 0 decides (or asks) and tells the others."""
    answer = torch.ones(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        answer[0] = not args.restart and (
            args.resume
            or progress.confirm(
                f"There is a checkpoint at step {done} of {total}. "
                + (f"Train {args.more} more steps from there?" if done >= total else "Go on from there?")
                + " (no: begin anew)"
            )
        )
    answer = answer.to(torch.device("cuda", args.local_rank) if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(answer, 0)
    return bool(answer.item())


def memory_bytes(device):
    """Memory of this rank now: device memory on a GPU, else resident memory."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def gather_report(engine, loss):
    """(mean loss over the ranks, [memory of each rank in bytes])."""
    values = torch.zeros(1 + dist.get_world_size(), dtype=torch.float64)
    values[0] = float(loss) / dist.get_world_size()
    values[1 + dist.get_rank()] = memory_bytes(engine.device)
    values = values.to(engine.device)
    dist.all_reduce(values)
    return values[0].item(), values[1:].tolist()


def held_out_loss(engine, corpus, shape, rows=16, batches=4):
    """Mean loss, in nats per token, on text that is never trained on: each rank takes its share of the windows."""
    engine.eval()
    losses = []
    with torch.no_grad():
        for x, y in corpus.held_out_batches(dist.get_rank(), dist.get_world_size(), rows, shape.context, batches):
            losses.append(float(engine(x.to(engine.device), y.to(engine.device))))
    engine.train()
    return gather_report(engine, sum(losses) / len(losses))[0]


def save(engine, checkpoints, state):
    """Writes a checkpoint, then removes the ones before it: a run that dies while writing still has the old one."""
    engine.save_checkpoint(checkpoints, client_state={"quickstart": state})
    dist.barrier()
    if dist.get_rank() == 0:
        for name in os.listdir(checkpoints):
            if name.startswith("global_step") and name != f"global_step{engine.global_steps}":
                shutil.rmtree(os.path.join(checkpoints, name))


def train(engine, corpus, shape, total, state, args, checkpoints):
    """Steps ``engine`` from where it stands to ``total``; appends to ``state["rows"]``."""
    rank = dist.get_rank()
    rows = engine.train_micro_batch_size_per_gpu()
    micro_steps = engine.gradient_accumulation_steps()
    tokens_per_step = rows * shape.context * micro_steps * dist.get_world_size()
    bar = progress.Progress(engine.global_steps, total, tokens_per_step, show=rank == 0)
    with bar:
        while engine.global_steps < total:
            step = engine.global_steps
            for micro_step in range(micro_steps):
                x, y = corpus.batch(step * micro_steps + micro_step, rank, rows, shape.context)
                loss = engine(x.to(engine.device), y.to(engine.device))
                engine.backward(loss)
                engine.step()
            step = engine.global_steps
            if step % REPORT_EVERY == 0 or step == total:
                loss, memory = gather_report(engine, loss.detach())
                lr = engine.get_lr()[0]
                bar.report(step, loss, lr, memory)
                norm = engine.get_global_grad_norm()
                state["rows"].append(
                    [step, step * tokens_per_step, loss, lr, float(norm or 0.0), bar.tokens_per_second]
                )
            bar.advance(step)
            if step % args.save_every == 0 and step < total:
                save(engine, checkpoints, state)


def main():
    started = time.time()
    args = parse_arguments()
    deepspeed.logger.setLevel(logging.WARNING)  # the screen belongs to the bar
    deepspeed.init_distributed()
    show = dist.get_rank() == 0
    say = progress.say if show else lambda *text: None
    checkpoints = os.path.join(args.out, "checkpoints")
    total = args.steps or scheduled_steps(args.deepspeed_config)
    if not total:
        sys.exit("the configuration's scheduler has no total_num_steps: say how long to train with --steps N")
    done = finished_steps(checkpoints)
    asked = time.time()
    resume = bool(done) and wants_resume(args, done, total)
    started += time.time() - asked  # whoever takes time to answer has not waited for us
    if args.resume and not done:
        sys.exit(f"--resume: there is no checkpoint in {checkpoints}. Leave the flag out to begin one.")
    dist.barrier()  # everybody has looked at the checkpoints: now rank 0 may remove them
    if show and not resume:
        report.remove(args.out)

    corpus = load_corpus(args.cache, say)
    torch.manual_seed(args.seed)
    shape = Shape(corpus.tokenizer.vocab_size, layers=args.layers, heads=args.heads, width=args.width)
    model = GPT(shape)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=parameter_groups(model, 0.1))

    if resume:
        path, client_state = engine.load_checkpoint(checkpoints)
        if path is None:
            sys.exit(f"the checkpoint in {checkpoints} cannot be read. Begin anew with --restart.")
        state = client_state["quickstart"]
        if engine.global_steps >= total:
            total = engine.global_steps + args.more
    else:
        state = {"rows": [], "before": held_out_loss(engine, corpus, shape)}
    if show:
        progress.introduce(engine, corpus, shape, total, state["before"], resume, time.time() - started)

    clock = time.time()
    train(engine, corpus, shape, total, state, args, checkpoints)
    clock = time.time() - clock
    state["after"] = held_out_loss(engine, corpus, shape)
    save(engine, checkpoints, state)
    if show:
        engine.eval()
        prompt = "\n\nclass"  # no space after it: a token begins with its space
        generator = torch.Generator().manual_seed(args.seed)
        ids = engine.module.generate(corpus.tokenizer.encode(prompt.encode()), 220, generator=generator)
        sample = corpus.tokenizer.decode(ids).strip("\n")
        report.write(args.out, state, sample)
        progress.conclude(args.out, state, sample, shape.vocab_size, clock)
    dist.barrier()  # nobody leaves while another still writes


if __name__ == "__main__":
    main()
