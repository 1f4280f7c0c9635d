"""Failures on one stage of a pipeline: all ranks end soon, with one message, and nothing has moved."""

import itertools
import json
import os
import pathlib
import signal
import time
from unittest import mock

import pytest
import torch

import deepspeed
import pipe_models as models
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe.schedule import SendActivation, TrainSchedule
from deepspeed.runtime.pipe import schedule as published_schedule
from harness import RankError, on_ranks, run_ranks
from refusals import refused
from runs import raised
from sampling import every_case

pytestmark = pytest.mark.any_device
MICRO_BATCHES, SOON = 4, 5.0
TIMEOUT, SLOW = 6.0, 11.0  # of a rank that others give up waiting for, a moment after the timeout


class Trap(models.Block):
    """Goes wrong at the call that ``armed`` names."""

    armed = {}

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        fault = self.armed.get(self.calls)
        if fault == "raise":
            raise ZeroDivisionError("the layer is broken")
        if fault == "kill":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "slow":
            self.armed.clear()  # this layer alone
            time.sleep(SLOW)
        return super().forward(x)


def engine_of(stages, copies, layer=Trap, **options):
    module = PipelineModule(
        [LayerSpec(layer) for _ in range(4)], num_stages=stages, loss_fn=models.loss_of("plain"), seed_layers=True,
        partition_method="uniform", **options,
    )  # fmt: skip
    return deepspeed.initialize(model=module, config=models.config_of(MICRO_BATCHES))[0]


def _fails(rank, world, fault, at, copies, folder):
    if fault == "slow":
        os.environ["DS_COMM_TIMEOUT_S"] = str(TIMEOUT)  # of a process of this run alone
    engine = engine_of(world // copies, copies)
    good = list(models.batches("plain", 1, MICRO_BATCHES, engine.grid.get_data_parallel_rank()))
    engine.train_batch(iter(good))
    before = models.parameters_of(engine)
    here = engine.stage_id == at and engine.grid.get_data_parallel_rank() == 0
    data = good
    if fault == "dry" and here:
        data = good[:2]
    elif fault == "shape" and here:
        data = [*good[:2], *[(x, y[:1, :1, :3]) for x, y in good[2:]]]
    elif fault in ("raise", "kill", "slow") and here:
        Trap.armed = {MICRO_BATCHES + 3: fault}  # of each layer of this rank: the first one is there first
    begin = time.monotonic()
    kind, text = raised(engine.train_batch, iter(data)) or ("", "nothing")
    seconds = time.monotonic() - begin
    after = models.parameters_of(engine)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    Trap.armed = {}
    told = {"text": text, "kind": kind, "seconds": seconds, "moved": moved, "here": here}
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    if fault == "kill":
        time.sleep(1.0)  # the harness ends the others when it has seen who died


FAULTS = [("shape", 1), *((fault, at) for fault in ("dry", "raise", "kill", "slow") for at in (0, 1))]
WITH_COPIES = [("raise", 1), ("kill", 1)]  # of `make test`: four processes each


@pytest.mark.sample("values")
@pytest.mark.parametrize(
    "fault, at, copies",
    [(*fault, 1 + (fault in WITH_COPIES)) for fault in FAULTS if every_case() or fault[0] != "slow"]
    + [(*fault, 1 + (fault not in WITH_COPIES)) for fault in FAULTS if every_case()],
)
def test_all_ranks_end(fault, at, copies, tmp_path):
    try:
        run_ranks(2 * copies, _fails, fault, at, copies, str(tmp_path), init=True, grace=15)
        assert fault != "kill"
    except RankError:
        assert fault == "kill"
    told = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert len(told) == 2 * copies - (fault == "kill")
    rank = at * copies
    for one in told:
        assert one["moved"] == [] and one["seconds"] < (SLOW if fault == "slow" else 0.0) + SOON, one
        assert f"stage {at}, rank {rank}" in one["text"], one
    assert len({one["text"] for one in told}) == 1
    text = told[0]["text"]
    if fault == "raise":
        assert f"layer {2 * at} (Trap), micro-batch 2, ForwardPass: ZeroDivisionError: the layer is broken" in text
        assert [one["kind"] for one in told if one["here"]] == ["ZeroDivisionError"]
    elif fault == "dry":
        assert "micro-batch 2, LoadMicroBatch" in text and "at its end after 2 of 4 micro-batches" in text
    elif fault == "shape":
        assert "micro-batch 2, ForwardPass" in text
    elif fault == "kill":
        assert f"has ended in the middle of a batch, in layer {2 * at} (Trap), micro-batch 2, ForwardPass" in text
    elif fault == "slow":
        assert f"stage {at}, rank {rank}: layer {2 * at} (Trap), micro-batch 2, ForwardPass" in text


class Shortened(TrainSchedule):
    """Forgets a message."""

    def steps(self):
        for number, step in enumerate(super().steps()):
            yield [one for one in step if not (isinstance(one, SendActivation) and number == 2)]


@on_ranks(2, init=True)
def test_bad_input(rank, world):
    engine = engine_of(2, 1, models.Block)
    good = list(models.batches("plain", 1, MICRO_BATCHES, 0))
    for name in ("forward", "backward", "step"):
        refused(RuntimeError, f"a pipeline has no {name}.. of one rank", getattr(engine, name), torch.ones(1))
    with pytest.raises(RuntimeError, match="inside of torch.no_grad"), torch.no_grad():
        engine.train_batch(iter(good))
    refused(RuntimeError, f"stage {rank} has no data: pass data_iter=", engine.train_batch)
    refused(
        NotImplementedError,
        "reduce_output='max'.: 'avg', 'sum' or None",
        engine.eval_batch,
        iter(good),
        reduce_output="max",
    )
    with mock.patch.object(published_schedule, "TrainSchedule", Shortened):
        refused(ValueError, "pipeline schedule Shortened, rank 0", engine.train_batch, iter(good))
    assert engine.train_batch(iter(good)).item() > 0

    for words, kind, pipeline, options in (
        ("pipeline.stages is 3, but the PipelineModule has 2", ValueError, {"stages": 3}, None),
        ("pipeline.partition is 'uniformly', but the PipelineModule", ValueError, {"partition": "uniformly"}, None),
        ("pipeline.schedule", deepspeed.DeepSpeedConfigError, {"schedule": "1f2b"}, None),
        ("zb-v", ValueError, {"schedule": "zb-v"}, None),
        ("placement='v'", ValueError, {"schedule": "zb-v"}, {"virtual_stages": 2}),
    ):
        refused(kind, words, models.engine_of, "plain", 2, 2, 4, options=options, pipeline=pipeline)
    refused(
        AssertionError,
        "leave mpu= out",
        deepspeed.initialize,
        model=engine.module,
        mpu=engine.grid,
        config=models.config_of(4),
    )


def _bad_item(case, match):
    module = {
        "no pair": lambda: engine_of(2, 1, models.Block),
        "no scalar": lambda: PipelineModule([torch.tanh] * 2, num_stages=2, loss_fn=lambda out, labels: out - labels),
        "no tensor": lambda: PipelineModule([lambda x: "text", torch.tanh], num_stages=2, loss_fn=lambda a, b: a.sum()),
        "no loss": lambda: PipelineModule([torch.tanh] * 2, num_stages=2, loss_fn=lambda out, labels: (out, labels)),
    }[case]()
    engine = module
    if isinstance(module, PipelineModule):
        module.add_module("weight", torch.nn.Linear(1, 1))
        engine = deepspeed.initialize(model=module, config=models.config_of(MICRO_BATCHES))[0]
    data = itertools.repeat((torch.ones(2, 3),) if case == "no pair" else (torch.ones(2, 3), torch.ones(2, 3)))
    refused(Exception, match, engine.eval_batch if case == "no loss" else engine.train_batch, data)


@on_ranks(2, init=True)
def test_bad_items(rank, world):
    cases = [
        ("no pair", "the data iterator gave a tuple of 1: a micro-batch is a pair"),
        ("no scalar", r"stage 1, rank 1.*loss_fn returned a tensor of shape \(2, 3\): train_batch.. needs a scalar"),
        ("no loss", r"stage 1, rank 1.*TypeError: eval_batch.*the loss is tuple.*pass bcast_loss=False"),
        ("no tensor", r"stage 0, rank 0, layer 0 \(<lambda>\), micro-batch 0.*returned str"),
    ]
    for case, match in cases:
        _bad_item(case, match)


@pytest.mark.parametrize("alone", [0, 1])
@on_ranks(2, init=True)
def test_evaluation_on_one_stage_alone(rank, world, alone):
    engine = engine_of(2, 1, models.Block)
    data = itertools.cycle(models.batches("plain", 1, MICRO_BATCHES, 0))

    def go_on():
        engine.train_batch(data)
        if rank == alone:
            engine.eval_batch(data)
        engine.train_batch(data)

    begin = time.monotonic()
    refused(RuntimeError, "stage . has sent (activations|gradients) of .*eval_batch.* alike", go_on)
    assert time.monotonic() - begin < 2 * SOON
