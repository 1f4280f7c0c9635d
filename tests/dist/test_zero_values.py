"""Values of sharded parameters, ``zero.Init``, copies, several engines, and how much is gathered at one time."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from harness import on_ranks
from models import seeded
from refusals import refused
from runs import take_step, value_of
from zero_models import make, outputs_of, relative
from zero_training import WIDTH, Deep, batch, below, beside, gap, loss_of, loss_on, plain_of, start, train_beside


# ---- several models and engines --------------------------------
@pytest.mark.sample("values")
@pytest.mark.parametrize("stages", [(0, 0), (1, 2), (3, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["in turn", "through both"])
@on_ranks(2, timeout=30)
def test_two_engines(rank, world, stages, shared):
    models = [seeded(Deep), seeded(Deep, 2)]
    references = first, second = [plain_of(model) for model in models]
    engines = [start(model, stage, world) for model, stage in zip(models, stages)]
    for step in range(5):
        x, target = batch(step, rank)
        if shared:  # the gradient goes through both
            loss_of(engines[1](engines[0](x).repeat(1, 3)), target).backward()
        else:
            for engine in engines:
                engine.backward(loss_of(engine(x), target))
        for engine in engines:
            engine.step()
        if shared:
            parts = [batch(step, part) for part in range(world)]
            losses = [loss_of(second.model(first.model(x.double()).repeat(1, 3)), target) for x, target in parts]
            (sum(losses) / world).backward()
            for reference in references:
                reference.collect()
                reference.update()
        else:
            for reference in references:
                reference.run(loss_on, [step], world)
    below({name: gap(*pair) for name, pair in zip("ab", zip(engines, references))})


@on_ranks(2, timeout=30)
def test_a_copy_of_a_sharded_model_trains_by_itself(rank, world):
    model = seeded(Deep)
    first, reference = beside(model, 3, world)
    train_beside(first, reference, rank, world, range(2))
    copied = copy.deepcopy(model)
    assert all(p.numel() == 0 and p.ds_numel > 0 for p in copied.parameters())
    other = plain_of(reference.model)
    second = start(copied, 3, world)
    train_beside(second, other, rank, world, range(2, 4))
    train_beside(first, reference, rank, world, range(4, 6))
    below({"the original": gap(first, reference), "the copy": gap(second, other)})


# ---- values of sharded parameters --------------------------------
def assert_untouchable(action, name):
    caught = refused(RuntimeError, None, action)
    assert f"'{name}'" in str(caught) and "GatheredParameters" in str(caught)


@on_ranks(2, timeout=30)
def test_released_parameters_refuse_by_name(rank, world):
    model = seeded(Deep)
    engine = start(model, 3, world)
    weight, name = model.layers[1].weight, "layers.1.weight"
    for _ in range(2):
        for action in (
            lambda: weight + 1,
            lambda: weight.data.normal_(),
            lambda: weight.data.copy_(torch.zeros(WIDTH, WIDTH)),
            lambda: torch.nn.init.zeros_(weight),
            lambda: torch.nn.init.kaiming_uniform_(weight),
            lambda: setattr(weight, "data", torch.zeros(WIDTH, WIDTH)),
            lambda: weight.data.cpu().sum(),
            lambda: weight.detach().float() * 2,
            lambda: weight.double().sum(),
            lambda: model.state_dict()[name].norm(),
            lambda: torch.nn.functional.linear(torch.ones(1, WIDTH), weight),
            lambda: weight[0],
            lambda: weight.sum(),
            lambda: weight.clone().zero_(),
            lambda: weight.detach().clone().view(WIDTH, WIDTH),
            lambda: torch.stack([weight, weight]),
            lambda: torch.equal(weight, weight),
        ):
            with torch.no_grad():
                assert_untouchable(action, name)
        take_step(engine, loss_on(engine, 0, rank))
        with pytest.raises(ValueError), torch.no_grad():
            torch.nn.init.xavier_uniform_(weight)
        model.to(torch.device("cpu"))
        model.float()
    assert weight.numel() == 0 and weight.ds_shape == (WIDTH, WIDTH) and weight.ds_numel == WIDTH * WIDTH
    assert "Parameter" in repr(weight)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@on_ranks(2, timeout=30)
def test_edits_inside_gathered_parameters_train_on(rank, world, dtype):
    model = seeded(Deep)
    reference = plain_of(model)
    more = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    engine = start(model, 3, world, **more)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32

    def steps(which):
        for step in which:
            x, target = batch(step, rank)
            take_step(engine, loss_of(engine(x.to(kind)).float(), target))
            reference.run(loss_on, [step], world)

    steps(range(2))
    layer, twin = model.layers[0], reference.model.layers[0]
    with deepspeed.zero.GatheredParameters([layer.weight, layer.bias], modifier_rank=1):
        with deepspeed.zero.GatheredParameters(layer.weight):  # nested: the outer one still counts
            assert layer.weight.shape == (WIDTH, WIDTH)
        if rank == 1:
            with torch.no_grad():
                layer.weight.mul_(0.5).add_(0.25)
                layer.bias.data.fill_(0.125)
    with torch.no_grad():
        twin.weight.mul_(0.5).add_(0.25)
        twin.bias.fill_(0.125)
    assert layer.weight.numel() == 0
    assert bool((value_of(layer.bias) == 0.125).all())
    with deepspeed.zero.GatheredParameters(model.head.weight):  # no modifier: all ranks write the same
        model.head.weight.data.mul_(0.5)
    reference.model.head.weight.data.mul_(0.5)
    steps(range(2, 5))
    below(gap(engine, reference), 1e-6 if dtype == "fp32" else 0.02)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(3, timeout=30)
def test_whole_tensors_of_the_optimizer(rank, world, stage):
    """The optimizer's own view of whole tensors equals the plain process's, in shape, too."""
    engine, reference = beside(seeded(Deep), stage, world)
    engine.backward(loss_on(engine, 0, rank))
    grads = [safe_get_full_grad(param) for param in engine.module.parameters()]
    reference.run(loss_on, [0], world)
    worst = max(relative(a, reference.grads[0][name]) for a, name in zip(grads, reference.params))
    engine.step()
    masters = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    below(
        {
            "gradients": worst,
            "masters": max(relative(a, b) for a, b in zip(masters, reference.model.parameters())),
        }
    )


# ---- zero.Init --------------------------------
class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.seen_in_constructor = self.first.weight.numel()


class Built(Base):
    """A subclass with own parameters, a Sequential, tied weights, and Module.apply in the constructor."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.rand(WIDTH))
        self.stack = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))
        )
        self.tied = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.head = torch.nn.Linear(WIDTH, 2)
        self.apply(self.init_weights)

    def init_weights(self, module):
        if isinstance(module, torch.nn.Linear):
            module.weight.data.mul_(1.5)
            if module.bias is not None:
                torch.nn.init.constant_(module.bias, 0.25)

    def forward(self, x):
        return self.head(self.tied(torch.tanh(self.stack(self.first(x) * self.gain))))


@pytest.mark.sample("values", 8)
@pytest.mark.parametrize("how", ["plain", "nested", "module", "disabled", "whole class", "rank 0 counts"])
@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks(timeout=30, init=True)
def test_models_built_inside_init(rank, world, how):
    plain = seeded(Built)
    reference = plain_of(plain)
    torch.manual_seed(rank if how == "rank 0 counts" else 0)
    if how == "disabled":
        with deepspeed.zero.Init(enabled=False):
            model = Built()
        assert not any(hasattr(p, "ds_id") for p in model.parameters())
    elif how == "nested":
        with deepspeed.zero.Init(dtype=torch.float32):
            with deepspeed.zero.Init(dtype=torch.float32):
                model = Built()
            another = torch.nn.Linear(4, 4)
        assert another.weight.numel() == 0
    elif how == "module":
        model = Built()
        deepspeed.zero.Init(module=model)
    elif how == "whole class":
        with deepspeed.zero.Init(dtype=torch.float32):

            class Late(Built):
                pass

            model = Late()
    else:
        with deepspeed.zero.Init(dtype=torch.float32):
            model = Built()
    assert torch.nn.Linear(3, 3).weight.numel() == 9, "outside the context modules are plain again"
    if how != "disabled":
        for name, param in model.named_parameters():
            expected = dict(plain.named_parameters())[name]
            assert param.numel() == 0 and param.ds_shape == expected.shape and param.ds_numel == expected.numel()
            assert param.ds_tensor.numel() == -(-expected.numel() // world)
        assert model.tied.weight is model.first.weight
        assert_untouchable(lambda: torch.nn.init.ones_(model.head.weight), model.head.weight.ds_handle.name)
        assert gap(model, plain) == 0.0, "the values of the plain constructor"
        assert model.seen_in_constructor == (0 if how != "module" else WIDTH * WIDTH)
    engine = start(model, 3, world)
    train_beside(engine, reference, rank, world)
    below(gap(engine, reference))


@pytest.mark.parametrize("world", [1, 3])
@on_ranks(timeout=30, init=True)
def test_odd_sizes_inside_init(rank, world):
    """Empty, scalar and one-element parameters, one frozen, from the first to the last step."""
    plain = make("odd and empty sizes")
    reference = plain_of(plain)
    torch.manual_seed(0)
    with deepspeed.zero.Init(dtype=torch.float32):
        model = type(plain)()
    engine = start(model, 3, world)
    for step in range(4):
        for loss in outputs_of(engine, step, rank):
            engine.backward(loss)
        engine.step()
        reference.run(outputs_of, [step], world)
    below(gap(engine, reference))


# ---- memory --------------------------------
class Checkpointed(Deep):
    reentrant = True

    def forward(self, x):
        hidden = x * self.extra[0]
        for layer in self.layers:
            hidden = torch.tanh(checkpoint(layer, hidden, use_reentrant=self.reentrant))
        return self.head(hidden + self.extra[1])


@pytest.mark.parametrize(
    "kind, reentrant",
    [(None, False), ("checkpoint", True), ("checkpoint", False)],
    ids=["plain", "re-entrant checkpointing", "non-re-entrant checkpointing"],
)
@on_ranks(2, timeout=30)
def test_few_layers_are_gathered_at_one_time(rank, world, kind, reentrant):
    layer = WIDTH * WIDTH + WIDTH
    own, head = 2 * WIDTH, 2 * WIDTH  # of the model itself: gathered all the time
    model = seeded(Deep if kind is None else Checkpointed, 12)
    Checkpointed.reentrant = reentrant
    engine = start(model, 3, world, zero={"stage3_max_reuse_distance": 0})
    gatherer = engine.core.gatherer
    for step in range(3):
        gatherer.reset_peak()
        take_step(engine, loss_on(engine, step, rank))
    peak = gatherer.peak_live_numel
    assert gatherer.live_numel == 0
    assert peak <= own + head + 3 * layer, f"{peak / layer:.1f} layers of 12 at one time"
