"""On which device things are made, with stand-ins for devices that are not here."""

import pytest
import torch

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.zero import Init
from deepspeed.zero.init import init_context


@pytest.mark.parametrize("local_rank", ["3", None])
def test_zero_init_takes_the_device_of_its_local_rank_before_anything_else(monkeypatch, local_rank):
    calls, accelerator = [], CPU_Accelerator()
    monkeypatch.setattr(accelerator, "set_device", lambda index: calls.append(("device", index)))
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(init_context, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(init_context.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(init_context.dist, "init_distributed", lambda: calls.append(("group",)))
    with Init():
        torch.nn.Linear(2, 2)
    assert calls == ([("device", 3)] if local_rank else []) + [("group",)]
