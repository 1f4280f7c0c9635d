"""A ``RunState`` is all that ``deepspeed.checkpoint`` needs: it saves and loads one where there is no engine."""

import pytest

from processes import run_after_torch

WITHOUT_ENGINE = """
import sys

class NoEngine:
    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed.engine" or name.startswith("deepspeed.engine."):
            raise ImportError(f"{name} is refused here")

sys.meta_path.insert(0, NoEngine())
folder, format = sys.argv[1:]

import torch
from deepspeed import _native
from deepspeed.checkpoint.engines.base import make_engine
from deepspeed.checkpoint.read.load import load_checkpoint
from deepspeed.checkpoint.run_state import Counters, LoadTarget, RunState
from deepspeed.checkpoint.save.save import save_checkpoint
from deepspeed.config import DeepSpeedConfig
from deepspeed.ops.adam import FusedAdam
from deepspeed.zero.core import build_core, writing
from deepspeed.zero.states.named_states import OwnedStates
from deepspeed.zero.parameters.param_ranks import ModuleTensors
from deepspeed.zero.optimizers.restore import Restore
from deepspeed.zero.optimizers.stepping import Stepping

try:
    import deepspeed.engine.engine
except ImportError as error:
    assert "is refused here" in str(error)
else:
    raise SystemExit("deepspeed.engine was imported")


class Target(LoadTarget):
    def __init__(self, module, core=None, stepping=None):
        super().__init__(module)
        self.core, self.stepping = core, stepping

    def writing(self):
        return writing(self.core)

    def publish(self):
        self.core.publish()

    def restoring(self, saved, options=None):
        return Restore(self.stepping, list(self.module.parameters()), saved, options)


def values(module, **more):
    return dict(weights=ModuleTensors(module), module_state=lambda **options: module.state_dict(), **more)


def made(seed, **more):
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    for value in module.state_dict().values():
        value.copy_(torch.rand(value.shape) * 9)
    written = {"train_batch_size": 2, "checkpoint": {"writer": {"format": format}}}
    config = DeepSpeedConfig(written)
    trained = list(module.parameters())
    optimizer = FusedAdam(trained, lr=0.1 + seed)
    names = {id(param): name for name, param in module.named_parameters()}
    core, called = build_core(optimizer.param_groups, config=config.native, names=names)
    stepping = Stepping(core, optimizer, trained, called)
    for number in range(len(core.slot_names())):
        for slot in core.slots(number):
            slot.uniform_()
    core.steps().fill_(3 + seed)
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    run = RunState(
        **values(module), policy=_native._C.stage_policy(0), config=config, ds_config=written,
        states=OwnedStates(stepping, [trained]), group_names=[called], trained_groups=[trained], options=options,
        optimizer_state=optimizer.state_dict, writer=make_engine(config), **more,
    )
    return run, Target(module, core, stepping)


def tensors(target):
    core = target.core
    slots = [slot.clone() for number in range(len(core.slot_names())) for slot in core.slots(number)]
    return [*(value.clone() for value in target.module.state_dict().values()), *slots, core.steps().clone()]


counters = Counters(global_steps=5, global_samples=10, skipped_steps=1, micro_steps=5)
saved, source = made(0, counters=counters, client_state={"epoch": 4}, position=lambda: {"batches": 5})
save_checkpoint(saved, folder, tag="five")
drawn = torch.rand(3)
other, target = made(1)
assert not any(torch.equal(a, b) for a, b in zip(tensors(source), tensors(target)) if a.dtype == torch.float32)
found = load_checkpoint(other, target, folder)
assert all(torch.equal(a, b) for a, b in zip(tensors(source), tensors(target)))
assert target.stepping.optimizer.param_groups[0]["lr"] == 0.1
assert found.client_state == {"epoch": 4, **found.own_values}, found.client_state
assert found.counters == counters, found.counters
assert found.data == {"batches": 5} and found.dp_world_size == 1 and found.rng is not None
assert load_checkpoint(*made(2), folder + "/nothing") is None

alone = Target(made(3)[1].module)
run = RunState(**values(alone.module), policy=saved.policy, config=saved.config, ds_config={}, writer=saved.writer)
found = load_checkpoint(run, alone, folder, load_module_only=True)
assert all(torch.equal(a, b) for a, b in zip(source.module.state_dict().values(), alone.module.state_dict().values()))
assert found.counters is None and found.schedule is None and found.rng is None
print("done")
"""


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_a_run_is_saved_and_loaded_without_an_engine(format, tmp_path):
    ended = run_after_torch(WITHOUT_ENGINE, tmp_path, format)
    assert ended.returncode == 0 and ended.stdout.endswith("done\n"), ended.stderr
