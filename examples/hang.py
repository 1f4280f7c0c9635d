"""A job that hangs: after three steps rank 1 sleeps for ten seconds, and rank 0 waits for it in a collective.

    deepspeed --num_accelerators 2 examples/hang.py

After five seconds (`comm.timeout`) rank 0 ends with a message. It names rank 1 and the collective, and shows the Python
stack of both ranks.
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
    loss = engine(torch.rand(4, 16)).mean()
    engine.backward(loss)
    engine.step()
    if step == 3 and deepspeed.comm.get_rank() == 1:
        time.sleep(10)
    deepspeed.comm.all_reduce(loss.detach())
