"""The conformance matrix: program x stage x world x type x accumulation, each against one plain process.

`make test` runs a sample in which each pair of values appears, `make test-all` every case.
"""

import pytest
import torch

from cases import Case, over
from claims import equals_plain, started
from deepspeed.ops.adam import Adam8bit
from harness import on_ranks
from programs import MODELS, OPTIMIZERS, PROGRAMS
from refusals import refused
from runs import take_step
from zero_training import loss_on


@over("stage", "accumulate", "dtype", "world", name=list(MODELS), cover="pairs")
@on_ranks()
def test_models_with_a_trap(rank, world, name, stage, dtype, accumulate):
    user_backward = (stage + list(MODELS).index(name) + (accumulate > 1)) % 2 == 1
    equals_plain(rank, name, Case(stage, world, dtype, accumulate, user_backward))


FROZEN = [(3, name) for name in PROGRAMS if name.startswith("frozen layers")]
FROZEN += [(stage, name) for stage in (2, 3) for name in PROGRAMS if name.startswith("adapters")]


@pytest.mark.parametrize("stage, name", FROZEN)
@on_ranks(2)
def test_frozen_layers_in_checkpointed_segments(rank, world, stage, name):
    zero = {"reduce_bucket_size": 500_000_000, "stage3_param_persistence_threshold": 0}
    equals_plain(rank, name, Case(stage, world, zero=zero))


@pytest.mark.any_device
@over("stage", dtype=["fp32", "bf16"], name=list(OPTIMIZERS), at_least=12)
@on_ranks(2)
def test_native_optimizers(rank, world, name, stage, dtype):
    engine = equals_plain(rank, name, Case(stage, world, dtype, zero={"audit_steps": 2}))
    assert engine.optimizer is engine.basic_optimizer or engine.optimizer.stepping.fused
    assert engine._auditing.audit is None  # two steps were compared with whole tensors


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@on_ranks(2)
def test_eight_bit_states_work_without_zero_and_are_refused_with_it(rank, world, dtype):
    def engine_at(stage):
        program = OPTIMIZERS["FusedAdam, L2"]._replace(
            optimizer=lambda params: Adam8bit(params, 3e-3, min_8bit_size=16)
        )
        return started(program, Case(stage, world, dtype))

    for stage in (1, 3):
        refused(ValueError, "Adam8bit packs the states.*use FusedAdam.*stage.: 0", engine_at, stage)
    engine = engine_at(0)
    losses = [take_step(engine, loss_on(engine, 0, rank)) for _ in range(40)]
    assert any(state["exp_avg"].dtype == torch.uint8 for state in engine.basic_optimizer.state.values())
    assert (losses[0] / losses[-1]) > 2
