"""One rank of a job that forks in the middle of training: the child drops its copy of the engine and leaves by
``sys.exit``. Run by test_forks.py."""

import gc
import json
import os
import sys
import time

import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.zero import GatheredParameters

WIDTH = 16


def wait_for(child, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return f"the child did not end within {seconds} s"


def main(backend, stage, offload):
    deepspeed.init_distributed(backend, verbose=False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **offload},
    }
    engines = [deepspeed.initialize(model=model, config=config)[0]]

    def train():
        (engine,) = engines
        engine.backward(engine(torch.full((1, WIDTH), 0.1 * (1 + dist.get_rank()))).square().sum())
        engine.step()

    train()
    child = os.fork()
    if child == 0:
        engines.clear()
        gc.collect()
        sys.exit(0)
    code = wait_for(child)
    assert code == 0, code
    dist.barrier()  # all children have ended
    train()
    train()
    with GatheredParameters(list(model.parameters())):
        total = sum(p.detach().double().sum() for p in model.parameters())
    dist.all_reduce(total)
    print(f"went on: {float(total):.6f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
