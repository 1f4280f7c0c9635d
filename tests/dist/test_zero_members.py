"""Members of the sharded optimizers, of their parameters and of the engine that scripts reach for."""

import copy

import pytest
import torch

import deepspeed
from deepspeed.engine.sparse_tensor import SparseTensor
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import get_state_devices
from deepspeed.runtime.zero.parameter_offload import ensure_zero_ordered_dict
from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param
from engine_models import after_steps, batch, loss_of, loss_on, make_net, net_engine, train_engine
from harness import on_ranks
from models import Parts, seeded
from refusals import refused
from runs import last_of, take_step, together
from runs import weight_list as values


def make_engine(world, stage, model=None, accumulate=1, **more):
    zero = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 20}
    return net_engine(world, stage, accumulate, model, zero=zero, **more)


# ---- offload_states ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage, bf16", [(1, True), (2, False), (2, True), (3, True)])
@on_ranks(2)
def test_states_go_and_come_back_bit_by_bit(rank, world, stage, bf16):
    results = []
    for away in (False, True):
        engine = make_engine(world, stage, bf16={"enabled": bf16})
        engine.optimizer.states.even_on_host = True  # what a GPU does, on the host's own memory
        train_engine(engine, 2, rank, world)
        if away:
            # At stage 3 the slices lie in shared memory here, which has a fixed size.
            kinds = [k for k in OffloadStateTypeEnum if stage < 3 or k.name in ("optim_states", "lp_grads")]
            held = sum(engine.core.held_bytes().values())
            held += sum(p.numel() * p.element_size() for p in engine.module.parameters() if not p.requires_grad)
            engine.offload_states(include=set(kinds), pin_memory=False)
            moved = sum(size for planes in engine.optimizer.states.away.values() for _, size, *_ in planes)
            assert 0 < moved <= held
            assert get_state_devices(engine, OffloadStateTypeEnum.optim_states) == {torch.device("cpu")}
            assert get_state_devices(engine, OffloadStateTypeEnum.contiguous_grad_buffer) == set()
            param = next(p for p in engine.module.parameters() if p.requires_grad)
            refused(RuntimeError, "engine.step.*reload_states", engine.step)
            refused(RuntimeError, "save_checkpoint.*reload_states", engine.save_checkpoint, "/nowhere")
            refused(RuntimeError, "reload_states", deepspeed.utils.safe_get_full_optimizer_state, param, "exp_avg")
            if stage < 3:
                refused(RuntimeError, "engine.forward.*lp_params", engine, batch(0)[0])
                refused(RuntimeError, "hp_params", safe_get_full_fp32_param, param)
            engine.offload_states(include=set(kinds), pin_memory=False)  # again: nothing more to move
            engine.reload_states()
            assert not engine.optimizer.states.away
        results.append(last_of(after_steps(engine, 2, rank, world, start=2)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_ranks(2)
def test_on_a_cpu_nothing_moves(rank, world):
    engine = after_steps(make_engine(world, 2), 1, rank, world)
    engine.offload_states()
    assert not engine.optimizer.states.away
    assert get_state_devices(engine, OffloadStateTypeEnum.hp_params) == {torch.device("cpu")}
    train_engine(engine, 1, rank, world, start=1)  # nothing is missing
    engine.reload_states()
    refused(ValueError, "include= takes optim_states", engine.offload_states, include=["gradients"])
    refused(TypeError, "include=", engine.offload_states, include=OffloadStateTypeEnum.lp_grads)
    refused(ValueError, "offload_optimizer", engine.offload_states, device=OffloadDeviceEnum.nvme)
    refused(AssertionError, "needs ZeRO", make_engine(world, 0).offload_states)


# ---- fragments and values ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_fragments_are_views_of_what_this_rank_owns(rank, world, stage):
    engine = make_engine(world, stage, bf16={"enabled": True})
    engine.backward(loss_on(engine, 0))
    owned = 0
    params = list(engine.module.parameters())
    trained = [param for param in params if param.requires_grad]
    for param in trained:
        mapping = param._hp_mapping
        whole = safe_get_full_fp32_param(param).reshape(-1)
        state = deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg").reshape(-1)
        grad = deepspeed.utils.safe_get_full_grad(param)
        if mapping is None:
            continue
        part = slice(mapping.lp_fragment_address.start, None)
        numel = mapping.lp_fragment_address.numel
        assert mapping.get_hp_fragment_address().numel == numel == mapping.get_hp_fragment().numel()
        assert torch.equal(mapping.get_hp_fragment(), whole[part][:numel])
        assert torch.equal(mapping.lp_fragment, param.detach().reshape(-1)[part][:numel])
        assert set(mapping.get_optim_state_keys()) == {"exp_avg", "exp_avg_sq"}
        assert torch.equal(mapping.get_hp_fragment("exp_avg").reshape(-1), state[part][:numel])
        if grad is not None:
            found = mapping.get_lp_grad_fragment(0).reshape(-1) / engine.optimizer.loss_scale
            assert torch.equal(found, grad.reshape(-1)[part][:numel])
        mapping.hp_fragment.fill_(2.0)
        mapping.update_lp()
        assert bool((param.detach().reshape(-1)[part][:numel] == 2.0).all())
        owned += numel
        refused(ValueError, "exp_avg_sq", mapping.get_optim_state_fragment, "momentum")
    copied = copy.deepcopy(engine.module)
    assert all(getattr(p, "_hp_mapping", None) is None for p in copied.parameters())
    engine.destroy()
    assert not any(hasattr(p, "_hp_mapping") for p in params)
    assert sum(together(owned)) == sum(param.numel() for param in trained)


@on_ranks(2)
def test_values_asked_of_the_stage_3_optimizer(rank, world):
    engine = make_engine(world, 3)
    optimizer = engine.optimizer
    engine.backward(loss_on(engine, 0))
    params = [p for p in engine.module.parameters() if p.requires_grad]
    param = params[1]
    assert [optimizer.get_param_id(p) for p in params] == list(range(len(params)))
    value = optimizer.get_full_hp_param(param)
    optimizer.set_full_hp_param(value + 1, param)
    assert torch.equal(optimizer.get_full_hp_param(param), value + 1)
    local = optimizer.get_local_fp32_param(param)
    optimizer.set_local_hp_param(local * 2, param)
    assert torch.equal(safe_get_local_fp32_param(param), local * 2)
    assert optimizer.get_hp_param_device(param) == torch.device("cpu")
    grad = optimizer.get_fp32_grad_for_param(param)
    optimizer.set_fp32_grad_for_param(grad * 3, param)
    assert torch.equal(optimizer.get_fp32_grad_for_param(param), grad * 3)
    piece = optimizer.get_local_fp32_grad_for_param(param)
    parts = optimizer.get_fp32_grad_partitions()[0]
    assert len(parts) > 3
    for number, part in parts.items():  # of one size on all ranks, padded
        assert part.numel() == -(-params[number].ds_numel // world) and part.dtype == torch.float32
    own = parts[optimizer.get_param_id(param)]
    assert torch.equal(own[: piece.numel()], piece) and not own[piece.numel() :].any()
    optimizer.update_fp32_grad_for_param_vectorized(lambda grad, _: torch.zeros_like(grad), [param])
    assert not optimizer.get_fp32_grad_for_param(param).any()
    assert optimizer.get_full_hp_param(param, "exp_avg").shape == param.ds_shape
    refused(
        ValueError, "not trained by this optimizer", optimizer.get_full_hp_param, torch.nn.Parameter(torch.zeros(2))
    )
    assert not optimizer.has_overflow_partitioned_grads_serial()
    turns = []
    optimizer.sequential_execution(lambda: turns.append(rank), "one by one")
    assert turns == [rank]
    engine.step()


@pytest.mark.parametrize("stage, accumulate", [(1, 1), (1, 2), (2, 2), (3, 1)])
@on_ranks(2)
def test_a_backward_between_prologue_and_epilogue(rank, world, stage, accumulate):
    results = []
    for by_hand in (False, True):
        engine = make_engine(world, stage, accumulate=accumulate)
        for micro in range(accumulate):
            loss = loss_on(engine, 0, rank=micro * world + rank, world=world * accumulate)
            if by_hand:
                engine.optimizer.backward_prologue()
                engine.optimizer.scale_if_loss(loss / accumulate).backward()
                engine.optimizer.backward_epilogue()
            else:
                engine.backward(loss)
            engine.step()
        results.append(last_of(engine))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- stage 3: gathering by hand ---------------------------------------------------------------------------------
@on_ranks(2)
def test_gathering_by_hand_and_persistence(rank, world):
    engine = make_engine(world, 3)
    offload = engine.parameter_offload
    first = engine.module.first
    assert first.weight.shape == torch.Size([0])
    offload.pre_sub_module_forward_function(first)
    assert first.weight.shape == (12, 12)
    torch.nn.functional.linear(torch.ones(2, 12), first.weight, first.bias)
    offload.pre_sub_module_backward_function(first)
    offload.post_sub_module_forward_function(first)
    assert first.weight.shape == (12, 12)  # the backward holds it still
    offload.post_sub_module_backward_function(first)
    offload.empty_partition_cache()
    assert first.weight.shape == torch.Size([0])
    refused(RuntimeError, "pre_sub_module", offload.post_sub_module_forward_function, first)

    before = {p.ds_id for p in engine.module.parameters() if p.ds_persist}
    stay = offload.mark_persistent_parameters(param_threshold=145, model_threshold=10**9)
    assert {p.ds_id for p in stay} > before and first.weight.shape == (12, 12)
    train_engine(engine, 2, rank, world)
    found = values(engine)
    assert first.weight.shape == (12, 12)
    few = offload.mark_persistent_parameters(param_threshold=13, model_threshold=20)
    assert sum(p.ds_numel for p in few) <= 20 and first.weight.shape == torch.Size([0])
    reference = after_steps(make_engine(world, 3), 2, rank, world)
    assert all(torch.equal(a, b) for a, b in zip(found, values(reference), strict=True))


def peeking():
    """Uses a weight of another module through that module's dict of parameters."""
    return Parts(
        lambda net, tokens: torch.nn.functional.linear(net.out(net.embed(tokens)), net.embed._parameters["weight"]),
        embed=torch.nn.Embedding(17, 12),
        out=torch.nn.Linear(12, 12, bias=False),
    )


@on_ranks(2)
def test_a_dict_that_gathers_what_is_looked_up(rank, world):
    engine = make_engine(world, 3, seeded(peeking))
    for module in engine.module.modules():
        ensure_zero_ordered_dict(module)
        ensure_zero_ordered_dict(module)
    assert engine.module.embed._parameters["weight"].shape == torch.Size([0])
    out = engine(torch.arange(6).reshape(1, 6))
    assert out.shape == (1, 6, 17)
    take_step(engine, out.square().mean())
    assert list(copy.deepcopy(engine.module).embed._parameters) == ["weight"]


# ---- outputs of any class ---------------------------------------------------------------------------------------
class Answer:
    """Outputs that a model may return: not a tensor, tuple, list, dict or dataclass."""

    __slots__ = ("inner", "__dict__")

    def __init__(self, logits):
        self.inner = {"logits": [logits]}
        self.me = self  # a circle


class Closed:
    """Keeps what it has where nobody can look."""

    __slots__ = ()
    kept = []

    def __init__(self, logits):
        Closed.kept[:] = [lambda: logits]


def answering(kind):
    return Parts(
        lambda net, tokens: net.kind(net.net(tokens)),
        net=make_net(),
        kind=kind,
    )


def norm_and_weights(engine):
    return engine.get_global_grad_norm(), values(engine)


def assert_same(first, second):
    """The results of two engines: norms and values."""
    assert first[0] == pytest.approx(second[0], rel=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_plain_backward_on_objects_of_any_class(rank, world, stage):
    results = []
    for user_backward in (False, True):
        engine = make_engine(world, stage, answering(Answer), accumulate=2)
        for micro in range(2):
            tokens, targets = batch(micro, 4)
            take_step(engine, loss_of(engine(tokens).inner["logits"][0], targets), user_backward)
        results.append(last_of(engine, norm_and_weights))
    assert_same(*results)
    if stage < 3:  # no tensor is found in what this one returns
        for user_backward in (False, True):
            engine = make_engine(world, stage, answering(Closed), accumulate=2)
            for micro in range(2):
                tokens, targets = batch(micro, 4)
                engine(tokens)
                take_step(engine, loss_of(Closed.kept[0](), targets), user_backward)
            assert_same(results[0], last_of(engine, norm_and_weights))


def forward_chained(net, x):
    hidden = torch.tanh(net.first(x))
    logits = net.second(hidden).view(-1)
    loss = logits.square().mean()
    return {"loss": loss, "logits": logits, "hidden": [hidden, hidden], "again": loss}


def chained():
    """Returns values that were computed from each other, as models do that return their loss."""
    return Parts(
        forward_chained,
        first=torch.nn.Linear(4, 4),
        second=torch.nn.Linear(4, 4),
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_outputs_computed_from_each_other_get_the_factor_once(rank, world, stage):
    results = []
    for user_backward in (False, True):
        engine = make_engine(world, stage, seeded(chained), accumulate=4)
        for micro in range(4):
            torch.manual_seed(2 * micro + rank)
            out = engine(torch.randn(2, 4))
            loss = out["loss"] + out["logits"].mean() + out["hidden"][1].sum()  # enters at three places
            take_step(engine, loss, user_backward)
        results.append(last_of(engine, norm_and_weights))
    assert_same(*results)


# ---- reductions of lists ----------------------------------------------------------------------------------------
@on_ranks(2)
def test_reductions_of_lists_of_tensors(rank, world):
    engine = make_engine(world, 1)
    group = engine.data_parallel_group
    make = lambda: [torch.full((3,), float(rank)), torch.full((2, 2), float(10 * rank))]  # noqa: E731
    assert engine.allreduce_bucket(make(), group).tolist() == [0.5] * 3 + [5.0] * 4
    tensors = make()
    engine.allreduce_and_copy(tensors, group)
    assert tensors[0].tolist() == [0.5] * 3 and tensors[1].tolist() == [[5.0] * 2] * 2
    tensors = make()
    engine.allreduce_no_retain(tensors, group, numel_per_bucket=2)
    assert tensors[0].tolist() == [0.5] * 3 and tensors[1].tolist() == [[5.0] * 2] * 2

    dense = torch.zeros(4, 2)
    dense[rank + 1] = rank + 1.0
    dense[0] = 4.0
    sparse = SparseTensor(dense.clone())
    mixed = [torch.full((3,), float(rank)), sparse, torch.full((3,), float(rank)).half()]
    engine.buffered_allreduce_fallback(mixed)
    assert mixed[0].tolist() == [0.5] * 3 == mixed[2].tolist()
    assert sparse.orig_dense_tensor.tolist() == [[4.0] * 2, [0.5] * 2, [1.0] * 2, [0.0] * 2]
    rows = engine.sparse_all_gather(torch.arange(rank + 1), group)
    assert [row.tolist() for row in rows] == [[0], [0, 1]]
