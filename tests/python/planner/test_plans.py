"""``deepspeed.plan``: memory by hand, what stays as it was, and arguments that do not fit together."""

import functools
import gc
import os
import time
from unittest import mock

import psutil
import pytest
import torch
import torch.utils.checkpoint

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing.hidden_states import CheckpointHiddenStatesOffload
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.planner import Machine, PlanError, child
from deepspeed.planner.child import run_apart, run_each_apart
from deepspeed.planner.operators import call_of, nanoseconds
from deepspeed.planner.plans import bytes_of
from models import Parts
from refusals import refused
from runs import TORCH2, engine_of, settings, take_step

SIZE, LAYERS = 512, 4
NUMEL = LAYERS * SIZE * SIZE
RATES = Machine("test", {"float32": 1e12, "bfloat16": 2e12}, 1e11, 1000, (1000, 1e10), (9000, 1e9), 2e10, 1e9, 1e10)


PLAN_OPTIONS = ("memory", "ranks", "sample", "loss", "optimizer", "imbalance", "measure")


def layers(count=LAYERS):
    return torch.nn.Sequential(*[torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(count)])


class Experts(torch.nn.Module):
    """Experts of two ranks, which keep all tokens."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(SIZE, SIZE)
        self.moe = MoE(SIZE, torch.nn.Linear(SIZE, SIZE), num_experts=4, ep_size=2, drop_tokens=False)

    def forward(self, x):
        return self.moe(self.first(x))[0]


def planned(stage, world=4, dtype="bf16", model=layers, rows=2, machine=RATES, **more):
    given = {key: more.pop(key) for key in PLAN_OPTIONS if key in more}
    given.setdefault("sample", torch.zeros(rows, SIZE, dtype={"bf16": torch.bfloat16}.get(dtype, torch.float32)))
    config = settings(stage, rows=rows, dtype=dtype, **more)
    return deepspeed.plan(model(), config, world, machine=machine, **given)


@pytest.mark.parametrize("stage", range(4))
def test_what_rests_is_cut_as_the_stage_says(stage):
    owners = planned(stage).ranks[0].owners
    states = NUMEL * 4 // (4 if stage >= 1 else 1)
    assert owners["masters"] == pytest.approx(states, rel=0.02)
    assert owners["optimizer states"] == pytest.approx(2 * states, rel=0.02)
    if stage < 3:
        assert owners["parameters"] == pytest.approx(2 * NUMEL, rel=0.02)
    if stage == 3:
        assert owners.get("parameters", 0) + owners["engine"] < NUMEL, "a quarter of them, and what is gathered"


@pytest.mark.parametrize("stage, world", [(0, 1), (1, 2), (2, 2), (3, 1), (3, 2)])
def test_gradients_have_memory_from_their_backward_to_the_step(stage, world):
    """16 layers are four buckets. Most is alive when the backward begins; with few rows, when it has ended."""

    def gradients(rows):
        plan = planned(stage, world, model=functools.partial(layers, 16), rows=rows).ranks[0]
        return sum(size for owner, size in plan.owners.items() if "gradients" in owner)

    all_of_them = 2 * 4 * NUMEL / (world if stage >= 2 else 1)
    if stage < 2 or world == 1:  # else buffers of the wire, or gathered weights, are most
        assert gradients(rows=2) == pytest.approx(all_of_them, rel=0.02)
    assert gradients(rows=1 << 15) <= all_of_them / 2


def test_calls_have_their_bytes():
    calls = {}
    for (verb, _), (_count, size) in planned(1).ranks[0].calls.items():
        calls[verb] = calls.get(verb, 0) + size
    assert calls["reduce_scatter"] == pytest.approx(2 * NUMEL, rel=0.01)
    assert calls["all_gather"] == pytest.approx(2 * NUMEL / 4, rel=0.01), "a rank passes its own part"


class Asks(torch.nn.Module):
    """The host waits three times in a forward, and copies in the background twice."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(SIZE, SIZE)

    def forward(self, x):
        x = self.layer(x)
        table = torch.ones(SIZE)
        x = x * x.sum().item() + table.to(x.device)
        kept, host = torch.empty_like(x), torch.empty(x.shape)
        host.copy_(x.detach())
        host.copy_(x.detach(), non_blocking=True)
        kept.copy_(host, non_blocking=True)
        return x + host.sum().item()


class Views(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count, self.layer = count, torch.nn.Linear(SIZE, SIZE)

    def forward(self, x):
        for _ in range(self.count):
            x = x.view(x.shape)
        return self.layer(x)


class TestCounts:
    def test_waits_of_the_program(self):
        asks, plain = (planned(0, dtype="fp32", model=model).ranks[0].counts for model in (Asks, lambda: Views(0)))
        assert asks["forward"]["host_waits"] == 3 + plain["forward"]["host_waits"]
        synchronous = Machine(**{**vars(RATES), "synchronous": True})
        on_host = planned(0, dtype="fp32", model=Asks, machine=synchronous).ranks[0].counts
        assert sum(one["host_waits"] for one in on_host.values()) == 0, "the CPU computes there"

    def test_calls_of_the_dispatcher(self):
        some, more = (planned(0, 1, model=functools.partial(Views, count)).ranks[0].counts for count in (2, 12))
        assert more["forward"]["dispatched"] - some["forward"]["dispatched"] == 10
        assert more["forward"]["launches"] == some["forward"]["launches"] > 0, "a view launches nothing"

    @pytest.mark.parametrize("stage", range(4))
    def test_collectives_kernels_and_the_norm(self, stage):
        rank = planned(stage).ranks[0]
        assert sum(one["collectives"] for one in rank.counts.values()) == sum(count for count, _ in rank.calls.values())
        assert rank.counts["step"]["host_waits"] >= 1, "for the norm"
        assert rank.counts["step"]["kernels"] >= 3, "the sum of squares, the norm and the update"
        assert set(rank.counts) == {"forward", "backward", "step"} and rank.timeline == ()

    def test_they_are_told(self):
        plan = planned(2)
        counts = plan.ranks[0].counts["step"]
        told = f"step {counts['dispatched']} dispatched, {counts['launches']} launches, {counts['kernels']} kernels, "
        assert told in str(plan) and plan.as_dict()["ranks"][0]["counts"]["step"] == counts

    def test_the_host_takes_time_to_start_collectives(self):
        quick, slow = (planned(3, machine=Machine(**{**vars(RATES), "call_ns": ns})).ranks[0] for ns in (0, 10_000_000))
        numbers = 5  # exchanges between hosts: of what ranks want to gather, and of flags
        calls = sum(one["collectives"] for one in slow.counts.values()) - numbers
        assert calls > 4 and slow.step_seconds - quick.step_seconds > 0.8 * calls * 0.01


def test_states_on_the_host_and_in_files(tmp_path):
    on_host = planned(2, zero={"offload_optimizer": {"device": "cpu"}}).ranks[0]
    assert not {"masters", "optimizer states"} & set(on_host.owners)
    assert on_host.tiers["host"]["peak_bytes"] >= 3 * NUMEL * 4 / 4
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "missing")}}
    beside = planned(2, zero=nvme).ranks[0]
    assert beside.peak_bytes == pytest.approx(on_host.peak_bytes, rel=0.02), "files take no memory of the device"
    in_files = planned(3, zero=nvme).ranks[0]
    assert in_files.tiers["file"]["peak_bytes"] >= 3 * NUMEL * 4 / 4
    assert in_files.tiers["file"]["bytes_per_step"] >= 2 * 3 * NUMEL * 4 / 4


def test_the_drive_of_states_in_files_takes_time(tmp_path):
    def plan_in(folder, rate):
        zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}
        return planned(2, zero=zero, machine=Machine(**{**vars(RATES), "file": rate})).ranks[0]

    given = plan_in(tmp_path, 1e6)
    moved = given.tiers["file"]["bytes_per_step"]
    assert given.seconds["step"] == pytest.approx(4 * moved / 1e6, rel=0.01), "four ranks have one drive"
    measured = plan_in(tmp_path / "made" / "by the engine", 0.0)
    assert measured.seconds["step"] > moved / 1e12 and "transfers of files" not in measured.not_known
    assert plan_in("/not/of/this/machine", 0.0).not_known == ("transfers of files",)
    assert os.listdir(tmp_path) == []


def test_libraries_have_workspaces():
    without, machine = planned(1).ranks[0], Machine(**{**vars(RATES), "workspace": 1 << 25})
    beside = planned(1, machine=machine).ranks[0]
    assert beside.peak_bytes == without.peak_bytes + (1 << 25) and beside.owners["workspaces"] == 1 << 25


def test_the_rows_of_the_busiest_rank():
    """``imbalance`` times the mean, at most all: they are exchanged, kept for the backward, and computed."""
    rows = 4096

    def found(imbalance):
        made = planned(1, 2, "fp32", Experts, rows, imbalance=imbalance)
        one = made.ranks[0]
        exchanged = sum(size for (verb, _), (_, size) in one.calls.items() if verb == "all_to_all_single")
        return exchanged, one.flops, made.peak_bytes, one.seconds["communication"]

    mean, busy, most, beyond = map(found, (1, 1.5, 2, 5))
    row, counts = SIZE * 4, 4 * 8
    assert mean[0] == 4 * rows * row + counts, "there and back, and their gradients"
    assert busy[0] - mean[0] == 2 * (rows // 2) * row, "what comes back, and gradients that go back"
    assert most[0] - mean[0] == 2 * rows * row and beyond == most
    products = 3 * 2 * SIZE * SIZE
    assert busy[1] - mean[1] == rows // 2 * products and most[1] - mean[1] == rows * products
    assert mean[2] + rows // 2 * row <= busy[2] < most[2]
    assert most[3] - mean[3] == pytest.approx(4 * rows // 2 * row / 1e10, rel=0.1), "in and out, whichever is more"


class Offloaded(torch.nn.Module):
    """Layers that are computed again, whose inputs wait on the host. ``stash``: copies that may be under way."""

    def __init__(self, stash):
        super().__init__()
        self.layers, self.stash = layers(8), stash

    def forward(self, x):
        x = x.requires_grad_()
        with CheckpointHiddenStatesOffload(max_fwd_stash_count=self.stash) as offload:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, offload.mark(x), use_reentrant=True)
        return x.sum()


def test_activations_on_their_way_to_the_host_are_on_the_device():
    rows = 8192
    few, more = (planned(0, 1, "fp32", lambda stash=stash: Offloaded(stash), rows).ranks[0] for stash in (3, 5))
    assert few.moment == more.moment == "forward" and more.peak_bytes - few.peak_bytes == 2 * rows * SIZE * 4


def test_activations_grow_with_the_micro_batch():
    count = 32
    few, many = (planned(1, model=lambda: layers(count), rows=rows) for rows in (1024, 4096))
    grown = (4096 - 1024) * SIZE * 2 * count  # the input of each layer
    assert many.peak_bytes - few.peak_bytes == pytest.approx(grown, rel=0.15), "and the loss"
    assert many.seconds > few.seconds and many.ranks[0].flops == few.ranks[0].flops * 4
    assert few.ranks[0].flops == pytest.approx(2 * 1024 * SIZE * SIZE * (3 * count - 1), rel=0.01)


def test_the_time_of_calls_is_hidden_behind_what_is_computed():
    found = planned(2, world=8)
    one = found.ranks[0]
    assert set(one.seconds) == {"forward", "backward", "step", "communication"}
    assert found.seconds == pytest.approx(sum(one.seconds.values()))


def test_kernels_of_the_engine_take_time():
    """Gradients are copied into buckets: 8 bytes of a parameter, beside what the operators of the backward read and
    write: its weight and its gradient."""
    rates = Machine(**{**vars(RATES), "flops": {"float32": 1e18}, "operator_ns": 0})
    found = deepspeed.plan(layers(), settings(2), 4, sample=torch.zeros(2, SIZE), machine=rates, ranks=[0])
    assert found.ranks[0].seconds["backward"] * rates.memory > 14 * NUMEL


@pytest.mark.skipif(not TORCH2, reason="torch 1.13 has no fused attention")
def test_attention_has_a_rate_of_its_own():
    """Four queries see four keys of width 8. The forward has two products of them, the backward five."""

    class Attention(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    rates = {**vars(RATES), "memory": 0, "operator_ns": 0, "attention": {"float32": 1e3}}
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Attention())

    def seconds(**more):
        found = deepspeed.plan(
            model, settings(0), 1, sample=torch.zeros(1, 1, 4, 8), machine=Machine(**{**rates, **more}), ranks=[0]
        )
        return found.ranks[0].seconds

    slow, fast = seconds(), seconds(attention={})
    product = 2 * 4 * 4 * 8 / 1e3
    assert slow["forward"] - fast["forward"] == pytest.approx(2 * product, rel=0.1)  # and the softmax
    assert slow["backward"] - fast["backward"] == pytest.approx(5 * product, rel=0.1)


def test_measured_times_replace_those_from_rates():
    """Rates of a machine on which products take for ever."""
    slow = Machine(**{**vars(RATES), "flops": {"float32": 1e3}})

    def found(**how):
        return deepspeed.plan(layers(), settings(1), 2, sample=torch.zeros(2, SIZE), machine=slow, ranks=[0], **how)

    times = {}
    rates, measured = found(), found(measure=times)
    assert rates.seconds > 1e3 > measured.seconds > 0
    assert "aten::mm" in {name for name, _, _ in times} and all(took > 0 for took in times.values())
    with mock.patch("deepspeed.planner.plans.nanoseconds", side_effect=AssertionError):
        assert found(measure=times).seconds == pytest.approx(measured.seconds), "they are kept"


def test_operators_that_cannot_run_alone_are_named():
    times = {}
    model, sample = layers(), torch.zeros(2, SIZE)
    deepspeed.plan(model, settings(1), 1, sample=sample, machine=RATES, measure=times)
    unknown = {call: None if call[0] == "aten::mm" else took for call, took in times.items()}
    found = deepspeed.plan(model, settings(1), 1, sample=sample, machine=RATES, measure=unknown)
    assert found.ranks[0].not_measured == ("aten::mm",)
    assert "cannot run alone: aten::mm" in str(found)


def test_a_planning_process_leaves_garbage_of_its_parent_alone(tmp_path, monkeypatch):
    """The garbage may own threads, which do not exist in the forked process."""
    told, fork = tmp_path / "told", os.fork

    class Owner:
        def __del__(self):
            with open(told, "a", encoding="utf-8") as file:
                file.write(f"{os.getpid()}\n")

    def fork_with_garbage():
        owner = Owner()
        owner.itself = owner
        del owner
        return fork()

    monkeypatch.setattr(os, "fork", fork_with_garbage)
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        assert run_apart(lambda: [[] for _ in range(1000)]) == [[] for _ in range(1000)]
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert told.read_text().split() == [str(os.getpid())]


class TestOperators:
    def test_equal_calls_are_one(self):
        a, b = torch.zeros(4, 6, device="meta"), torch.zeros(4, 6)
        assert call_of("aten::mm", (a, b.t()), {}) == call_of("aten::mm", (b, a.t()), {})
        assert len({call_of("aten::mm", (a, one), {}) for one in (b.t(), torch.zeros(6, 4), b.t().double())}) == 3

    def test_what_cannot_run_here_is_named(self):
        x = torch.zeros(8, 8)
        products = {
            call_of("aten::mm", (x, x), {}): True,
            call_of("aten::zeros", ([4, 4],), {"dtype": torch.float32, "device": torch.device("meta")}): True,
            call_of("deepspeed::grouped_linear", (x, [x, x]), {}): True,
            call_of("aten::mm", (x, torch.zeros(3, 8)), {}): False,
            call_of("deepspeed::unknown", (x,), {}): False,
        }
        found = nanoseconds(products, ranks=1)
        assert {call: took is not None and took > 0 for call, took in found.items()} == products

    @pytest.mark.skipif(not TORCH2, reason="torch 1.13 has no fused attention")
    def test_fused_attention_is_that_of_this_device(self):
        net, times = Parts(lambda net, x: attend(net.w(x)), w=torch.nn.Linear(8, 8)), {}
        deepspeed.plan(net, settings(0), 1, sample=torch.zeros(2, 2, 16, 8), machine=RATES, measure=times)
        fused = {name: took for (name, _, _), took in times.items() if "scaled_dot_product" in name}
        assert len(fused) == 2 and all(took > 0 for took in fused.values())


@pytest.mark.skipif(not TORCH2, reason="torch 1.13 has no fused attention")
@pytest.mark.parametrize("reentrant", [False, True])
def test_attention_that_is_computed_again_is_fused_again(reentrant):
    def forward(net, x):
        return torch.utils.checkpoint.checkpoint(lambda x: attend(net.w(x)), x, use_reentrant=reentrant)

    net, x = Parts(forward, w=torch.nn.Linear(8, 8)), torch.zeros(2, 2, 64, 8, requires_grad=True)
    once = deepspeed.plan(Parts(lambda net, x: attend(net.w(x)), w=net.w), settings(0), 1, sample=x, machine=RATES)
    again = deepspeed.plan(net, settings(0), 1, sample=x, machine=RATES)
    assert again.ranks[0].flops > once.ranks[0].flops


def attend(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_this_process_stays_as_it_was():
    model = layers()
    before = [param.clone() for param in model.parameters()]
    environment, accelerator = dict(os.environ), get_accelerator()
    found = deepspeed.plan(model, settings(2, dtype="bf16"), 4, "1GB", torch.zeros(2, SIZE), machine=RATES)
    assert found.fits and found.parameters == NUMEL and len(found.ranks) == 2
    assert (
        not torch.distributed.is_initialized() and get_accelerator() is accelerator and dict(os.environ) == environment
    )
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters()))
    assert not torch.empty(1, device="meta").data_ptr()


def test_a_plan_in_words_and_as_values():
    found = planned(3, memory="1KB")
    assert not found.fits and "needs more than" in found.why and "rank 0 peaks" in str(found)
    made = found.as_dict()
    assert (
        found.parameters == NUMEL
        and made["fits"] is False
        and made["ranks"][0]["calls"][0].keys() == {"verb", "purpose", "count", "bytes"}
    )


def test_a_plan_of_an_engine_that_trains():
    engine = engine_of(layers(), settings(2, dtype="fp32"))
    refused(ValueError, r"does not know the inputs yet: pass sample=", engine.plan)
    take_step(engine, engine(torch.ones(2, SIZE)).sum())
    found, given = engine.plan("1GB"), engine.plan("1GB", sample=torch.ones(64, SIZE))
    assert found.fits and found.world == 1 and given.ranks[0].flops > found.ranks[0].flops
    assert found.ranks[0].owners["optimizer states"] == pytest.approx(8 * NUMEL, rel=0.02)
    take_step(engine, engine(torch.ones(2, SIZE)).sum())
    engine.destroy()


def test_the_files_of_a_run_stay_alone(tmp_path):
    """Engines lock the folder of their files."""
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    engine = engine_of(layers(1), settings(2, dtype="fp32", zero=zero))
    take_step(engine, engine(torch.ones(2, SIZE)).sum())
    before = sorted(tmp_path.rglob("*"))
    assert engine.plan().ranks[0].tiers["file"]["peak_bytes"] >= 3 * SIZE * SIZE * 4
    assert sorted(tmp_path.rglob("*")) == before
    engine.destroy()


def test_a_plan_of_an_engine_with_an_optimizer_of_the_caller():
    model = layers()
    engine = engine_of(model, settings(0, dtype="fp32"), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    take_step(engine, engine(torch.ones(2, SIZE)).sum())
    assert engine.plan().fits
    engine.destroy()


def test_sizes_have_units():
    assert bytes_of("80GB") == 80 * 10**9 and bytes_of("1.5 GiB") == 3 << 29 and bytes_of("512mb") == 512 * 10**6
    for wrong in ("80", "GB", "80 apples", "0GB", "-1GB"):
        refused(ValueError, "write a number and a unit, such as 80GB or 40GiB", bytes_of, wrong)


def test_arguments_that_do_not_fit_together():
    refused(ValueError, "a job has at least one rank", planned, 0, world=-1)
    refused(ValueError, "must be more than 0 bytes", planned, 0, memory=0)
    refused(ValueError, "has the ranks 0 to 3", planned, 0, ranks=[4])
    refused(ValueError, "the sample of a pipeline is what its data iterator gives", planned, 0, model=lambda: pipeline)
    for imbalance in (0.5, float("nan"), float("inf")):
        refused(ValueError, "receives 1 or more times the rows of the mean", planned, 0, imbalance=imbalance)
    refused(ValueError, "sample is missing", deepspeed.plan, layers(), settings(0), 2)
    refused(
        PlanError,
        "mat1 and mat2|size mismatch|shapes|reduction dim",
        planned,
        0,
        sample=torch.zeros(2, SIZE + 1, dtype=torch.bfloat16),
    )
    refused(deepspeed.DeepSpeedConfigError, "stage", planned, 7)


def pipeline():
    layers = [torch.nn.Linear(SIZE, SIZE) for _ in range(2)]
    return PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)


def _fail(error):
    raise error


class NotOfOneText(ValueError):
    """An error that its pickle does not make again."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_a_wrong_configuration_is_told_where_pydantic_is_imported():
    # Its class is pydantic's ValidationError, too, which is not made from a text.
    pydantic = pytest.importorskip("pydantic")
    error = refused(deepspeed.DeepSpeedConfigError, "stage", planned, 7)
    assert isinstance(error, pydantic.ValidationError) and error.errors()


def test_a_child_tells_its_result_its_error_or_its_end():
    assert run_apart(lambda a, b: {"sum": a + b}, 1, 2) == {"sum": 3}
    refused(ValueError, "^this one$", run_apart, _fail, ValueError("this one"))
    refused(PlanError, "KeyError: 'this one'", run_apart, _fail, KeyError("this one"))
    refused(ValueError, "^NotOfOneText: one and two$", run_apart, _fail, NotOfOneText("one", "two"))
    refused(PlanError, "(?i)pickle", run_apart, lambda: lambda: 1)
    refused(PlanError, "ended with signal 9 and no result", run_apart, lambda: os.kill(os.getpid(), 9))


def test_children_run_at_the_same_time_and_one_that_fails_ends_the_others():
    before = {child.pid for child in psutil.Process().children()}
    with mock.patch.object(os, "sched_getaffinity", return_value={0, 1}):
        assert run_each_apart(pow, [(2, n) for n in range(5)]) == [1, 2, 4, 8, 16]
        begun = time.monotonic()
        for rows in ([(ValueError("this one"),), (None,)], [(None,), (ValueError("this one"),)]):
            refused(ValueError, "^this one$", run_each_apart, _fail_or_sleep, rows)
        assert time.monotonic() - begun < 60
        assert {child.pid for child in psutil.Process().children()} == before


def test_children_that_wait_for_each_other_run_together(tmp_path):
    with mock.patch.object(os, "sched_getaffinity", return_value={0}):
        rows = [(str(tmp_path / "met"), number) for number in range(3)]
        assert run_each_apart(_meet, rows, together=True) == [0, 1, 2]


def _meet(path, number):
    store = torch.distributed.FileStore(path, 3)
    store.set(str(number), "here")
    for other in range(3):
        store.get(str(other))
    return number


def _fail_or_sleep(error):
    if error is None:
        time.sleep(120)
    raise error


def test_a_new_process_plans_where_autograd_works_in_no_child():
    with mock.patch.object(child, "_has_autograd", return_value=False):
        found = deepspeed.plan(layers(), settings(2), 4, "1GB", torch.zeros(2, SIZE), machine=RATES, ranks=[0])
        assert found.fits and found.peak_bytes == planned(2, dtype="fp32", ranks=[0]).peak_bytes
        pair = torch.zeros(2, SIZE), torch.zeros(2, SIZE)
        assert len(planned(0, world=2, dtype="fp32", model=lambda: pipeline, sample=pair).ranks) == 2
        unknown = refused(
            PlanError, "before the first backward, or use ds_plan", planned, 2, loss=lambda output: output
        )
        assert "cannot be sent to a new process" in str(unknown)


class TestMachine:
    def test_a_file_comes_back(self, tmp_path):
        RATES.save(tmp_path / "machine.json")
        assert Machine.of_jobs(tmp_path / "machine.json").flops == RATES.flops

    def test_other_files_are_refused(self, tmp_path):
        path = tmp_path / "machine.json"
        for text, words in {
            "{": "is not a machine file",
            '{"version": 9}': "of version 9",
            '{"version": 1, "a": 2}': "it has the keys a",
        }.items():
            path.write_text(text)
            refused(ValueError, words, Machine.of_jobs, path)

    def test_a_group_of_several_hosts_has_their_link(self):
        rates = Machine(**{**vars(RATES), "ranks_of_host": 2})
        inside, between = rates.link([0, 1]).time_of(10**9, 2), rates.link([1, 2]).time_of(10**9, 2)
        assert (inside, between) == (10**8 + 1000, 10**9 + 9000)


def test_a_model_that_looks_for_nan_or_checks_its_inputs():
    """Flags are true, and false where the model raises an error then."""

    class Careful(torch.nn.Module):
        def __init__(self, *checks):
            super().__init__()
            self.layer, self.checks = torch.nn.Linear(8, 8), checks

        def forward(self, x):
            for check, wanted in self.checks:
                if bool(check(x)) is not wanted:
                    raise ValueError(f"a value is not {wanted}")
            return self.layer(x).sum()

    def planned(*checks):
        config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam"}}
        return deepspeed.plan(Careful(*checks), config, 1, sample=torch.zeros(4, 8))

    nan, finite = (lambda x: x.isnan().any(), False), (lambda x: x.isfinite().all(), True)
    assert planned(nan).peak_bytes == planned(finite).peak_bytes > 0
    with pytest.raises(PlanError, match="raises ValueError: a value is not True") as caught:
        planned(finite, nan)
    assert "Flags that it asks for are true, or false where that is an error." in str(caught.value)
