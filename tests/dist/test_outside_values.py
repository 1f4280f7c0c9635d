"""Parameters, gradients and optimizer states that come from outside of an engine, or that somebody else keeps."""

import copy
import functools
import time

import pytest
import torch

import deepspeed
from harness import on_ranks
from models import Parts, seeded
from plain import Plain
from refusals import refused
from runs import engine_of, settings, sgd, train, value_of, weight_list, weights

STAGES = [0, 1, 2, 3]


def forward_net(net, x):
    return net.second(torch.tanh(net.first(x))).square().mean()


def make_net():
    return Parts(forward_net, first=torch.nn.Linear(4, 4), second=torch.nn.Linear(4, 2))


def batch(rank=0, step=0):
    return torch.full((2, 4), 0.5 + rank + 0.25 * step)


def make_engine(stage, model=None, client=sgd, **more):
    config = settings(stage, optimizer=None, gradient_clipping=0.0, **more)
    return engine_of(model or seeded(make_net), config, client)


def trained(engine, rank, steps=2):
    train(engine, lambda step, micro: engine(batch(rank, step)), steps)
    return engine


def plain_steps(model, optimizer, world, steps=2):
    """``model`` after steps of one plain process; ``optimizer``: of its parameters, or a function that makes one."""
    plain = Plain(model, optimizer if callable(optimizer) else lambda _: optimizer, dtype=None, copied=False)
    plain.run(lambda model, step, rank: model(batch(rank, step)), range(steps), world)
    return model


def assert_like(engine, model):
    for ours, expected in zip(weight_list(engine), model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-6)


# ---- optimizers ----------------------------------------------------------------------------------------------------
KINDS = {
    "Adam": functools.partial(torch.optim.Adam, lr=0.05),
    "SGD": sgd,
    "FusedAdam": functools.partial(deepspeed.ops.adam.FusedAdam, lr=0.05),
    "CPUAdam": functools.partial(deepspeed.ops.adam.DeepSpeedCPUAdam, lr=0.05),
}


@pytest.mark.sample("values")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_client_optimizer_keeps_its_states(rank, world, stage, kind):
    model, same = seeded(make_net), seeded(make_net)
    mine, theirs = KINDS[kind](model.parameters()), KINDS[kind](same.parameters())
    for net, optimizer in ((model, mine), (same, theirs)):
        plain_steps(net, optimizer, world, 3)
        optimizer.zero_grad()
    engine = trained(make_engine(stage, model, mine), rank)
    assert_like(engine, plain_steps(same, theirs, world))


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(1)
def test_the_model_has_each_parameter_of_the_optimizer(rank, world, stage):
    model, apart = seeded(make_net), torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([*model.parameters(), apart], lr=0.1)
    refused(ValueError, r"parameter 4 of group 0 .* \(4,\), is not in the model", make_engine, stage, model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_another_engine_of_a_model_ends_the_first(rank, world, stage):
    model = seeded(make_net)
    first = trained(make_engine(stage, model), rank)
    same = seeded(make_net)
    same.load_state_dict({name: value.clone() for name, value in weights(first).items()})
    second = trained(make_engine(stage, model), rank)
    assert_like(second, plain_steps(same, sgd, world))
    refused(RuntimeError, "another engine of this engine's model", first.step)


@on_ranks(1)
def test_engines_of_different_parts_of_a_model_live_together(rank, world):
    model = seeded(make_net)
    engines = [
        make_engine(1, model, lambda _, part=part: sgd(part.parameters())) for part in (model.first, model.second)
    ]
    for engine in engines:
        engine.backward(engine(batch()))
        engine.step()
    assert [engine.global_steps for engine in engines] == [1, 1]


# ---- memory --------------------------------------------------------------------------------------------------------
class Views(torch.nn.Module):
    """A buffer and a frozen parameter that lie in the memory of a weight."""

    def __init__(self):
        super().__init__()
        weight = torch.randn(4, 4)
        self.weight = torch.nn.Parameter(weight)
        self.register_buffer("same", weight, persistent=False)
        self.part = torch.nn.Parameter(weight[:2], requires_grad=False)

    def forward(self, x):
        return (x @ self.weight + x @ self.same + (x @ self.part.t()).sum()).square().mean()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_what_shares_memory_with_a_parameter_follows_it(rank, world, stage):
    model, same = seeded(Views), seeded(Views)
    engine = make_engine(stage, model, lambda _: torch.optim.SGD([model.weight], lr=0.01))
    if stage == 3:  # every rank keeps slices of the weight alone
        refused(ValueError, "'(same|part)' shares memory with the parameter 'weight'", engine, batch(rank))
        with torch.no_grad():
            engine(batch(rank))
        return
    trained(engine, rank)
    plain_steps(same, torch.optim.SGD([same.weight], lr=0.01), world)
    assert_like(engine, same)
    torch.testing.assert_close(model.same, same.same, rtol=1e-5, atol=1e-6)
    engine.destroy()
    assert model.same.data_ptr() == model.weight.data_ptr()


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(1)
def test_parameters_of_one_memory(rank, world, stage):
    memory = torch.randn(4, 8)
    columns = Parts(
        lambda net, x: (x @ (net.left + net.right)).square().mean(),
        left=torch.nn.Parameter(memory[:, :4]),
        right=torch.nn.Parameter(memory[:, 4:]),
    )
    trained(make_engine(stage, columns), rank)  # no element is in both
    twice = Parts(columns.run, left=torch.nn.Parameter(memory[:, :4]), right=torch.nn.Parameter(memory[:, :4]))
    refused(ValueError, "'left' and 'right' share memory", make_engine(stage, twice), batch())


@on_ranks(2)
def test_a_gradient_that_a_script_keeps(rank, world):
    engine = make_engine(0)
    weight = engine.module.first.weight
    kept = []
    for step in range(4):
        engine.backward(engine(batch(rank, step)))
        grad = weight.grad if step % 2 else weight.grad.detach()
        kept.append((grad, grad.clone()))
        if step == 1:
            weight.grad = None
        if step == 2:
            weight.grad = torch.ones_like(grad)
        engine.step()
    for grad, value in kept:
        assert torch.equal(grad, value)


@pytest.mark.parametrize("persist", [0, 100000])
@on_ranks(2)
def test_a_parameter_without_elements(rank, world, persist):
    model = Parts(
        lambda net, x: net.wide(x).square().mean() + net.nothing(net.into(x)).square().mean(),
        wide=torch.nn.Linear(4, 4),
        into=torch.nn.Linear(4, 0),
        nothing=torch.nn.Linear(0, 4),
    )
    same = copy.deepcopy(model)
    engine = make_engine(3, model, zero={"stage3_param_persistence_threshold": persist})
    broadcast = weights(engine)
    same.load_state_dict(broadcast)
    trained(engine, rank)
    assert_like(engine, plain_steps(same, sgd, world))


# ---- stage 3 -------------------------------------------------------------------------------------------------------
def forward_writing(net, x):
    """An average that a teacher keeps, and a counter."""
    with torch.no_grad():
        net.teacher.weight.mul_(0.5).add_(net.student.weight, alpha=0.5)
        net.teacher.bias.data = net.student.bias.data * 0.5
        net.seen += 1
    return (net.student(x) - net.teacher(x) + 1).square().mean()


def make_writing():
    return Parts(
        forward_writing,
        student=torch.nn.Linear(4, 4),
        teacher=torch.nn.Linear(4, 4).requires_grad_(False),
        seen=torch.nn.Parameter(torch.zeros(3), requires_grad=False),
    )


@pytest.mark.parametrize("persist", [0, 100000])
@on_ranks(2)
def test_what_a_forward_writes_into_weights(rank, world, persist):
    model, same = seeded(make_writing), seeded(make_writing)
    engine = make_engine(
        3, model, lambda _: sgd(model.student.parameters()), zero={"stage3_param_persistence_threshold": persist}
    )
    for step in range(3):
        engine.backward(engine(batch(rank, step)))
        engine.step()
    optimizer = sgd(same.student.parameters())
    for step in range(3):
        optimizer.zero_grad()
        kept = {name: value.clone() for name, value in same.state_dict().items()}
        for one in range(world):  # each rank starts from the same weights
            same.load_state_dict(kept)
            (same(batch(one, step)) / world).backward()
        optimizer.step()
    assert_like(engine, same)


@on_ranks(2)
def test_a_copy_of_gathered_parameters_has_values(rank, world):
    engine = trained(make_engine(3), rank)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        average = copy.deepcopy(engine.module)
    sharded = copy.deepcopy(engine.module)
    assert not any(hasattr(param, "ds_id") for param in average.parameters())
    assert all(hasattr(param, "ds_id") for param in sharded.parameters())
    with torch.no_grad():
        assert torch.equal(average(batch()), engine(batch()))


WAYS = {
    "in place": lambda param, value: param.mul_(0.0).add_(value),
    "data": lambda param, value: param.data.copy_(value),
    "other data": lambda param, value: setattr(param, "data", value.expand_as(param).clone()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("persist", [0, 100000])
@on_ranks(2)
def test_writes_inside_a_gathering_without_modifier(rank, world, way, persist):
    engine = make_engine(3, zero={"stage3_param_persistence_threshold": persist})
    weight = engine.module.first.weight
    with torch.no_grad(), deepspeed.zero.GatheredParameters(weight):
        WAYS[way](weight, torch.tensor(0.25))
    assert torch.equal(value_of(weight), torch.full((4, 4), 0.25))
    same = copy.deepcopy(make_net())
    same.load_state_dict(weights(engine))
    trained(engine, rank)
    assert_like(engine, plain_steps(same, sgd, world))
    with torch.no_grad(), deepspeed.zero.GatheredParameters(weight):
        WAYS[way](weight, torch.tensor(float(rank)))
    loss = engine(batch(rank))
    error = refused(RuntimeError, "written into parameter 'first.weight' is .* on rank 0", engine.backward, loss)
    assert "second" not in str(error)


@on_ranks(2)
def test_sanity_checks_refuse_writes_without_modifier(rank, world):
    engine = make_engine(3, zero={"enable_sanity_checks": True})

    def write():
        with torch.no_grad(), deepspeed.zero.GatheredParameters(engine.module.first.weight):
            engine.module.first.weight.zero_()

    refused(RuntimeError, "'first.weight' .* without a modifier_rank", write)
    with deepspeed.zero.GatheredParameters(engine.module.first.weight):
        engine.module.first.weight.sum()


@pytest.mark.parametrize("differ", [False, True])
@on_ranks(2, init=True)
def test_writes_without_modifier_before_there_is_an_engine(rank, world, differ):
    with deepspeed.zero.Init():
        layer = torch.nn.Linear(4, 4)

    def write():
        with torch.no_grad(), deepspeed.zero.GatheredParameters(layer.weight):
            layer.weight.fill_(1.5 + differ * rank)

    if differ:
        refused(RuntimeError, "ranks have written different values", write)
    else:
        write()
        assert torch.equal(value_of(layer.weight), torch.full((4, 4), 1.5))


# ---- slices --------------------------------------------------------------------------------------------------------
def own_slice(param, rank, value):
    return torch.full((param.ds_tensor.numel(),), float(value))


@pytest.mark.parametrize("persist", [0, 100000])
@pytest.mark.parametrize("way", ["data", "in place", "data in place"])
@on_ranks(2)
def test_slices_that_all_ranks_write_without_a_barrier(rank, world, way, persist):
    engine = make_engine(3, zero={"stage3_param_persistence_threshold": persist})
    engine.eval()
    for turn in range(6):
        time.sleep(0.03 * ((turn + rank) % 2))
        for param in engine.module.parameters():
            values = own_slice(param, rank, turn)
            if way == "data":
                param.ds_tensor.data = values
            elif way == "in place":
                param.ds_tensor.copy_(values)
            else:
                param.ds_tensor.data.copy_(values)
        with torch.no_grad():
            loss = engine(torch.ones(2, 4))
        hidden = torch.tanh(torch.tensor(5.0 * turn))
        torch.testing.assert_close(loss, (4 * hidden * turn + turn) ** 2)


@on_ranks(2)
def test_nobody_waits_where_nobody_has_written(rank, world):
    engine = trained(make_engine(3), rank)
    deepspeed.comm.barrier()
    time.sleep(1.5 * rank)
    begin = time.monotonic()
    with torch.no_grad():
        engine(batch(rank))
    assert time.monotonic() - begin < 1.0


@on_ranks(2)
def test_a_slice_that_was_written_too_late_is_an_error(rank, world):
    engine = trained(make_engine(3), rank)
    if rank == 0:
        loss = engine(batch(rank))
        time.sleep(1.0)
        refused(RuntimeError, "rank 1 has written to its slices", engine.backward, loss)
    else:
        time.sleep(0.3)
        engine.module.first.weight.ds_tensor.zero_()
        refused(RuntimeError, "", engine, batch(rank))


# ---- torch itself --------------------------------------------------------------------------------------------------
@on_ranks(1)
def test_nothing_of_torch_is_replaced_outside_of_forward(rank, world):
    linear = torch.nn.functional.linear
    engine = trained(make_engine(3), rank)
    assert torch.nn.functional.linear is linear
    assert torch.jit.script(torch.nn.Linear(4, 2))(batch()).shape == (2, 2)
    refused(RuntimeError, "", engine, torch.ones(2, 3))
    assert torch.nn.functional.linear is linear
