"""On which device things are made, with stand-ins for devices that are not here."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.zero import Init, core
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


@pytest.mark.parametrize("devices, shared", [("cpu cpu", True), ("cpu cuda", False), ("cuda cuda", False)])
def test_ranks_share_memory_only_where_all_parameters_are_on_the_cpu(monkeypatch, devices, shared):
    """The device of a frozen model, too, which has no optimizer whose parameters could be asked."""
    asked = {}
    monkeypatch.setattr(core, "_communicator", lambda group, name, shared: asked.update({name: shared}))
    monkeypatch.setattr(core, "_native", mock.Mock())
    handles = [SimpleNamespace(device=torch.device(device)) for device in devices.split()]
    others = [SimpleNamespace(ds_handle=handle) for handle in handles]
    core.build_core([], others=others, data_parallel=object(), gathers=object())
    assert asked == {"data parallel": shared}
