"""What breaks sharded training in practice: other branches on other ranks, exceptions, unusual calls, edited weights.

Every test trains next to one plain fp64 process on the same data.
"""

import copy
import dataclasses
import hashlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import deepspeed
from harness import run_ranks
from zero_models import BETAS, CLIP, DECAY, LR, clip, make, outputs_of, relative

WIDTH, ROWS = 6, 3
STAGES = [0, 1, 2, 3]


class Deep(torch.nn.Module):
    """Linear layers; ``extra`` belongs to the model itself."""

    def __init__(self, depth=4):
        super().__init__()
        self.extra = torch.nn.Parameter(torch.rand(2, WIDTH))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.head = torch.nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x, layers=None):
        hidden = x * self.extra[0]
        for index in range(len(self.layers)) if layers is None else layers:
            hidden = torch.tanh(self.layers[index](hidden))
        return self.head(hidden + self.extra[1])


def seeded(make_model, *args):
    torch.manual_seed(0)
    return make_model(*args)


def batch(step, part):
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.rand(ROWS, WIDTH, generator=generator), 1 + torch.rand(ROWS, 2, generator=generator)


def loss_of(output, target):
    return ((output - target.to(output.dtype)) ** 2).mean()


def start(model, stage, world, accumulate=1, **more):
    """An engine with small buckets that keeps no parameter gathered."""
    zero = {
        "stage": stage,
        "reduce_bucket_size": 300,
        "allgather_bucket_size": 200,
        "stage3_param_persistence_threshold": 0,
        **more.pop("zero", {}),
    }
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS), "weight_decay": DECAY}},
        "zero_optimization": zero,
        **more,
    }
    deepspeed.log.logger.setLevel("WARNING")
    return deepspeed.initialize(model=model, config=config)[0]


class Reference:
    """The plain process, in fp64."""

    def __init__(self, model):
        self.model = copy.deepcopy(model).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)

    def step(self, losses):
        """One step on the mean of ``losses``."""
        self.optimizer.zero_grad(set_to_none=True)
        (sum(losses) / len(losses)).backward()
        self.norm = float(clip(list(self.model.parameters())))
        self.optimizer.step()

    def on(self, step, part, *args, **kwargs):
        x, target = batch(step, part)
        return loss_of(self.model(x.double(), *args, **kwargs), target)


def whole_weights(model):
    params = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values())):
        return {name: param.detach().clone() for name, param in params.items()}


def gap(model, reference):
    """Worst relative difference of a parameter, and of the last gradient norm, to the reference's; every rank calls it.

    The norm shows what Adam hides: gradients that are all too large or too small by one factor.
    """
    norms = 0.0
    if isinstance(model, deepspeed.DeepSpeedEngine):
        norms = abs(model.get_global_grad_norm() - reference.norm) / reference.norm
        model, reference = model.module, reference.model
    found = whole_weights(model)
    return max(norms, *(relative(found[name], param) for name, param in reference.named_parameters()))


def same(results, bound=1e-6):
    """All ranks report differences (numbers, or dicts of them) below the bound."""
    for rank, result in enumerate(results):
        for name, value in (result if isinstance(result, dict) else {"": result}).items():
            assert value < bound, f"rank {rank}: {name} differs by {value:.2g}"


# ---- one result, always -------------------------------------------------------------------------------------------------


def body_repeat(rank, world, stage, runs):
    found = []
    for _ in range(runs):
        model = make("unused")
        engine = start(model, stage, world, 2, zero={"overlap_comm": True, "reduce_bucket_size": 30})
        for step in range(3):
            for micro in range(2):
                for loss in outputs_of(engine, step, 2 * rank + micro, torch.float32):
                    engine.backward(loss)
                engine.step()
        digest = hashlib.sha256(str(engine.get_global_grad_norm()).encode())
        for _, value in sorted(whole_weights(model).items()):
            digest.update(value.numpy().tobytes())
        found.append(digest.hexdigest())
        engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_fifty_runs_have_one_result(stage, world):
    results = run_ranks(world, body_repeat, stage, 50, timeout=120)
    assert len({digest for found in results for digest in found}) == 1


# ---- ranks that do not do the same ------------------------------------------------------------------------------------


def body_layers_by_rank(rank, world, stage, how):
    def layers(step, part):
        if how == "expert":
            return [0, 1 + (part + step) % 3]
        return range((part + step) % 4 + 1)

    model = seeded(Deep)
    reference = Reference(model)
    engine = start(model, stage, world)
    for step in range(6):
        x, target = batch(step, rank)
        engine.backward(loss_of(engine(x, layers(step, rank)), target))
        engine.step()
        reference.step([reference.on(step, part, layers(step, part)) for part in range(world)])
    return gap(engine, reference)


@pytest.mark.parametrize("how", ["expert", "depth"])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_take_other_branches(stage, how):
    same(run_ranks(3, body_layers_by_rank, stage, how, timeout=30))


def body_alone(rank, world, how):
    model = seeded(Deep)
    reference = Reference(model)
    engine = start(model, 3, world)
    for step in range(5):
        x, target = batch(step, rank)
        if how == "gather" and rank == 0:
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                seen = [p.detach().clone() for p in model.parameters()]
                assert all(relative(a, b) < 1e-6 for a, b in zip(seen, reference.model.parameters()))
        if how == "eval before" and rank == step % world:
            evaluate(engine, 3)
        loss = loss_of(engine(x), target)
        if how == "eval between" and rank == step % world:
            evaluate(engine, 2)
        engine.backward(loss)
        if how == "eval after" and rank == step % world:
            evaluate(engine, 2)
        engine.step()
        reference.step([reference.on(step, part) for part in range(world)])
    return gap(engine, reference)


def evaluate(engine, times):
    engine.eval()
    with torch.no_grad():
        for index in range(times):
            engine(batch(99, index)[0], range(index + 1))
    engine.train()


@pytest.mark.parametrize("how", ["gather", "eval before", "eval between", "eval after"])
def test_one_rank_alone(how):
    same(run_ranks(3, body_alone, how, timeout=30))


# ---- exceptions -------------------------------------------------------------------------------------------------------


class Trap(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Trap.armed:
            raise ArithmeticError("half-way")
        return grad


class Trapped(Deep):
    fails = False

    def forward(self, x):
        hidden = x * self.extra[0]
        for index, layer in enumerate(self.layers):
            hidden = torch.tanh(layer(hidden))
            if index == 1:
                if self.fails:
                    raise ArithmeticError("half-way")
                hidden = Trap.apply(hidden)
        return self.head(hidden + self.extra[1])


def body_backward_raises(rank, world, stage, accumulate, user_backward):
    model = seeded(Trapped)
    reference = Reference(model)
    engine = start(model, stage, world, accumulate, zero={"overlap_comm": True})

    def backward(step, micro):
        x, target = batch(step, rank * accumulate + micro)
        loss = loss_of(engine(x), target)
        loss.backward() if user_backward else engine.backward(loss)

    for step in range(5):
        if step in (2, 3):
            for micro in range(accumulate - 1):
                backward(step, micro)
            Trap.armed = True
            with pytest.raises(ArithmeticError):
                backward(step, accumulate - 1)
            Trap.armed = False
            engine.zero_grad()
        for micro in range(accumulate):
            backward(step, micro)
            engine.step()
        Trap.armed = False
        reference.step([reference.on(step, part) for part in range(world * accumulate)])
    return gap(engine, reference)


@pytest.mark.parametrize("user_backward", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_after_a_backward_that_raised(stage, accumulate, user_backward):
    same(run_ranks(2, body_backward_raises, stage, accumulate, user_backward, timeout=30))


def body_forward_raises(rank, world, stage):
    model = seeded(Trapped)
    reference = Reference(model)
    engine = start(model, stage, world)
    for step in range(4):
        x, target = batch(step, rank)
        if step in (1, 2) and rank == 0:
            model.fails = True
            with pytest.raises(ArithmeticError):
                engine(x)
            model.fails = False
        engine.backward(loss_of(engine(x), target))
        engine.step()
        reference.step([reference.on(step, part) for part in range(world)])
    return gap(engine, reference)


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_after_a_forward_that_raised_on_one_rank(stage):
    same(run_ranks(2, body_forward_raises, stage, timeout=30))


# ---- ways to call backward --------------------------------------------------------------------------------------------


def body_backwards(rank, world, stage, how):
    model = seeded(Deep)
    reference = Reference(model)
    parts = 3
    engine = start(model, stage, world, parts if how == "accumulation" else 1)
    mine = range(rank * parts, (rank + 1) * parts)
    for step in range(5):
        if how == "no_sync":
            with engine.no_sync():
                for part in mine[:-1]:
                    engine.backward(loss_of(engine(batch(step, part)[0]), batch(step, part)[1]) / parts)
            engine.backward(loss_of(engine(batch(step, mine[-1])[0]), batch(step, mine[-1])[1]) / parts)
        elif how == "no_sync, step reduces":
            with engine.no_sync():
                for part in mine:
                    (loss_of(engine(batch(step, part)[0]), batch(step, part)[1]) / parts).backward()
        elif how == "several backwards":
            for part in mine:
                engine.backward(loss_of(engine(batch(step, part)[0]), batch(step, part)[1]) / parts)
        elif how == "several user backwards":
            for part in mine:
                (loss_of(engine(batch(step, part)[0]), batch(step, part)[1]) / parts).backward()
        elif how == "engine.scale":
            for part in mine:
                engine.scale(loss_of(engine(batch(step, part)[0]), batch(step, part)[1]) / parts).backward()
        elif how == "several forwards, one backward":
            losses = [loss_of(engine(batch(step, part)[0]), batch(step, part)[1]) for part in mine]
            engine.backward(sum(losses) / parts)
        elif how == "several forwards, backwards in turn":
            losses = [loss_of(engine(batch(step, part)[0]), batch(step, part)[1]) for part in mine]
            for loss in losses:
                (loss / parts).backward()
        elif how == "accumulation":
            for part in mine[:-1]:
                loss_of(engine(batch(step, part)[0]), batch(step, part)[1]).backward()
                engine.step()
            loss_of(engine(batch(step, mine[-1])[0]), batch(step, mine[-1])[1]).backward()
        engine.step()
        reference.step([reference.on(step, part) for part in range(world * parts)])
    return gap(engine, reference)


BACKWARDS = [
    "no_sync",
    "no_sync, step reduces",
    "several backwards",
    "several user backwards",
    "engine.scale",
    "several forwards, one backward",
    "several forwards, backwards in turn",
    "accumulation",
]


@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize("stage", STAGES)
def test_ways_to_call_backward(stage, how):
    same(run_ranks(2, body_backwards, stage, how, timeout=30))


class Forces(Deep):
    """The output contains a gradient of the model: training goes through it a second time."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = super().forward(x).sum()
            force = torch.autograd.grad(energy, x, create_graph=True)[0]
        return force[:, :2] + energy / 10


def body_grad_inside(rank, world, stage):
    model = seeded(Forces)
    reference = Reference(model)
    engine = start(model, stage, world)
    for step in range(5):
        x, target = batch(step, rank)
        loss = loss_of(engine(x), target)
        loss.backward() if step % 2 else engine.backward(loss)
        engine.step()
        reference.step([reference.on(step, part) for part in range(world)])
    return gap(engine, reference)


@pytest.mark.parametrize("stage", STAGES)
def test_autograd_grad_inside_forward(stage):
    same(run_ranks(2, body_grad_inside, stage, timeout=30))


def body_gradient_penalty(rank, world, stage):
    model = seeded(Deep)
    reference = Reference(model)
    engine = start(model, stage, world)

    def loss_on(module, step, part, dtype):
        x, target = batch(step, part)
        x = x.to(dtype).requires_grad_()
        output = module(x)
        slope = torch.autograd.grad(output.sum(), x, create_graph=True)[0]
        return loss_of(output, target) + (slope**2).mean()

    for step in range(5):
        engine.backward(loss_on(engine, step, rank, torch.float32))
        engine.step()
        reference.step([loss_on(reference.model, step, part, torch.float64) for part in range(world)])
    if stage == 3:
        assert engine.core.gatherer.live_numel == 0
    return gap(engine, reference)


@pytest.mark.parametrize("stage", STAGES)
def test_gradient_penalty_outside_forward(stage):
    same(run_ranks(2, body_gradient_penalty, stage, timeout=30))


def body_freeze(rank, world, stage):
    model = seeded(Deep)
    reference = Reference(model)
    engine = start(model, stage, world)
    for step in range(8):
        for one in (model, reference.model):
            one.layers[1].requires_grad_(step not in (2, 3))
            one.head.weight.requires_grad_(step % 3 != 1)
            one.extra.requires_grad_(step < 6)
        x, target = batch(step, rank)
        engine.backward(loss_of(engine(x), target))
        engine.step()
        reference.step([reference.on(step, part) for part in range(world)])
    return gap(engine, reference)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_frozen_and_thawed_between_steps(stage):
    same(run_ranks(2, body_freeze, stage, timeout=30))


# ---- ways to call a module --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Both:
    first: torch.Tensor
    rest: object = None


class Pair(torch.nn.Module):
    """Two inputs, each with a weight; returns what ``kind`` says."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.a, self.b = (torch.nn.Parameter(torch.rand(WIDTH, WIDTH) / 3) for _ in range(2))

    def forward(self, *, x, y):
        first, second = torch.tanh(x @ self.a), torch.tanh(y @ self.b)
        if self.kind == "dict":
            return {"first": first, "second": {"it": second}}
        if self.kind == "list":
            return [first, ([second],)]
        return Both(first, [Both(second)]) if self.kind == "dataclass" else (first, second)


def unpack(value):
    if isinstance(value, dict):
        return value["first"], value["second"]["it"]
    if isinstance(value, list):
        return value[0], value[1][0][0]
    return (value.first, value.rest[0].first) if isinstance(value, Both) else value


class Keywords(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inlet = torch.nn.Linear(WIDTH, WIDTH)
        self.pair, self.outlet = Pair(kind), Pair(kind)

    def forward(self, *, inputs):
        x = self.inlet(inputs["x"])
        x, y = unpack(self.pair(x=x, y=x + 1))
        x, y = unpack(self.outlet(y=y, x=x))
        made = (x[:, :2], y[:, 2:4])
        if self.pair.kind == "dict":
            return {"first": made[0], "second": {"it": made[1]}}
        if self.pair.kind == "list":
            return [made[0], ([made[1]],)]
        return Both(made[0], [Both(made[1])]) if self.pair.kind == "dataclass" else made


def body_keywords(rank, world, stage, kind, user_backward):
    model = seeded(Keywords, kind)
    reference = Reference(model)
    accumulate = 2
    engine = start(model, stage, world, accumulate)

    def loss_on(module, step, part, dtype):
        x, target = batch(step, part)
        return sum(loss_of(one, target) for one in unpack(module(inputs={"x": x.to(dtype)})))

    for step in range(4):
        for micro in range(accumulate):
            loss = loss_on(engine, step, rank * accumulate + micro, torch.float32)
            loss.backward() if user_backward else engine.backward(loss)
            engine.step()
        reference.step([loss_on(reference.model, step, part, torch.float64) for part in range(world * accumulate)])
    return gap(engine, reference)


@pytest.mark.parametrize("user_backward", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("kind", ["tuple", "dict", "list", "dataclass"])
@pytest.mark.parametrize("stage", STAGES)
def test_keyword_arguments_and_nested_outputs(stage, kind, user_backward):
    same(run_ranks(2, body_keywords, stage, kind, user_backward, timeout=30))


class Mixed(torch.nn.Module):
    """Positional and keyword inputs that need gradients, changed in place, and parameters as inputs of a child."""

    def __init__(self):
        super().__init__()
        self.inlet = torch.nn.Linear(WIDTH, WIDTH)
        self.inner = Inner()
        self.head = torch.nn.Linear(WIDTH, 2)

    def forward(self, x):
        hidden = self.inlet(x)
        hidden = self.inner(hidden * 1, weight=self.head.weight, other=torch.tanh(hidden))
        return self.head(hidden)


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.rand(WIDTH, WIDTH) / 3) for _ in range(2))

    def forward(self, x, weight, other):
        before = (2 * x) @ self.a
        x += 1
        after = torch.tanh(x) @ self.b
        return before * after + other @ (self.a * self.b) + (other @ weight.t()).sum()


def body_mixed(rank, world, stage):
    model = seeded(Mixed)
    reference = Reference(model)
    engine = start(model, stage, world)
    for step in range(4):
        x, target = batch(step, rank)
        engine.backward(loss_of(engine(x), target))
        engine.step()
        reference.step([reference.on(step, part) for part in range(world)])
    return gap(engine, reference)


@pytest.mark.parametrize("stage", STAGES)
def test_inputs_changed_in_place_and_borrowed_weights(stage):
    same(run_ranks(2, body_mixed, stage, timeout=30))


# ---- several models and engines ---------------------------------------------------------------------------------------


def body_two_engines(rank, world, stages, shared_data):
    models = [seeded(Deep), seeded(Deep, 2)]
    references = [Reference(model) for model in models]
    engines = [start(model, stage, world) for model, stage in zip(models, stages)]
    for step in range(5):
        x, target = batch(step, rank)
        if shared_data:  # the gradient goes through both
            hidden = engines[0](x)
            loss = loss_of(engines[1](hidden.repeat(1, 3)), target)
            loss.backward()
        else:
            for engine in engines:
                engine.backward(loss_of(engine(x), target))
        for engine in engines:
            engine.step()
        if shared_data:
            losses = []
            for part in range(world):
                x, target = batch(step, part)
                losses.append(loss_of(references[1].model(references[0].model(x.double()).repeat(1, 3)), target))
            for reference in references:
                reference.optimizer.zero_grad(set_to_none=True)
            (sum(losses) / world).backward()
            for reference in references:
                reference.norm = float(clip(list(reference.model.parameters())))
                reference.optimizer.step()
        else:
            for reference in references:
                reference.step([reference.on(step, part) for part in range(world)])
    return {name: gap(*pair) for name, pair in zip("ab", zip(engines, references))}


@pytest.mark.parametrize("stages", [(0, 0), (1, 2), (3, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["in turn", "through both"])
def test_two_engines(stages, shared):
    same(run_ranks(2, body_two_engines, stages, shared, timeout=30))


def body_copy(rank, world):
    model = seeded(Deep)
    reference = Reference(model)
    first = start(model, 3, world)

    def train(engine, reference, steps):
        for step in steps:
            x, target = batch(step, rank)
            engine.backward(loss_of(engine(x), target))
            engine.step()
            reference.step([reference.on(step, part) for part in range(world)])

    train(first, reference, range(2))
    copied = copy.deepcopy(model)
    assert all(p.numel() == 0 and p.ds_numel > 0 for p in copied.parameters())
    other = Reference(reference.model)
    second = start(copied, 3, world)
    train(second, other, range(2, 4))
    train(first, reference, range(4, 6))
    return {"the original": gap(first, reference), "the copy": gap(second, other)}


def test_a_copy_of_a_sharded_model_trains_by_itself():
    same(run_ranks(2, body_copy, timeout=30))


# ---- values of sharded parameters -------------------------------------------------------------------------------------


def assert_untouchable(action, name):
    with pytest.raises(RuntimeError) as caught:
        action()
    assert f"'{name}'" in str(caught.value) and "GatheredParameters" in str(caught.value)


def body_touch(rank, world):
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
            lambda: weight.data.cpu().numpy(),
            lambda: weight.detach().float().tolist(),
            lambda: weight.double().sum(),
            lambda: model.state_dict()[name].norm(),
            lambda: torch.nn.functional.linear(torch.ones(1, WIDTH), weight),
            lambda: weight[0],
            lambda: weight.sum(),
            lambda: weight.clone(),
            lambda: weight.detach().clone().view(WIDTH, WIDTH),
            lambda: torch.stack([weight, weight]),
            lambda: weight.tolist(),
            lambda: weight.numpy(),
            lambda: torch.equal(weight, weight),
        ):
            with torch.no_grad():
                assert_untouchable(action, name)
        x, target = batch(0, rank)
        engine.backward(loss_of(engine(x), target))
        engine.step()
        with pytest.raises(ValueError), torch.no_grad():
            torch.nn.init.xavier_uniform_(weight)
        model.to(torch.device("cpu"))
        model.float()
    assert weight.numel() == 0 and weight.ds_shape == (WIDTH, WIDTH) and weight.ds_numel == WIDTH * WIDTH
    assert "Parameter" in repr(weight)
    return True


def test_released_parameters_refuse_by_name():
    assert all(run_ranks(2, body_touch, timeout=30))


def body_edit(rank, world, dtype):
    model = seeded(Deep)
    reference = Reference(model)
    more = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    engine = start(model, 3, world, **more)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32

    def steps(which):
        for step in which:
            x, target = batch(step, rank)
            engine.backward(loss_of(engine(x.to(kind)).float(), target))
            engine.step()
            reference.step([reference.on(step, part) for part in range(world)])

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
    with deepspeed.zero.GatheredParameters(list(layer.parameters())):
        assert bool((layer.bias == 0.125).all())
    with deepspeed.zero.GatheredParameters(model.head.weight):  # no modifier: dropped
        model.head.weight.data.zero_()
    steps(range(2, 5))
    return gap(engine, reference)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_edits_inside_gathered_parameters_train_on(dtype):
    same(run_ranks(2, body_edit, dtype, timeout=30), 1e-6 if dtype == "fp32" else 0.02)


def body_full_tensor(rank, world, stage):
    """The optimizer's own view of whole tensors equals the plain process's, in shape, too."""
    model = seeded(Deep)
    reference = Reference(model)
    engine = start(model, stage, world)
    x, target = batch(0, rank)
    engine.backward(loss_of(engine(x), target))
    grads = [engine.optimizer.full_tensor(i, "grad") for i in range(len(engine._param_names))]
    sum(reference.on(0, part) / world for part in range(world)).backward()
    worst = max(relative(a, b.grad) for a, b in zip(grads, reference.model.parameters()))
    reference.step([reference.on(0, part) for part in range(world)])
    engine.step()
    masters = [engine.optimizer.full_tensor(i, "fp32") for i in range(len(engine._param_names))]
    return {
        "gradients": worst,
        "masters": max(relative(a, b) for a, b in zip(masters, reference.model.parameters())),
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_tensors_of_the_optimizer(stage):
    same(run_ranks(3, body_full_tensor, stage, timeout=30))


# ---- zero.Init --------------------------------------------------------------------------------------------------------


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


def body_init(rank, world, how):
    plain = seeded(Built)
    reference = Reference(plain)
    torch.manual_seed(rank if how == "rank 0 counts" else 0)
    if how == "disabled":
        with deepspeed.zero.Init(enabled=False):
            model = Built()
        assert not any(hasattr(p, "ds_id") for p in model.parameters())
    elif how == "nested":
        with deepspeed.zero.Init():
            with deepspeed.zero.Init():
                model = Built()
            another = torch.nn.Linear(4, 4)
        assert another.weight.numel() == 0
    elif how == "module":
        model = Built()
        deepspeed.zero.Init(module=model)
    elif how == "whole class":
        with deepspeed.zero.Init():

            class Late(Built):
                pass

            model = Late()
    else:
        with deepspeed.zero.Init():
            model = Built()
    assert torch.nn.Linear(3, 3).weight.numel() == 9, "outside the context modules are plain again"
    if how != "disabled":
        for name, param in model.named_parameters():
            expected = dict(plain.named_parameters())[name]
            assert param.numel() == 0 and param.ds_shape == expected.shape and param.ds_numel == expected.numel()
            assert param.ds_tensor.numel() == -(-expected.numel() // world)
        assert model.tied.weight is model.first.weight
        assert_untouchable(lambda: torch.nn.init.ones_(model.head.weight), model.head.weight.ds_handle.name)
        initial = gap(model, plain)
        assert initial == 0.0, "the values of the plain constructor"
        assert model.seen_in_constructor == (0 if how != "module" else WIDTH * WIDTH)
    engine = start(model, 3, world)
    for step in range(4):
        x, target = batch(step, rank)
        engine.backward(loss_of(engine(x), target))
        engine.step()
        reference.step([reference.on(step, part) for part in range(world)])
    return gap(engine, reference)


@pytest.mark.parametrize("how", ["plain", "nested", "module", "disabled", "whole class", "rank 0 counts"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_models_built_inside_init(world, how):
    same(run_ranks(world, body_init, how, timeout=30, init=True))


def body_init_odd(rank, world):
    """Empty, scalar and one-element parameters, one frozen, from the first to the last step."""
    plain = make("odd and empty sizes")
    reference = Reference(plain)
    torch.manual_seed(0)
    with deepspeed.zero.Init():
        model = type(plain)()
    engine = start(model, 3, world)
    for step in range(4):
        for loss in outputs_of(engine, step, rank, torch.float32):
            engine.backward(loss)
        engine.step()
        reference.step([sum(outputs_of(reference.model, step, part, torch.float64)) for part in range(world)])
    return gap(engine, reference)


@pytest.mark.parametrize("world", [1, 3])
def test_odd_sizes_inside_init(world):
    same(run_ranks(world, body_init_odd, timeout=30, init=True))


# ---- memory -----------------------------------------------------------------------------------------------------------


class Checkpointed(Deep):
    reentrant = True

    def forward(self, x):
        hidden = x * self.extra[0]
        for layer in self.layers:
            hidden = torch.tanh(checkpoint(layer, hidden, use_reentrant=self.reentrant))
        return self.head(hidden + self.extra[1])


def body_peak(rank, world, kind, reentrant):
    model = seeded(Deep if kind is None else Checkpointed, 12)
    Checkpointed.reentrant = reentrant
    engine = start(model, 3, world, zero={"stage3_max_reuse_distance": 0})
    gatherer = engine.core.gatherer
    for step in range(3):
        gatherer.reset_peak()
        x, target = batch(step, rank)
        engine.backward(loss_of(engine(x), target))
        engine.step()
    return gatherer.peak_live_numel, gatherer.live_numel


@pytest.mark.parametrize(
    "kind, reentrant",
    [(None, False), ("checkpoint", True), ("checkpoint", False)],
    ids=["plain", "re-entrant checkpointing", "non-re-entrant checkpointing"],
)
def test_few_layers_are_gathered_at_one_time(kind, reentrant):
    layer = WIDTH * WIDTH + WIDTH
    own, head = 2 * WIDTH, 2 * WIDTH  # of the model itself: gathered all the time
    for peak, live in run_ranks(2, body_peak, kind, reentrant, timeout=30):
        assert live == 0
        assert peak <= own + head + 3 * layer, f"{peak / layer:.1f} layers of 12 at one time"
