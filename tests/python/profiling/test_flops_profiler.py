"""deepspeed.profiling.flops_profiler without an engine: totals, reports, and what is left behind."""

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed._compat import TORCH2, dispatch_modes
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from deepspeed.profiling.flops_profiler.profiler import get_model_profile as published
from flops_models import LENET_FLOPS, LENET_MACS, field, fields, lenet
from refusals import refused

WIDTH, ROWS = 4, 2
PRODUCT = ROWS * WIDTH * WIDTH  # MACs of a layer
X = torch.ones(ROWS, WIDTH)


class Net(nn.Module):
    """A layer that is called twice, a list, a function, and an error where one is wanted."""

    def __init__(self):
        super().__init__()
        self.first, self.extra = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
        self.blocks.append(self.blocks[0])
        self.fails = self.eats = False

    def forward(self, x, scale=1):
        x = self.first(self.first(x)) @ self.extra
        for block in self.blocks:
            x = block(x)
        try:
            if self.fails or self.eats:
                self.first(x[:, :1])
        except RuntimeError:
            if self.fails:
                raise
        return x @ self.extra * scale

    def generate(self, x, count=3):
        for _ in range(count):
            x = self(x)
        return x @ self.extra


MACS, PARAMS = 7 * PRODUCT, 3 * (WIDTH * WIDTH + WIDTH) + WIDTH * WIDTH


def left(model):
    """Hooks and modes."""
    of_all = torch.nn.modules.module
    hooks = [hook for one in model.modules() for hook in (*one._forward_hooks, *one._forward_pre_hooks)]
    hooks += [*of_all._global_forward_hooks, *of_all._global_forward_pre_hooks]
    return hooks + dispatch_modes()


def test_published_figures():
    assert published is get_model_profile
    net = lenet()
    found = get_model_profile(net, (1024, 1, 32, 32), print_profile=False, as_string=False)
    assert found == (LENET_FLOPS, LENET_MACS, 61706) and not left(net) and net.training
    assert get_model_profile(net, (1024, 1, 32, 32), print_profile=False) == ("866.08 M", "426.52 MMACs", "61.71 k")


def test_profile_of_a_training_step():
    model = Net()
    profiler = FlopsProfiler(model)
    before = [torch.Tensor.matmul, nn.functional.linear, torch.matmul, nn.Module.__call__]
    profiler.start_profile()
    out = model(X)
    assert profiler.get_total_macs() == MACS and left(model) and profiler.started
    out.sum().backward()
    profiler.stop_profile()
    assert not left(model) and before == [torch.Tensor.matmul, nn.functional.linear, torch.matmul, nn.Module.__call__]
    # In backward each product has two, but the first: its input wants none.
    assert profiler.backward_flops == 2 * (2 * MACS - PRODUCT) and profiler.recomputed_flops == 0
    totals = profiler.flops, profiler.macs, profiler.params
    assert totals == (2 * MACS, MACS, PARAMS) and profiler.duration == profiler.get_total_duration() > 0
    assert profiler.get_total_flops(as_string=True) == "448" and profiler.get_total_macs(True) == "224 MACs"
    assert profiler.get_total_params(True) == "76" and profiler.get_total_duration(True).split()[1] in ("us", "ms", "s")
    own = {name: profiler.counts.costs.get(one) for name, one in model.named_modules()}
    assert own[""].macs == MACS and own["first"].macs == 2 * PRODUCT and own["first"].calls == 2
    assert own["blocks.0"].macs == 2 * PRODUCT and own["blocks.1.0"].macs == PRODUCT and own["blocks"] is None
    assert not profiler.is_expert_tensor_parallelism_enabled()
    profiler.start_profile()
    assert profiler.get_total_flops() == 0
    model(X)
    profiler.reset_profile()
    model(X)
    model(X)
    profiler.end_profile()
    assert not left(model) and not profiler.counts.costs
    profiler.start_profile(ignore_list=[nn.Sequential, model.first])
    model(X)
    profiler.stop_profile()
    assert profiler.macs == 2 * PRODUCT and profiler.params == WIDTH * WIDTH


def test_errors_leave_nothing_behind():
    model = Net()
    profiler = FlopsProfiler(model)
    model.fails = True
    profiler.start_profile()
    with pytest.raises(RuntimeError):
        model(X)
    assert not left(model) and not profiler.started
    with pytest.raises(RuntimeError):
        get_model_profile(model, (ROWS, WIDTH), print_profile=False)
    assert not left(model) and model.training
    model.fails, model.eats = False, True  # an error that the model handles itself
    profiler.start_profile()
    model(X)
    model(X)
    profiler.stop_profile()
    assert profiler.macs == 2 * MACS and not left(model)
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1,))  # another one replaces the inputs
    hooks = len(left(model))
    profiler.start_profile()
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1,))
    model(X)
    assert profiler.started and profiler.get_total_macs() == MACS
    profiler.end_profile()
    assert len(left(model)) == hooks + 1


@pytest.mark.parametrize("kind", ["torch", "torch reentrant", "ours", "ours reentrant"])
def test_recomputed_flops(kind):
    class Recomputing(Net):
        def forward(self, x):
            return self.first(run(self.blocks[0], x))

    run = {
        "torch": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
        "torch reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
        "ours": deepspeed.checkpointing.non_reentrant_checkpoint,
        "ours reentrant": deepspeed.checkpointing.checkpoint,
    }[kind]
    model = Recomputing()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(X.clone().requires_grad_()).sum().backward()
    profiler.stop_profile()
    counts = profiler.counts
    found = profiler.macs, profiler.backward_flops, profiler.recomputed_flops
    assert found == (2 * PRODUCT, 8 * PRODUCT, 2 * PRODUCT)
    assert counts.costs[model.blocks[0]].macs == PRODUCT and counts.costs[model.blocks[0]].calls == 1


def test_a_backward_inside_of_forward():
    class Slope(Net):
        def forward(self, x):
            return torch.autograd.grad(self.first(x).sum(), x)[0]

    profiler = FlopsProfiler(Slope())
    profiler.start_profile()
    profiler.model(X.clone().requires_grad_())
    profiler.stop_profile()
    found = profiler.macs, profiler.backward_flops, profiler.recomputed_flops
    assert found == (PRODUCT, 2 * PRODUCT, 0)


def test_the_report(capsys, tmp_path):
    model = Net()
    flops, macs, params = get_model_profile(model, (ROWS, WIDTH), top_modules=2, warm_up=0)
    text = capsys.readouterr().out
    found = fields(text)
    assert list(found)[:9] == [
        "world size", "data parallel size", "model parallel size", "params per gpu",
        "params of model = params per GPU * mp_size", "fwd MACs per GPU", "fwd flops per GPU",
        "fwd flops of model = fwd flops per GPU * mp_size", "bwd flops per GPU as counted",
    ]  # fmt: skip
    assert [found[name] for name in ("world size", "data parallel size", "model parallel size")] == ["1"] * 3
    assert (found["params per gpu"], found["fwd flops per GPU"]) == (params, flops) == ("76", "448")
    assert found["fwd MACs per GPU"] + " MACs" == macs and "not counted" not in text
    flops_per_second = field(found["fwd FLOPS per GPU = fwd flops per GPU / fwd latency"])
    assert flops_per_second == pytest.approx(448 / field(found["fwd latency"]), rel=0.01)
    depths = re.findall(r"depth (\d+):\n    params      - (.*)\n    MACs        - (.*)\n    fwd latency - (.*)\n", text)
    assert [depth for depth, *_ in depths] == ["0", "1", "2", "3"]
    assert depths[1][1:3] == ("{'ModuleList': '40', 'Linear': '20'}", "{'ModuleList': '96 MACs', 'Linear': '64 MACs'}")
    assert depths[2][1] == "{'Sequential': '40'}" and depths[3][2] == "{'Linear': '96 MACs', 'Tanh': '0 MACs'}"
    row = r"\(first\): Linear\(20, 26.32% Params, 64 MACs, 28.57% MACs, [\d.]+ \w+, [\d.]+% latency, [\d.]+ \w*FLOPS, i"
    assert re.search(row, text) and text.count("Linear(") == 3
    for depth, last in ((0, "0"), (2, "2"), (99, "3")):
        get_model_profile(model, (ROWS, WIDTH), detailed=False, module_depth=depth)
        text = capsys.readouterr().out
        assert re.findall(r"depth (\d+):", text)[-1] == last and "Linear(" not in text
    path = tmp_path / "folder" / "report.txt"
    get_model_profile(model, (ROWS, WIDTH), output_file=str(path))
    assert not capsys.readouterr().out and path.read_text().startswith(
        "-" * 26 + " DeepSpeed Flops Profiler " + "-" * 26
    )
    profiler = FlopsProfiler(model)
    profiler.print_model_aggregated_profile(0, 1)
    assert "depth 0:\n    params      - {'Net': '76'}" in capsys.readouterr().out


def test_arguments():
    model = Net()

    def macs_of(**given):
        return get_model_profile(model, print_profile=False, as_string=False, **given)[1]

    assert macs_of(args=[X]) == macs_of(kwargs={"x": X, "scale": 2}) == macs_of(args=(X,), kwargs=None) == MACS
    assert macs_of(args=[X], ignore_modules=[nn.Sequential]) == MACS - 3 * PRODUCT
    assert macs_of(args=[X], mode="generate") == 3 * MACS + PRODUCT
    assert macs_of(args=[X], kwargs={"count": 1}, mode="generate") == MACS + PRODUCT
    model = nn.Linear(WIDTH, 3).double()
    assert macs_of(input_shape=[ROWS, WIDTH]) == ROWS * WIDTH * 3
    for words, error, given in [
        ("profiles a torch.nn.Module, got int", TypeError, {"model": 3, "args": [X]}),
        ("mode is 'forward' or 'generate'", ValueError, {"model": model, "args": [X], "mode": "eval"}),
        ("Linear has no method generate", ValueError, {"model": model, "args": [X], "mode": "generate"}),
        ("a tuple of sizes", ValueError, {"model": model, "input_shape": 3}),
        (r"needs input_shape=, args= or kwargs=", ValueError, {"model": model}),
    ]:
        refused(error, words, get_model_profile, **given)


def test_warm_up_and_calls():
    calls = []
    model = Net()
    model.register_forward_hook(lambda *_: calls.append(model.training))
    get_model_profile(model, (ROWS, WIDTH), warm_up=5, print_profile=False)
    assert calls == [False] * 7 and model.training  # one pass for the time, and one for the operators


def test_an_operator_without_a_formula(capsys):
    class Other(nn.Module):
        def forward(self, x):
            return torch.fft.fft(x).real + torch.fft.fft(x).imag

    assert get_model_profile(Other(), (ROWS, WIDTH), as_string=False) == (0, 0, 0)
    text = capsys.readouterr().out
    assert "aten::_fft_r2c (2)" in fields(text)["not counted, for want of a formula (calls)"]


@pytest.mark.skipif(not TORCH2, reason="torch 1.13 compiles nothing")
def test_compiled_models():
    net = Net()
    model = torch.compile(net, backend="eager")
    model(X)
    profiler = FlopsProfiler(net)
    profiler.start_profile()
    model(X)
    profiler.stop_profile()
    assert profiler.macs == MACS


def test_sizes_that_an_engine_does_not_say(capsys):
    class Engine:
        world_size, dp_world_size, mp_world_size = 2, None, 2
        train_micro_batch_size_per_gpu = staticmethod(lambda: 3)

    profiler = FlopsProfiler(Net(), Engine())
    profiler.start_profile()
    profiler.model(X)
    profiler.stop_profile()
    profiler.print_model_profile(detailed=False)
    found = fields(capsys.readouterr().out)
    assert [found[name] for name in ("world size", "data parallel size", "model parallel size")] == ["2", "1", "2"]
    assert found["params of model = params per GPU * mp_size"] == "152" and found["batch size per GPU"] == "3"
