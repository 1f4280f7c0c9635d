"""A step of an engine on a device lets its host wait once, for the norm, and not before the update."""

import pytest
import standin
import standin_kernels
import torch

import deepspeed
import fake_nccl
from harness import run_ranks
from models import two_layers
from runs import engine_of, settings, together

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")

WARMUP = 3  # steps; from the third one on the throughput timer counts
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}


def waits_of_steps(rank, world, stage):
    """Returns the counts of the device and the stacks of the host's waits in each of two steps, from the forward to the
    end; the number of waits before the schedule moves, which comes before the update; the rate and the speed; the
    faults; whether this process has memory that it shares with other ranks."""
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    standin.choose(1, lazy=True)
    more = {"gradient_clipping": 1.0, "scheduler": SCHEDULE, "steps_per_print": 1}
    engine = engine_of(two_layers(), settings(stage, dtype="bf16", **more))
    x = torch.ones(2, 6, device=engine.device, dtype=torch.bfloat16)
    move, before, found = engine.lr_scheduler.step, [], []

    def moves():
        before.append(standin.counts()["host waits"])
        move()

    engine.lr_scheduler.step = moves
    for _ in range(WARMUP + 2):
        together(0)
        standin.reset_counts(stacks=True)
        engine.backward(engine(x).float().square().mean())
        engine.step()
        found.append((standin.counts(), standin.host_waits()))
    rates = engine.get_lr(), engine.tput_timer.avg_samples_per_sec()
    shares = any("memfd:deepspeed" in line for line in open("/proc/self/maps"))
    engine.destroy()
    return found[WARMUP:], before[WARMUP:], rates, standin.faults_at_end(), shares


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_wait_in_a_step(stage, world, tmp_path):
    env = {"DS_STANDIN_STACKS": "python", "DS_STANDIN_KERNELS": standin_kernels.library_path()}
    if world > 1:
        env["DS_STANDIN_NCCL"] = fake_nccl.build(tmp_path)
    for found, before, (rate, speed), faults, shares in run_ranks(
        world, waits_of_steps, stage, init=True, fresh=True, env=env
    ):
        assert rate == [pytest.approx(0.01 * (WARMUP + 1) / 10)] and speed > 0 and faults == []
        for counts, stacks in found:
            assert len(stacks) == 1 and "stepping.py" in stacks[0], "\n\n".join(stacks)
            assert (counts["host waits"], counts["blocking copies"]) == (1, 0)
            if stage == 0:  # the bucket, and whether kernels have failed: the flags go from host to host
                assert counts["collectives"] == (2 if world == 2 else 0)
        assert before == [0, 0]
        assert shares == (world == 2), "hosts of one machine exchange through its memory"
