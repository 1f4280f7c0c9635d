"""A job that would wait for ever: rank 1 leaves the loop for an hour after three steps.

    deepspeed --num_accelerators 2 examples/hang.py

After five seconds (`comm.timeout`) all ranks end with one message. It names rank 1 and the collective that rank 0 waits
in, and shows the Python stack of every rank.
"""

import time

import torch

import deepspeed

engine, _, _, _ = deepspeed.initialize(
    model=torch.nn.Linear(16, 1),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW"},
        "comm": {"timeout": 5},
    },
)
for step in range(10):
    if step == 3 and deepspeed.comm.get_rank() == 1:
        time.sleep(3600)
    engine.backward(engine(torch.rand(4, 16)).mean())
    engine.step()
