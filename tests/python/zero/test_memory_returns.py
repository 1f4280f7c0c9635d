"""Memory that comes back: of engines that nobody holds any more, and of parameters that were gathered once."""

import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import deepspeed
from deepspeed.zero import GatheredParameters
from deepspeed.zero.gathers import linear
from runs import engine_of, settings, take_step, weight_list

WIDTH, LAYERS = 32, 4


def memory(tensors):
    return [StorageWeakRef(t.untyped_storage() if hasattr(t, "untyped_storage") else t.storage()) for t in tensors]


def gone(refs):
    return all(ref.expired() for ref in refs)


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def make_engine(model, stage, bf16=False, train=True):
    model.requires_grad_(train)
    zero = {"stage3_param_persistence_threshold": WIDTH + 1}
    made = settings(stage, dtype="bf16" if bf16 else "fp32", optimizer="AdamW" if train else None, zero=zero)
    return engine_of(model, made)


def use(engine, bf16, train):
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16 if bf16 else torch.float32)
    for _ in range(2):
        loss = engine(x).float().square().sum()
        if train:
            take_step(engine, loss)


def held_by(engine):
    """The buffers of an engine. Weights in fp32 are the masters themselves and stay the model's."""
    core = engine.core
    found = {"gradients": memory(core.grads()), "states": memory(core.slots(0) + core.slots(1))}
    if next(engine.module.parameters()).dtype != torch.float32:
        found["masters"] = memory(core.masters())
    return found


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage, bf16", [(0, False), (0, True), (1, True), (2, True), (3, False), (3, True)])
def test_a_dropped_engine_frees_its_memory_and_leaves_the_model(stage, bf16):
    model = make_model()
    engine = make_engine(model, stage, bf16)
    use(engine, bf16, True)
    buffers, alive, core, function = (
        held_by(engine),
        weakref.ref(engine),
        weakref.ref(engine.core),
        torch.nn.functional.linear,
    )
    weights = memory([p.ds_handle.shard for p in model.parameters()] if stage == 3 else [])
    values = weight_list(model)
    del engine
    gc.collect()
    assert alive() is None and core() is None
    assert {what: gone(refs) for what, refs in buffers.items()} == dict.fromkeys(buffers, True)
    assert not any(ref.expired() for ref in weights)
    assert torch.nn.functional.linear is function is linear._torch_linear
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    with GatheredParameters(list(model.parameters())):  # the model is whole and can be used, and trained again
        assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values))
    again = make_engine(model, stage, bf16)
    use(again, bf16, True)
    del again
    gc.collect()

    shards = memory([p.ds_handle.shard if stage == 3 else p for p in model.parameters()])
    del model, values
    gc.collect()
    assert gone(shards) and gone(weights)


def test_a_frozen_model_at_stage_3_goes_with_its_last_user():
    model = make_model()
    engine = make_engine(model, 3, train=False)
    use(engine, False, False)
    shards, core = memory([p.ds_handle.shard for p in model.parameters()]), weakref.ref(engine.core)
    del engine
    gc.collect()
    assert core() is None and not gone(shards)
    del model
    gc.collect()
    assert gone(shards)


def test_parameters_of_zero_init_go_with_the_model():
    with deepspeed.zero.Init():
        model = make_model()
    shards = memory([p.ds_handle.shard for p in model.parameters()])
    del model
    gc.collect()
    assert gone(shards)


def test_an_optimizer_that_somebody_holds_goes_on_without_the_engine():
    engine = make_engine(make_model(), 3)
    use(engine, False, True)
    optimizer = engine.optimizer
    states = memory(engine.core.slots(0))
    del engine
    gc.collect()
    assert not gone(states) and len(optimizer.state_names()) == 2
    del optimizer
    gc.collect()
    assert gone(states)


def test_an_engine_of_one_rank_gathers_into_no_memory():
    model = make_model()
    gatherer = make_engine(model, 3).core.gatherer
    with GatheredParameters(list(model.parameters())):
        assert all(p.data_ptr() == p.ds_tensor.data_ptr() for p in model.parameters())
    assert gatherer.pool_bytes == 0


def test_gathering_a_whole_model_keeps_two_units():
    with deepspeed.zero.Init():
        model = make_model()
    gatherer = model[0].weight.ds_access.gatherer
    whole = 4 * sum(p.ds_numel for p in model.parameters())
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    gatherer.empty_cache()
    with GatheredParameters(list(model.parameters())):
        pass
    assert 0 < gatherer.pool_bytes <= 2 * layer < whole
