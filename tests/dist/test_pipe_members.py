"""Members of a PipelineEngine that scripts and clients call: evaluation, data, schedules of their own, precisions."""

import functools
import itertools
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed
import pipe_models as models
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from harness import on_ranks
from models import samples
from refusals import refused
from runs import DTYPES, engine_of, together

MICRO_BATCHES = 4
HALF_ON_CPU = deepspeed.get_accelerator().is_fp16_supported()


class Counting:
    """An iterator that knows how often it was asked."""

    def __init__(self, items):
        self.items, self.taken = iter(items), 0

    def __iter__(self):
        return self

    def __next__(self):
        self.taken += 1
        return next(self.items)


@on_ranks(3, init=True)
def test_plan_and_measured(rank, world):
    engine = models.engine_of("plain", world, world, MICRO_BATCHES)
    x, y = models.micro_batch("plain", 0, 0, 0)
    refused(RuntimeError, "does not know the inputs yet", engine.pipe_plan)
    for batch in range(10):
        engine.train_batch(itertools.repeat((x, y)))
        plan = engine.pipe_plan()
        assert plan.schedule == "1f1b" and len(plan.stages) == world and (plan.measured is None) == (batch < 9)
    measured = engine.pipe_plan().measured
    assert measured["seconds"] > 0 and 0 <= measured["bubble"] < 1
    sent = MICRO_BATCHES * x.numel() * 4 * ((rank > 0) + (rank < world - 1))
    assert measured["bytes_sent"] == plan.stages[rank].bytes_sent == sent


@on_ranks(3, init=True)
def test_members(rank, world):
    engine = models.engine_of("plain", world, world, MICRO_BATCHES)
    assert isinstance(engine, deepspeed.PipelineEngine) and isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine.is_first_stage() == (rank == 0) and engine.is_last_stage() == (rank == world - 1)
    assert engine.get_pipeline_parallel_rank() == engine.stage_id == engine.grid.get_stage_id() == rank
    assert engine.micro_batches == MICRO_BATCHES and engine.get_additional_losses() is None
    assert engine.grid is engine.module.mpu() and engine.mpu is engine.grid
    assert set(engine.pipe_buffers) >= {"inputs", "labels", "outputs", "output_tensors"}
    data = Counting(models.batches("plain", 3, MICRO_BATCHES, 0))
    loss = engine.train_batch(data_iter=data)
    assert torch.is_tensor(loss) and loss.dim() == 0
    takes = engine.is_first_stage() or engine.is_last_stage()
    assert data.taken == (MICRO_BATCHES if takes else 0)
    engine.set_train_batch_size(2 * MICRO_BATCHES * models.MICRO)
    assert engine.micro_batches == engine.gradient_accumulation_steps() == 2 * MICRO_BATCHES
    engine.set_dataiterator(data)
    engine.train_batch()
    assert data.taken == (3 * MICRO_BATCHES if takes else 0)
    engine.set_train_batch_size(MICRO_BATCHES * models.MICRO)
    engine.set_batch_fn(lambda item: (item["x"], item["y"]))
    x, y = models.micro_batch("plain", 0, 0, 0)
    engine.set_dataloader([{"x": x, "y": y}] * MICRO_BATCHES)
    one = engine.train_batch().item()
    engine.set_batch_fn(None)
    engine.reset_activation_shape()
    engine.set_has_attention_mask(True)
    engine.tput_log("nothing")
    engine.log_for_device("nothing")
    for _ in range(9):
        last = engine.train_batch(itertools.repeat((x, y))).item()
    assert last < one


@pytest.mark.parametrize(
    "stages, world, down_and_up", [(1, 1, False), (2, 2, False), (2, 4, False), (3, 3, False), (2, 2, True)]
)
@on_ranks(init=True)
def test_eval_batch(rank, world, stages, down_and_up):
    options = {"options": {"virtual_stages": 2, "placement": "v"}, "pipeline": {"schedule": "zb-v"}}
    engine = models.engine_of("plain", stages, world, MICRO_BATCHES, **(options if down_and_up else {}))
    assert engine.is_last_stage() == (engine.stage_id == (0 if down_and_up else stages - 1))
    copy, copies = engine.grid.get_data_parallel_rank(), world // stages
    own = list(models.batches("plain", 1, MICRO_BATCHES, copy))
    engine.train_batch(iter(own))
    before, kept = models.parameters_of(engine), engine.data_iterator
    layers = models.built("plain", models.states_of(models.plain("plain", 1, MICRO_BATCHES, copies).model))

    def output(item):
        return functools.reduce(lambda x, layer: layer(x), layers, item[0])

    with torch.no_grad():
        logits = [output(item) for item in own]
        losses = [models.loss_of("plain")(out, item[1]) for out, item in zip(logits, own)]
        everybody = [models.batches("plain", 1, MICRO_BATCHES, one) for one in range(copies)]
        everybody = [(output(item), item[1]) for one in everybody for item in one]
        mean = torch.stack([models.loss_of("plain")(*pair) for pair in everybody]).mean()
        everything = torch.stack([out for out, _ in everybody]).sum(dim=0)

    def close(found, wanted):
        assert torch.allclose(found, wanted, atol=1e-5), (found, wanted)

    close(engine.eval_batch(iter(own)), mean)
    assert engine.module.training
    last = engine.is_last_stage()
    assert (engine.eval_batch(iter(own), bcast_loss=False) is not None) == last
    close(engine.eval_batch(iter(own), reduce_output="sum"), mean * MICRO_BATCHES * copies)
    summed = engine.eval_batch(iter(own), compute_loss=False, reduce_output="sum")
    engine.module.loss_fn, loss_fn = lambda out, labels: (out[0], out), engine.module.loss_fn
    pair = engine.eval_batch(iter(own), bcast_loss=False)
    engine.module.loss_fn = loss_fn
    assert (summed is not None) == (pair is not None) == last
    if last:
        close(summed, everything)
        close(pair[0], everything[0] / MICRO_BATCHES / copies)
        close(pair[1], everything / MICRO_BATCHES / copies)
    found = engine.eval_batch(iter(own), reduce_output=None)
    close(torch.stack(found), torch.stack(losses))
    found, outputs = engine.eval_batch(iter(own[:1]), return_logits=True, num_micro_batches=1)
    assert (outputs is not None) == last
    if last:
        close(outputs, logits[0])
    found = engine.eval_batch(iter(own), compute_loss=False, reduce_output=None)
    assert (found is not None) == last
    if last:
        close(torch.stack(found), torch.stack(logits))
    after = models.parameters_of(engine)
    assert engine.data_iterator is kept and all(torch.equal(before[name], after[name]) for name in before)
    assert engine.train_batch(iter(own)).item() > 0


SAMPLES = samples(32, lambda draws: tuple(torch.randn(4, models.WIDTH, generator=draws) for _ in range(2)))


@on_ranks(2, init=True)
def test_training_data(rank, world):
    module = models.module_of("plain", 2, world)
    engine, _, loader, _ = deepspeed.initialize(
        model=module, config=models.config_of(MICRO_BATCHES), training_data=SAMPLES
    )
    assert loader is not None
    losses = [engine.train_batch().item() for _ in range(12)]  # three epochs: the loader repeats itself
    assert losses[-1] < losses[0]
    first, *others = together(losses)
    assert all(one == first for one in others)


# ---- clients' schedules ----------------------------------------------------------------------------------------------
class BackwardOnlyPass(schedule.BufferOpInstruction):
    plan_op = "BackwardInputPass"


class WeightPass(schedule.BufferOpInstruction):
    plan_op = "BackwardWeightPass"


class LateWeights(schedule.TrainSchedule):
    """1F1B whose weights come one pass later, as zero-bubble schedules of clients."""

    def num_pipe_buffers(self):
        return 2 * super().num_pipe_buffers()

    def steps(self):
        waiting, seen, numbers = [], 0, {}
        buffers = self.num_pipe_buffers()
        for step in super().steps():
            new = []
            for command in step:
                kind = type(command)
                if hasattr(command, "buffer_id"):
                    if kind is (schedule.LoadMicroBatch if self.is_first_stage else schedule.RecvActivation):
                        numbers[command.buffer_id], seen = seen % buffers, seen + 1
                    command = kind(numbers[command.buffer_id])
                if kind is schedule.BackwardPass:
                    new.append(BackwardOnlyPass(command.buffer_id))
                    waiting.append(WeightPass(command.buffer_id))
                    continue
                if kind in (schedule.ReduceTiedGrads, schedule.ForwardPass):
                    new += waiting
                    waiting = []
                new.append(command)
            yield new


def _split(engine, buffer_id):
    engine.seen.append("input")
    engine._exec_backward_input_pass(buffer_id)


def _weights(engine, buffer_id):
    engine.seen.append("weight")
    engine._exec_backward_weight_pass(buffer_id)


class ClientsEngine(PipelineEngine):
    _INSTRUCTION_MAP = dict(PipelineEngine._INSTRUCTION_MAP)


ClientsEngine._INSTRUCTION_MAP.update({BackwardOnlyPass: _split, WeightPass: _weights})


@pytest.mark.parametrize("kind", ["plain", "tied"])
@on_ranks(2, init=True)
def test_clients_schedule(rank, world, kind):
    module = models.module_of(kind, world, world)
    config = models.config_of(MICRO_BATCHES)
    engine = ClientsEngine(args=None, model=module, mpu=module.mpu(), config=config)
    engine.seen = []
    with mock.patch.object(schedule, "TrainSchedule", LateWeights):
        losses = [engine.train_batch(models.batches(kind, 1, MICRO_BATCHES, 0)).item()]
        losses.append(engine.train_batch(itertools.islice(models.batches(kind, 2, MICRO_BATCHES, 0), 4, None)).item())
    assert engine.seen.count("input") == engine.seen.count("weight") == 2 * MICRO_BATCHES
    models.compare(
        engine, losses, models.parameters_of(engine), models.plain(kind, 2, MICRO_BATCHES, 1, clip=1.0), 2e-6
    )

    class Unknown(schedule.PipeInstruction):
        pass

    class Odd(schedule.PipeSchedule):
        def steps(self):
            yield [Unknown()]

    refused(
        RuntimeError, "does not know the instruction Unknown", engine._exec_schedule, Odd(MICRO_BATCHES, world, rank)
    )


# ---- precisions ------------------------------------------------------------------------------------------------------
FP16_ON_CPU = pytest.mark.skipif(not HALF_ON_CPU, reason="this torch has no fp16 matrix product on this device")


@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("stage, world", [(0, 2), (1, 4), (2, 4), (3, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=FP16_ON_CPU)])
@pytest.mark.sample("values")
@on_ranks(init=True)
def test_sixteen_bits(rank, world, dtype, stage, kind):
    narrow = {"fp16": {"enabled": True, "initial_scale_power": 8}} if dtype == torch.float16 else DTYPES["bf16"]
    engine = models.engine_of(kind, 2, world, MICRO_BATCHES, stage, gradient_clipping=0.5, **narrow)
    data = models.batches(kind, 4, MICRO_BATCHES, engine.grid.get_data_parallel_rank(), dtype)
    losses = [engine.train_batch(data).item() for _ in range(4)]
    wanted = models.plain(kind, 4, MICRO_BATCHES, world // 2, clip=0.5).means
    assert all(abs(a - b) < 0.05 * max(1.0, abs(b)) for a, b in zip(losses, wanted)), (losses, wanted)
    found = together((losses, float(engine.loss_scale()), engine.skipped_steps), models.parameters_of(engine))
    assert all(told == found[0][0] for told, _ in found)
    if kind == "tied":
        tied = [state[name] for _, state in found for name in ("0.weight", "7.weight") if name in state]
        assert all(torch.equal(one, tied[0]) for one in tied)


@on_ranks(4, init=True)
def test_stages_without_weights(rank, world):
    layers = [nn.Tanh(), nn.Linear(models.WIDTH, models.WIDTH), nn.Tanh(), torch.relu]
    module = PipelineModule(layers, num_stages=4, loss_fn=models.loss_of("plain"), partition_method="uniform")
    engine = engine_of(module, models.config_of(MICRO_BATCHES, gradient_clipping=0.1))
    losses = [engine.train_batch(models.batches("plain", 1, MICRO_BATCHES, 0)).item() for _ in range(3)]
    assert losses[2] < losses[0]
    first, *others = together(losses)
    assert all(one == first for one in others)
