"""The audit recomputes steps without sharding: silent when all is well, and it names what is wrong in the same step."""

import pytest

from deepspeed.zero.audit import AuditError
from engine_models import after_steps, difference, loss_on, net_engine, plain_net, train_engine, uses_extra
from harness import on_ranks, run_ranks
from refusals import refused
from runs import sgd


def make_engine(world, stage, accumulate=1, precision=None, steps=3, optimizer=None):
    zero = {"audit_steps": steps, "reduce_bucket_size": 300, "stage3_param_persistence_threshold": 20}
    return net_engine(world, stage, accumulate, client=optimizer, zero=zero, **(precision or {}))


PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


@pytest.mark.sample("values")
@pytest.mark.parametrize("client", [False, True], ids=["AdamW of ours", "SGD of torch"])
@pytest.mark.parametrize("precision", sorted(PRECISIONS))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_a_right_engine_passes_and_the_audit_ends(rank, world, stage, precision, client):
    engine = after_steps(
        make_engine(world, stage, 2, PRECISIONS[precision], optimizer=sgd if client else None), 5, rank, world
    )
    assert engine._auditing.audit is None


def body_fault(rank, world, stage, fault):
    engine = after_steps(make_engine(world, stage, accumulate=2), 1, rank, world)
    for micro in range(2):
        if fault == "stale parameter" and micro == 0 and rank == 1:
            next(p for p in engine.module.parameters() if p.numel() > 0 and p.requires_grad).data.mul_(1.001)
        engine.backward(loss_on(engine, 1, rank=2 * rank + micro, world=2 * world, extra=uses_extra(1)))
        if fault == "micro-batch" and micro == 0 and rank == 0:
            engine.core.clear_grads()
        if fault == "bucket" and micro == 1:
            for piece in engine.core.grads()[-2:]:
                piece.mul_(1.01)
        if fault == "skipped rank" and micro == 1:
            for piece in engine.core.grads():
                piece.sub_(piece / world)
        engine.step()


@pytest.mark.sample("values", 6)
@pytest.mark.parametrize(
    "fault, words",
    [
        ("micro-batch", "the gradient of parameter|gradient in the engine"),
        ("bucket", "the gradient of parameter '.*largest at element"),
        ("skipped rank", "the gradient of parameter"),
        ("stale parameter", "weights"),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_faults_are_named_in_their_step(stage, fault, words):
    refused(AuditError, words, run_ranks, 2, body_fault, stage, fault)


@on_ranks(2, env={"DS_AUDIT": "1"})
def test_the_environment_turns_it_on(rank, world):
    engine = make_engine(world, 2, steps=0)
    assert engine._auditing.audit is not None
    losses, _ = train_engine(engine, 3, rank, world)
    assert (engine._auditing.audit is None) and difference(engine.module, plain_net(3).model) < 1e-6
