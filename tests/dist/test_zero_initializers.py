"""Model libraries initialise weights when zero.Init has ended; what they load, initialise and gather then."""

import pytest
import torch

import deepspeed
from harness import on_ranks
from models import NormAndDirection, Parts
from refusals import refused
from runs import engine_of, take_step


def sinusoids(length, channels):
    return torch.arange(length)[:, None] * torch.ones(channels)[None]


class Pretrained(torch.nn.Module):
    """As transformers has it: what was loaded is marked, and initialisers leave it alone."""

    def initialize_weights(self):
        if not hasattr(torch.nn.Module, "smart_apply"):
            torch.nn.Module.smart_apply = lambda *_: pytest.fail("this one knows no shards")
        with torch.no_grad():
            self.smart_apply(self._initialize_weights, False)

    def _initialize_weights(self, module, custom):
        assert custom is False
        self.seen.append(type(module).__name__)
        self._init_weights(module)


class Encoder(Pretrained):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.positions = torch.nn.Embedding(5, 4)
        self.layer = torch.nn.Linear(4, 4)
        with deepspeed.zero.GatheredParameters(self.layer.weight, modifier_rank=0):
            torch.nn.utils.parametrize.register_parametrization(self.layer, "weight", NormAndDirection(), unsafe=True)

    def _init_weights(self, module):
        if isinstance(module, Encoder):
            table = sinusoids(*module.positions.weight.shape)
            assert table.shape == (5, 4)
            if not hasattr(module.positions.weight, "is_loaded"):
                module.positions.weight.copy_(table)
            assert module.positions.weight.shape == (5, 4)  # also after it was gathered for the copy
        elif isinstance(module, torch.nn.Linear):  # of the parametrized one the weight is computed
            assert module.weight.shape == (4, 4) and module.weight.norm() > 0


class Model(Pretrained):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.encoder, self.head = Encoder(), torch.nn.Linear(4, 2)

    def _init_weights(self, module):
        if isinstance(module, torch.nn.Linear):
            module.weight.normal_()


@pytest.mark.parametrize("loaded", [False, True])
@on_ranks(2, init=True)
def test_initializers_after_the_construction(rank, world, loaded):
    with deepspeed.zero.Init(dtype=torch.float32):
        model = Model()
    if loaded:
        model.encoder.positions.weight.is_loaded = True
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        before = {name: param.clone() for name, param in model.named_parameters()}
    torch.manual_seed(rank)  # rank 0's values count
    model.initialize_weights()
    assert model.encoder.seen[0] == "Embedding" and model.encoder.seen[-2:] == ["ParametrizedLinear", "Encoder"]
    assert model.seen == ["Linear", "Model"]
    assert all(param.shape == (0,) for param in model.parameters())
    refused(RuntimeError, "not on this rank", model.head.weight.norm)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        table = before["encoder.positions.weight"] if loaded else sinusoids(5, 4)
        assert torch.equal(model.encoder.positions.weight, table)
        torch.manual_seed(0)
        assert torch.equal(model.head.weight, torch.empty(2, 4).normal_())
        assert torch.equal(model.head.bias, before["head.bias"])


@on_ranks(2, init=True)
def test_ranks_may_name_parameters_in_any_order(rank, world):
    with deepspeed.zero.Init(dtype=torch.float32):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 200))
    params = list(model.parameters())
    given = params if rank == 0 else params[::-1]  # as a set of them would be
    with deepspeed.zero.GatheredParameters(given, modifier_rank=0):
        assert [tuple(p.shape) for p in params] == [(3, 4), (3,), (200, 3), (200,)]
        with torch.no_grad():
            for number, param in enumerate(params if rank == 0 else []):
                param.fill_(number)
    with deepspeed.zero.GatheredParameters(given):
        assert [param.unique().tolist() for param in params] == [[0.0], [1.0], [2.0], [3.0]]


def of_a_hub():
    """As models of the hub make their layers: their weights are to be loaded."""
    return Parts(
        lambda net, x: net.own(net.inside(net.norm(net.layer(x)))),
        layer=torch.nn.utils.skip_init(torch.nn.Linear, 4, 3),
        norm=torch.nn.utils.skip_init(torch.nn.BatchNorm1d, 3, device="cpu"),
        inside=torch.nn.utils.skip_init(Nested),
        own=torch.nn.Linear(3, 2),
    )


class Nested(torch.nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, device=device)
        self.register_buffer("shift", torch.ones(3, device=device))

    def forward(self, x):
        return self.linear(x) + self.shift


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_layers_whose_initialisation_is_skipped(rank, world):
    to_empty = torch.nn.Module.to_empty
    config = {
        "train_batch_size": 2 * world,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        net = of_a_hub()
    assert torch.nn.Module.to_empty is to_empty
    assert net.layer.weight.ds_shape == (3, 4) and net.layer.weight.shape == (0,)
    assert not any(buffer.is_meta for buffer in net.buffers()) and net.inside.shift.shape == (3,)
    values = {name: torch.full(tuple(param.ds_shape), 0.1) for name, param in net.named_parameters()}
    values.update({name: torch.ones_like(buffer) for name, buffer in net.named_buffers()})
    with deepspeed.zero.GatheredParameters(list(net.parameters()), modifier_rank=0):
        if rank == 0:
            net.load_state_dict(values)
    for buffer in net.buffers():
        buffer.fill_(1)
    engine = engine_of(net, config)
    before = engine(torch.ones(2, 4) * torch.arange(2)[:, None]).square().mean()
    take_step(engine, before)
    after = engine(torch.ones(2, 4) * torch.arange(2)[:, None]).square().mean()
    assert after.item() < before.item()
