"""Models with frozen layers inside checkpointed segments, and their losses."""

import torch

from models import Parts, beside

WIDTH, LENGTH, TOKENS = 8, 6, 11


def forward_frozen_layers(net, x, ids):
    x = net.layer(net.up(x) + net.embed(ids)) * net.scale
    rows = net.group(net.normed(net.transposed(net.conv(x.transpose(1, 2)))))
    x = x + net.prelu(net.batch(rows)).transpose(1, 2)
    x = net.bilinear(x, torch.tanh(x)) + net.attention(x, x, x, need_weights=False)[0]
    return torch.tanh(x + net.gru(x)[0])


def frozen_layers():
    """Every layer is frozen but ``up``; the first input may need no gradient."""
    net = Parts(
        forward_frozen_layers,
        embed=torch.nn.Embedding(TOKENS, WIDTH),
        conv=torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
        transposed=torch.nn.ConvTranspose1d(WIDTH, WIDTH, 1),
        normed=torch.nn.utils.weight_norm(torch.nn.Conv1d(WIDTH, WIDTH, 1)),
        layer=torch.nn.LayerNorm(WIDTH),
        group=torch.nn.GroupNorm(2, WIDTH),
        batch=torch.nn.BatchNorm1d(WIDTH, track_running_stats=False),
        bilinear=torch.nn.Bilinear(WIDTH, WIDTH, WIDTH),
        prelu=torch.nn.PReLU(WIDTH),
        attention=torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        scale=torch.nn.Parameter(torch.ones(WIDTH)),
        gru=torch.nn.GRU(WIDTH, WIDTH, batch_first=True),
        up=torch.nn.Linear(WIDTH, WIDTH),
    )
    net.requires_grad_(False).up.requires_grad_()
    return net


def adapted():
    """An adapter beside a frozen weight."""
    return Parts(
        lambda net, x: torch.tanh(net.base(x) + net.up(net.down(x))),
        base=torch.nn.Linear(2 * WIDTH, 2 * WIDTH).requires_grad_(False),
        down=torch.nn.Linear(2 * WIDTH, 2, bias=False),
        up=torch.nn.Linear(2, 2 * WIDTH, bias=False),
    )


def input_of(model, part, *shape):
    """An input that has a gradient, in the type of the model."""
    random = torch.Generator().manual_seed(5 + part)
    first = next(model.parameters())
    return beside(first, torch.randn(*shape, generator=random)).to(first.dtype).requires_grad_(), random


def loss_of_frozen(model, step, part):
    x, random = input_of(model, part, 1, LENGTH, WIDTH)
    return model(x, beside(x, torch.randint(0, TOKENS, (1, LENGTH), generator=random))).square().mean()


def loss_of_adapted(model, step, part):
    return model(input_of(model, part, 2, 2 * WIDTH)[0]).square().mean()
