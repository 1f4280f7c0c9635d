"""Trains with what has been validated on Gaudi, on any accelerator, and writes the losses as JSON to a file.

    deepspeed --num_accelerators 2 gaudi_program.py FILE
"""

import json
import sys

import torch

import deepspeed
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

WIDTH, STEPS = 16, 10


class Model(torch.nn.Module):
    """Two layers with tied weights, which may run again in backward."""

    def __init__(self, again):
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.again = again
        self.tie()

    def tie(self):
        """Shares the weight: moving a model to Gaudi separates the two."""
        self.second.weight = self.first.weight

    def forward(self, x):
        for layer in (self.first, self.second):
            x = checkpoint(layer, x) if self.again else layer(x)
            x = torch.tanh(x)
        return x


def train(stage, again, rank):
    """The losses of ten steps in bf16, in the order of the guide: to the device and bf16, tied again, optimizer,
    ``initialize``."""
    torch.manual_seed(3)
    device = deepspeed.get_accelerator().device_name()
    model = Model(again).to(device, torch.bfloat16)
    model.tie()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        x = x.to(device, torch.bfloat16).requires_grad_()
        loss = (engine(x) - x.detach().roll(1, 1)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def main(path):
    backend = deepspeed.get_accelerator().communication_backend_name()
    deepspeed.init_distributed(dist_backend=backend)
    rank = deepspeed.comm.get_rank()
    found = [train(stage, again, rank) for stage in (0, 1, 2) for again in (False, True)]
    told = [None] * deepspeed.comm.get_world_size()
    deepspeed.comm.all_gather_object(told, found)
    if rank == 0:
        facts = {"device": deepspeed.get_accelerator().device_name(), "backend": torch.distributed.get_backend()}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**facts, "losses": told}, file)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main(next(argument for argument in sys.argv[1:] if not argument.startswith("--")))
