"""The section ``flops_profiler`` of an engine's configuration: one step is counted on every rank."""

import contextlib
import gc
import io

import pytest
import torch
from torch import nn

import deepspeed
import moe_models
import pipe_models
from deepspeed import DeepSpeedConfigError
from deepspeed import comm as dist
from deepspeed._compat import dispatch_modes
from flops_models import field, fields
from harness import on_ranks
from logs import logged
from refusals import refused
from runs import engine_of, settings, train

WIDTH = 10
FIELDS = [
    "world size", "data parallel size", "model parallel size", "batch size per GPU", "params per gpu",
    "params of model = params per GPU * mp_size", "fwd MACs per GPU", "fwd flops per GPU",
    "fwd flops of model = fwd flops per GPU * mp_size", "bwd flops per GPU as counted",
    "recomputed flops per GPU as counted", "fwd latency", "bwd latency",
    "fwd FLOPS per GPU = fwd flops per GPU / fwd latency",
    "bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency",
    "fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency)",
    "step latency", "iter latency", "samples/second",
]  # fmt: skip


class Net(nn.Module):
    """One layer and a loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x, y):
        if self.fails:
            self.linear(x[:, 1:])
        return nn.functional.cross_entropy(self.linear(x), y)


FLOPS, PARAMS = 2 * WIDTH * WIDTH, WIDTH * WIDTH + WIDTH  # of one sample


def loss_of(engine):
    x, y = torch.ones(1, WIDTH, device=engine.device), torch.zeros(1, dtype=torch.long, device=engine.device)
    return lambda step, micro: engine(x, y)


def profiled(stage=0, accumulate=1, model=None, **section):
    made = settings(stage, rows=1, accumulate=accumulate, flops_profiler={"enabled": True, **section})
    return engine_of(model or Net(), made)


def left(model):
    """Hooks and modes."""
    of_all = torch.nn.modules.module
    hooks = [hook for one in model.modules() for hook in (*one._forward_hooks, *one._forward_pre_hooks)]
    hooks += [*of_all._global_forward_hooks, *of_all._global_forward_pre_hooks]
    return hooks + dispatch_modes()


@pytest.mark.any_device
@pytest.mark.parametrize("accumulate", [1, 3])
@on_ranks(1)
def test_the_report_of_a_step(rank, world, accumulate, tmp_path):
    path = tmp_path / "profiles" / "step.txt"
    engine = profiled(accumulate=accumulate, profile_step=2, output_file=str(path), recompute_fwd_factor=0.5)
    train(engine, loss_of(engine), 2)
    assert not path.exists() and engine.flops_profiler.flops == 0
    train(engine, loss_of(engine), 1)
    text, profiler = path.read_text(), engine.flops_profiler
    assert (profiler.flops, profiler.macs, profiler.params) == (FLOPS, FLOPS // 2, PARAMS)
    path.unlink()
    train(engine, loss_of(engine), 2)
    assert not path.exists() and (profiler.flops, profiler.params) == (FLOPS, PARAMS) and not left(engine.module)
    assert "Profile Summary at step 2:" in text
    found = fields(text)
    assert [name.replace("2.5 *", "2 *").replace("3.5 *", "3 *") for name in found] == FIELDS
    assert "bwd FLOPS per GPU = 2.5 * fwd flops per GPU / bwd latency" in found
    assert [found[name] for name in FIELDS[:9]] == ["1", "1", "1", "1", "110", "110", "100", "200", "200"]
    assert (found["bwd flops per GPU as counted"], found["recomputed flops per GPU as counted"]) == (str(FLOPS), "0")
    value = {name.split(" = ")[0]: field(text) for name, text in found.items()}
    forward, backward, step, whole = (value[f"{name} latency"] for name in ("fwd", "bwd", "step", "iter"))
    assert min(forward, backward, step) > 0 and whole == pytest.approx(forward + backward + step, rel=0.01)
    assert value["samples/second"] == pytest.approx(1 / whole, rel=0.01)
    assert value["fwd FLOPS per GPU"] == pytest.approx(FLOPS / forward, rel=0.01)
    assert value["bwd FLOPS per GPU"] == pytest.approx(2.5 * FLOPS / backward, rel=0.01)
    assert value["fwd+bwd FLOPS per GPU"] == pytest.approx(3.5 * FLOPS / (forward + backward), rel=0.01)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2, init=True)
def test_stages(rank, world, stage):
    engine = profiled(stage, profile_step=0, detailed=stage == 3)
    hooks = len(left(engine.module))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(engine, loss_of(engine), 1)
    profiler = engine.flops_profiler
    assert (profiler.flops, profiler.macs, profiler.params) == (FLOPS, FLOPS // 2, PARAMS)
    assert len(left(engine.module)) == hooks and not dispatch_modes()
    text = out.getvalue()
    assert ("Profile Summary at step 0:" in text) == (rank == 0)
    if rank == 0:
        assert fields(text)["data parallel size"] == "2"
        assert ("(linear): Linear(110, 100.00% Params" in text) == (stage == 3)


@on_ranks(2, init=True)
def test_experts_are_those_of_this_rank(rank, world):
    net = moe_models.net_of(moe_models.moe_layer(4, 2, 1, False, False))
    engine = profiled(model=net, profile_step=0)
    train(engine, lambda step, micro: moe_models.forward_net(engine, moe_models.batch(0, rank)), 1)
    own = [param.numel() for param in net.parameters()]
    assert engine.flops_profiler.params == sum(own) and len([one for one in own if one == 9 * moe_models.WIDTH]) == 4


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@on_ranks(2, init=True)
def test_a_stage_of_a_pipeline(rank, world, schedule):
    section = {"flops_profiler": {"enabled": True, "profile_step": 1}, "pipeline": {"schedule": schedule}}
    engine = pipe_models.engine_of("plain", 2, world, 4, **section)
    for _ in range(3):
        engine.train_batch(pipe_models.batches("plain", 1, 4, 0))
    product = pipe_models.MICRO * 4 * pipe_models.WIDTH**2  # of four tokens
    macs = 4 * product  # four layers on each stage
    profiler = engine.flops_profiler
    assert (profiler.macs, profiler.params) == (macs, 4 * (pipe_models.WIDTH**2 + pipe_models.WIDTH))
    first = 0 if rank else product  # the inputs of the model want no gradient
    assert profiler.backward_flops == 2 * (2 * macs - first)
    assert not left(engine.module)


@on_ranks(1)
def test_errors_and_evaluation(rank, world):
    engine = profiled(profile_step=0)
    loss_at = loss_of(engine)
    engine.module.fails = True
    with pytest.raises(RuntimeError):
        loss_at(0, 0)
    assert not left(engine.module)
    engine.module.fails = False
    with torch.no_grad():
        loss_at(0, 0)
    train(engine, loss_at, 1)
    assert engine.flops_profiler.flops == FLOPS and not left(engine.module)
    plain = engine_of(Net(), settings(0, rows=1))
    assert not hasattr(plain, "flops_profiler") and plain._flops_profiling.profiler is None


@on_ranks(1)
def test_a_step_that_never_comes(rank, world):
    for end in (lambda engine: engine.destroy(), lambda engine: None):
        engine = profiled(profile_step=7)
        train(engine, loss_of(engine), 2)
        with logged() as texts:
            end(engine)
            del engine
            gc.collect()
        assert [text for text in texts if "flops_profiler.profile_step is 7" in text and "has ended" in text]
    engine = profiled(profile_step=0)
    train(engine, loss_of(engine), 1)
    with logged() as texts:
        engine.destroy()
    assert not [text for text in texts if "flops_profiler" in text]


@on_ranks(1)
def test_a_file_that_cannot_be_written(rank, world, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "report.txt"):
        refused(DeepSpeedConfigError, "flops_profiler.output_file", profiled, output_file=str(path))


def functions():
    modules = (torch, nn.functional, torch.distributed, torch.Tensor, nn.Module)
    return {(module, name): value for module in modules for name, value in vars(module).items() if callable(value)}


@pytest.mark.parametrize("profiler_first", [False, True])
@on_ranks(2, init=True)
def test_comms_logger_and_profiler(rank, world, profiler_first):
    """Both are on together and go in either order."""
    before = functions()
    dist.configure(enabled=True, prof_all=True, prof_ops=[], verbose=False, debug=False)
    dist.reset_log()
    engine = profiled(1, profile_step=0)
    raw = torch.ones(3)
    ends = [engine.destroy, lambda: dist.configure(enabled=False)]
    train(engine, loss_of(engine), 1)
    torch.distributed.all_reduce(raw)
    assert engine.flops_profiler.flops == FLOPS
    assert dist.log_summary(return_dict=True)["summary"]["all_reduce"][12]["count"] == 1
    for end in ends if profiler_first else reversed(ends):
        end()
    dist.reset_log()
    torch.distributed.all_reduce(raw)
    assert not dist.log_summary(return_dict=True).get("summary")
    changed = [name for (_, name), value in functions().items() if before.get((_, name), value) is not value]
    assert not changed and not left(engine.module)


def test_the_published_imports():
    assert deepspeed.profiling.flops_profiler.FlopsProfiler.__module__ == "deepspeed.profiling.flops_profiler.profiler"
