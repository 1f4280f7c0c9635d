"""Models for tests of pipelines, the same trained in one plain process, and the comparison."""

import functools
import time

import torch
from torch import nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.pipe.topology import PipeDataParallelTopology
from models import Parts, seeded
from plain import Plain

WIDTH, MICRO, SEED = 6, 2, 1234


class Block(nn.Module):
    def __init__(self, width=WIDTH, frozen=False):
        super().__init__()
        self.linear = nn.Linear(width, width)
        for parameter in self.parameters() if frozen else ():
            parameter.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.linear(x)) + x


class Sleep(torch.autograd.Function):
    """Takes its time forward and backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        time.sleep(forward)
        ctx.backward_seconds = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_seconds)
        return grad, None, None


class Sleeper(nn.Module):
    """A layer whose passes take ``seconds`` each: forward, the gradient of its input, and that of its weight, which are
    computed by two nodes, as those of a product are."""

    def __init__(self, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seconds = seconds

    def forward(self, x):
        return Sleep.apply(x, self.seconds, self.seconds) * Sleep.apply(self.weight, 0.0, self.seconds)


class Twice(nn.Module):
    """One weight used twice, in the middle of the way and beside it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x))) + (self.linear.weight * 0.1).sum()


class Masked(nn.Module):
    """Takes and gives (activations, mask, counts), of which only the first has gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, packed):
        x, mask, counts = packed
        x = torch.tanh(self.linear(x)) * mask.unsqueeze(-1) + counts.sum() * 0.01
        return x, mask, counts + 1


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, WIDTH) * 0.3)

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight)


def logits(module, x):
    return x @ module.weight.t()


def add_mask(x):
    return x, (x.sum(-1) > 0).bool(), torch.arange(3, device=x.device)


def first(packed):
    return packed[0]


def specs(kind):
    """Layers of eight, for up to eight stages."""
    blocks = [LayerSpec(Block) for _ in range(8)]
    if kind == "tied":
        inner = [LayerSpec(Block) for _ in range(6)]
        return [TiedLayerSpec("embed", Embed), *inner, TiedLayerSpec("embed", Embed, forward_fn=logits)]
    if kind == "twice":
        return [LayerSpec(Twice) if place % 2 else one for place, one in enumerate(blocks)]
    if kind == "frozen":
        return [LayerSpec(Block, frozen=place in (0, 1, 4)) for place, _ in enumerate(blocks)]
    if kind == "masked":
        return [add_mask, *[LayerSpec(Masked) for _ in range(6)], first]
    return blocks


def loss_of(kind):
    if kind == "tied":
        return lambda out, labels: nn.functional.cross_entropy(out.float().flatten(0, -2), labels.flatten())
    return lambda out, labels: (out.float() - labels).square().mean()


def micro_batch(kind, batch, micro, copy):
    """Shapes change with the micro-batch where ``kind`` says so."""
    generator = torch.Generator().manual_seed(1000 * batch + 10 * micro + copy)
    length = 3 + (batch + micro) % 3 if kind == "shapes" else 4
    if kind == "tied":
        tokens = torch.randint(0, 11, (MICRO, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(MICRO, length, WIDTH, generator=generator)
    return x, torch.randn(MICRO, length, WIDTH, generator=generator)


def batches(kind, count, micro_batches, copy, dtype=torch.float32):
    for batch in range(count):
        for micro in range(micro_batches):
            x, y = micro_batch(kind, batch, micro, copy)
            yield (x.to(dtype) if x.is_floating_point() else x), y


def plain_run(layers, batches, loss_of, clip=0.0, **adam):
    """``layers``, after steps of one plain process. A batch is the list of the micro-batches of all copies."""
    plain = Plain(layers, functools.partial(torch.optim.AdamW, lr=1e-2, **adam), dtype=None, clip=clip)
    for data in batches:
        plain.step(*(loss_of(plain.model(x), y) for x, y in data))
    return plain


def forward_all(net, x):
    for number, (key, function) in net.places.items():
        layer = net.layers[key] if key in net.layers else specs(net.kind)[number]
        x = layer(x) if function is None else function(layer, x)
    return x


def whole(kind):
    """All layers as one model; a tied layer stands in it once."""
    net = Parts(forward_all, layers=nn.ModuleDict(), places={}, kind=kind)
    tied = {}
    for number, spec in enumerate(specs(kind)):
        key = tied.setdefault(getattr(spec, "key", number), str(number))
        net.places[number] = key, None if key == str(number) else spec.forward_fn
        if key == str(number) and isinstance(spec, LayerSpec):
            net.layers[key] = seeded(spec.build, seed=SEED + number)
    return net


def plain(kind, count, micro_batches, copies, clip=0.0):
    """All layers after ``count`` batches in one plain process."""

    def data(batch):
        return [micro_batch(kind, batch, micro, copy) for micro in range(micro_batches) for copy in range(copies)]

    return plain_run(whole(kind), map(data, range(count)), loss_of(kind), clip)


def states_of(net):
    """The parameters of ``whole`` by layer number."""
    layers = {number: net.layers[key] for number, (key, _) in net.places.items() if key in net.layers}
    return {f"{number}.{name}": value for number, one in layers.items() for name, value in one.state_dict().items()}


def built(kind, state):
    """The layers of a model without tied ones, with the parameters ``state``."""
    layers = []
    for number, spec in enumerate(specs(kind)):
        layers.append(spec.build() if isinstance(spec, LayerSpec) else spec)
        if isinstance(spec, LayerSpec):
            layers[-1].load_state_dict({name: state[f"{number}.{name}"] for name in layers[-1].state_dict()})
    return layers


def config_of(micro_batches, stage=0, **sections):
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1000,
    }
    for name, section in sections.items():
        if isinstance(section, dict):
            config[name] = {**config.get(name, {}), **section}
        else:
            config[name] = section
    return config


def module_of(kind, stages, world, **options):
    topology = PipeDataParallelTopology(num_pp=stages, num_dp=world // stages)
    return PipelineModule(
        specs(kind), topology=topology, loss_fn=loss_of(kind), seed_layers=True, base_seed=SEED,
        partition_method="uniform", **options,
    )  # fmt: skip


def engine_of(kind, stages, world, micro_batches, stage=0, options=None, **sections):
    module = module_of(kind, stages, world, **(options or {}))
    return deepspeed.initialize(model=module, config=config_of(micro_batches, stage, **sections))[0]


def parameters_of(engine):
    """By layer number in the model."""
    found = {}
    module = engine.module
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=engine._stage_policy.shards_params):
        for place, layer in zip(module.local_layers, module._modules_by_position):
            for name, value in layer.state_dict().items() if layer is not None else ():
                found[f"{place}.{name}"] = value.detach().cpu().float().clone()
    return found


def compare(engine, losses, found, wanted, tolerance):
    expected, state = wanted.means, states_of(wanted.model)
    assert len(losses) == len(expected)
    for a, b in zip(losses, expected):
        assert abs(a - b) <= tolerance * max(1.0, abs(b)), (losses, expected)
    for name, value in found.items():
        difference = (value - state[name]).abs().max().item()
        assert difference <= tolerance * 10, (name, difference)
