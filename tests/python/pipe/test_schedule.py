"""Schedules as scripts see them, and plans made of clients' own."""

import pytest

from deepspeed._native import _C
from deepspeed.pipe import schedule
from deepspeed.pipe.schedule import plan_of
from refusals import refused

GRID = [(m, p) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 8, 13)]


def kinds(step):
    return [type(instruction).__name__ for instruction in step]


def test_inference_one_stage():
    made = schedule.InferenceSchedule(micro_batches=4, stages=1, stage_id=0)
    assert (made.num_micro_batches, made.num_stages, made.stage) == (4, 1, 0)
    steps = list(made)
    assert [kinds(step) for step in steps] == [["LoadMicroBatch", "ForwardPass"]] * 4
    assert all(step[0].buffer_id == step[1].buffer_id for step in steps)


@pytest.mark.parametrize("micro_batches", [1, 3, 8, 10])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_inference_steps(micro_batches, stages):
    for stage in range(stages):
        made = schedule.InferenceSchedule(micro_batches, stages, stage)
        steps = list(made)
        assert len(steps) == micro_batches + stages - 1
        for number, step in enumerate(steps):
            works, sends = stage <= number < stage + micro_batches, stage < number <= stage + micro_batches
            found = kinds(step)
            assert found.count("ForwardPass") == works and found.count("RecvActivation") == (works and stage > 0)
            assert found.count("LoadMicroBatch") == (works and stage in (0, stages - 1))
            assert found.count("SendActivation") == (sends and stage < stages - 1)
            assert all(instruction.buffer_id < made.num_pipe_buffers() for instruction in step)


def test_train_one_stage():
    steps = list(schedule.TrainSchedule(micro_batches=3, stages=1, stage_id=0))
    assert [kinds(step) for step in steps] == [
        *[["LoadMicroBatch", "ForwardPass"], ["BackwardPass"]] * 2,
        ["LoadMicroBatch", "ForwardPass"],
        ["BackwardPass", "ReduceTiedGrads", "ReduceGrads", "OptimizerStep"],
    ]


@pytest.mark.parametrize("micro_batches,stages", GRID)
def test_train_steps(micro_batches, stages):
    for stage in range(stages):
        made = schedule.TrainSchedule(micro_batches, stages, stage)
        steps = list(made)
        assert len(steps) == 2 * (micro_batches + stages - 1)
        found = [name for step in steps for name in kinds(step)]
        assert found[-3:] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
        for name, wanted in {
            "ForwardPass": True,
            "BackwardPass": True,
            "LoadMicroBatch": stage in (0, stages - 1),
            "RecvActivation": stage > 0,
            "SendGrad": stage > 0,
            "SendActivation": stage < stages - 1,
            "RecvGrad": stage < stages - 1,
        }.items():
            assert found.count(name) == wanted * micro_batches, name
        assert made.num_pipe_buffers() == max(2, min(stages - stage, micro_batches))
        buffers = {one.buffer_id for step in steps for one in step if hasattr(one, "buffer_id")}
        assert buffers <= set(range(made.num_pipe_buffers()))
        assert all(kinds(step).count("ForwardPass") + kinds(step).count("BackwardPass") <= 1 for step in steps)
    plan_of(schedule.TrainSchedule, micro_batches, stages).check()
    plan_of(schedule.InferenceSchedule, micro_batches, stages, trains=False).check()


def test_a_schedule_can_be_read_again():
    made = schedule.TrainSchedule(2, 2, 0)
    assert [kinds(step) for step in made] == [kinds(step) for step in made]
    assert kinds(next(iter(made))) == ["LoadMicroBatch", "ForwardPass"]


def test_data_parallel():
    steps = list(schedule.DataParallelSchedule(micro_batches=2, stages=1, stage_id=0))
    one = ["LoadMicroBatch", "ForwardPass", "BackwardPass"]
    assert [kinds(step) for step in steps] == [one, [*one, "ReduceGrads", "OptimizerStep"]]
    assert schedule.DataParallelSchedule(2, 1, 0).num_pipe_buffers() == 1


def test_instructions_show_their_arguments():
    load = schedule.LoadMicroBatch(3, shape=(2, 2))
    assert repr(load) == "LoadMicroBatch(buffer_id=3, shape=(2, 2))"
    assert (load.buffer_id, load.shape, load.name) == (3, (2, 2), "LoadMicroBatch")
    assert repr(schedule.OptimizerStep()) == "OptimizerStep()" and isinstance(load, schedule.PipeInstruction)


def test_a_stage_that_there_is_not():
    refused(ValueError, "stage_id 2: a pipeline of 2 stages has 0 to 1", schedule.TrainSchedule, 4, 2, 2)


# ---- clients' schedules ----------------------------------------------------------------------------------------------
class InputGradients(schedule.BufferOpInstruction):
    plan_op = "BackwardInputPass"


class WeightGradients(schedule.BufferOpInstruction):
    plan_op = "BackwardWeightPass"


class Note(schedule.PipeInstruction):
    pass


class SplitInTwo(schedule.PipeSchedule):
    """All forwards, then gradients of inputs, then of weights; own classes of instructions."""

    def num_pipe_buffers(self):
        return self.micro_batches

    def steps(self):
        for buffer in range(self.micro_batches):
            step = [] if self.is_first_stage else [schedule.RecvActivation(buffer)]
            step += [Note(), schedule.ForwardPass(self._buffer_idx(buffer))]
            yield step if self.is_last_stage else [*step, schedule.SendActivation(buffer)]
        for buffer in range(self.micro_batches):
            step = [] if self.is_last_stage else [schedule.RecvGrad(buffer)]
            step.append(InputGradients(buffer))
            yield step if self.is_first_stage else [*step, schedule.SendGrad(buffer)]
        yield [WeightGradients(buffer) for buffer in range(self.micro_batches)]


def test_a_clients_schedule_is_proven():
    plan = plan_of(SplitInTwo, 4, 3)
    plan.check()
    assert [act.op for act in plan.acts(0)].count("BackwardWeightPass") == 4


def test_a_clients_mistake_is_named():
    class Forgets(SplitInTwo):
        def steps(self):
            for number, step in enumerate(super().steps()):
                forgotten = number == 1 and self.stage_id == 0
                yield [one for one in step if not (forgotten and isinstance(one, schedule.SendActivation))]

    refused(
        ValueError, "schedule Forgets, rank 0, .*SendActivation of micro-batch 1 .* never", plan_of(Forgets, 3, 2).check
    )

    class Reads(SplitInTwo):
        def steps(self):
            yield [schedule.BackwardPass(0)]

    refused(ValueError, r"rank 0, step 0, BackwardPass\(buffer_id=0\): nothing has been put into", plan_of, Reads, 3, 2)

    class OneBuffer(schedule.TrainSchedule):
        def steps(self):
            for step in super().steps():
                for one in step:
                    one.buffer_id = 0
                yield step

    refused(
        ValueError, "rank 0, step 2, ForwardPass.*buffer 0 still holds micro-batch 0", plan_of(OneBuffer, 3, 2).check
    )


# ---- the native plan from Python -------------------------------------------------------------------------------------
def test_native_plan():
    assert _C.pipe.schedules() == ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
    plan = _C.pipe.schedule("zb-v", 3, 2, 7)
    plan.check()
    assert plan.shape.placement == "v" and plan.shape.rank_of(5) == 0 and plan.shape.virtual_stage(2, 1) == 3
    costs = plan.cost([_C.pipe.Part(activation_bytes=10, output_bytes=4)] * 6)
    assert 0 < costs.bubble < 0.3 and costs.ranks[0].peak_bytes > 0 and plan.timeline(costs, 40).count("\n") == 3
    chosen, cost = _C.pipe.fastest(_C.pipe.Shape(3, 1, 7), [_C.pipe.Part()] * 3)
    assert chosen.schedule == "zb-h1" and cost.bubble == pytest.approx(2 / 23)
    refused(
        ValueError,
        'there is no placement "w" of virtual stages: there are loop and v',
        _C.pipe.schedule,
        "inference",
        2,
        2,
        2,
        "w",
    )
    refused(IndexError, "there is no stage 3", plan.acts, 3)
