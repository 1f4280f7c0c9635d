"""deepspeed.profiling.op_costs: the figures equal formulas written by hand, and torch's own counter."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspeed._compat import TORCH2
from deepspeed.moe.grouped import grouped_product, stacked_product
from deepspeed.moe.rows import gate
from deepspeed.profiling.op_costs import Cost, CountedOps, costs
from deepspeed.sequence.chunked import chunked_attention
from flops_models import LENET_FLOPS, LENET_MACS, alexnet, lenet

BATCH, TOKENS, WIDTH, HEADS = 3, 7, 8, 2
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


def counted(run, mode=torch.enable_grad):
    """(MACs, other flops) of ``run()``, of which every operator has a row."""
    with CountedOps() as found, mode():
        run()
    assert not found.not_counted, found.not_counted
    assert found.flops == 2 * found.macs + found.other
    return found.macs, found.other


def of_both(run, *inputs):
    """(MACs of forward, of backward), with gradients for all inputs."""
    with CountedOps() as found:
        out = run(*inputs)
    forward = found.macs
    found.clear()
    with found:
        out.backward(torch.ones_like(out))
    assert not found.not_counted, found.not_counted
    return forward, found.macs


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize("mode", MODES)
def test_linear_layers_and_products(mode):
    x = torch.randn(BATCH, TOKENS, WIDTH)
    macs = BATCH * TOKENS * WIDTH * 5
    for bias in (False, True):
        layer = nn.Linear(WIDTH, 5, bias=bias)
        assert counted(lambda layer=layer: layer(x), mode) == (macs, 0)
        assert counted(lambda layer=layer: layer(x.transpose(0, 1)), mode) == (macs, 0)
        assert counted(lambda layer=layer: layer(x[0]), mode) == (macs // BATCH, 0)
    square = BATCH * TOKENS * TOKENS * WIDTH
    assert counted(lambda: x @ x.transpose(1, 2), mode) == (square, 0)
    assert counted(lambda: torch.einsum("bid,bjd->bij", x, x), mode) == (square, 0)
    assert counted(lambda: torch.einsum("bid,de->bie", x, torch.ones(WIDTH, 4)), mode) == (macs // 5 * 4, 0)
    assert counted(lambda: x @ torch.ones(WIDTH), mode) == (BATCH * TOKENS * WIDTH, 0)
    assert counted(lambda: torch.ones(WIDTH) @ torch.ones(WIDTH), mode) == (WIDTH, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_convolutions(size, mode):
    kinds = [(nn.Conv1d, nn.ConvTranspose1d), (nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d)]
    straight, transposed = kinds[size - 1]
    x = torch.randn(BATCH, 4, *[6] * size)
    for bias in (False, True):
        for groups in (1, 2):
            outputs = BATCH * 10 * 3**size  # kernel 3, stride 2, padding 1
            layer = straight(4, 10, 3, stride=2, padding=1, groups=groups, bias=bias)
            assert counted(lambda layer=layer: layer(x), mode) == (
                outputs * 4 // groups * 3**size,
                outputs if bias else 0,
            )
            layer = transposed(4, 10, 3, stride=2, groups=groups, bias=bias)
            outputs = BATCH * 10 * 13**size
            assert counted(lambda layer=layer: layer(x), mode) == (
                BATCH * 4 * 6**size * 10 // groups * 3**size,
                outputs if bias else 0,
            )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(WIDTH, 5, 2, bidirectional=True),
        nn.LSTM(WIDTH, 6, proj_size=3),
        nn.LSTM(WIDTH, 5, bias=False, batch_first=True),
        nn.GRU(WIDTH, 5, 2, bidirectional=True),
        nn.RNN(WIDTH, 5),
        nn.LSTMCell(WIDTH, 5),
        nn.GRUCell(WIDTH, 5),
    ],
    ids=str,
)
def test_recurrent_layers(layer, mode):
    """For each token each gate's products with the input and the state, in each direction."""
    gates = {"L": 4, "G": 3, "R": 1}[type(layer).__name__[0]]
    hidden = layer.hidden_size
    kept = getattr(layer, "proj_size", 0) or hidden
    each = directions = 1 + getattr(layer, "bidirectional", False)
    each *= gates * hidden * (WIDTH + kept) + (hidden * kept if kept != hidden else 0)
    for _ in range(getattr(layer, "num_layers", 1) - 1):
        each += directions * gates * hidden * (directions * kept + kept)
    cell = type(layer).__name__.endswith("Cell")
    x = torch.randn(*(() if cell else (TOKENS,)), BATCH, WIDTH)
    assert counted(lambda: layer(x), mode) == (each * BATCH * (1 if cell else TOKENS), 0)


def by_hand(q, k, v):
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


SCORES = BATCH * HEADS * TOKENS * TOKENS
ATTENTION = SCORES * 2 * WIDTH, SCORES


@pytest.mark.parametrize("mode", MODES)
def test_attention(mode):
    """Three forms: written out, torch's layer with its fast path, torch's function."""
    q = torch.randn(BATCH, HEADS, TOKENS, WIDTH)
    assert counted(lambda: by_hand(q, q, q), mode) == ATTENTION
    width = HEADS * WIDTH
    layer, x = nn.MultiheadAttention(width, HEADS, batch_first=True), torch.randn(BATCH, TOKENS, width)
    around = 4 * BATCH * TOKENS * width * width
    for training in (True, False):
        layer.train(training)
        for weights in (True, False):
            found = counted(lambda weights=weights: layer(x, x, x, need_weights=weights), mode)
            assert found == (ATTENTION[0] + around, ATTENTION[1])
    block = nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True)
    between, norms = 8 * BATCH * TOKENS * width * width, 2 * 5 * BATCH * TOKENS * width
    for training in (True, False):
        block.train(training)
        assert counted(lambda: block(x), mode) == (ATTENTION[0] + around + between, ATTENTION[1] + norms)


@pytest.mark.skipif(not TORCH2, reason="torch 1.13 has no public scaled_dot_product_attention")
@pytest.mark.parametrize("mode", MODES)
def test_fused_attention(mode):
    q = torch.randn(BATCH, HEADS, TOKENS, WIDTH)
    assert counted(lambda: F.scaled_dot_product_attention(q, q, q), mode) == ATTENTION
    assert counted(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), mode) == ATTENTION
    mask = torch.zeros(TOKENS, TOKENS)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        assert counted(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask), mode) == ATTENTION


@pytest.mark.parametrize("mode", MODES)
def test_operators_that_count_for_each_element(mode):
    x = torch.randn(BATCH, 4, 6, 6)
    size = x.numel()
    for pool in (nn.AvgPool2d(2), nn.MaxPool2d(3, 1), nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d(2),
                 nn.AdaptiveMaxPool2d(2)):  # fmt: skip
        assert counted(lambda pool=pool: pool(x), mode) == (0, size)
    for pool in (nn.AvgPool1d(2), nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(1)):
        assert counted(lambda pool=pool: pool(x[0]), mode)[1] == size // BATCH
    assert counted(lambda: x.softmax(-1), mode) == (0, size)
    assert counted(lambda: F.layer_norm(x, (6,)), mode) == (0, 4 * size)
    assert counted(lambda: nn.LayerNorm(6)(x), mode) == (0, 5 * size)
    assert counted(lambda: nn.BatchNorm2d(4)(x), mode) == (0, 5 * size)
    assert counted(lambda: nn.GroupNorm(2, 4)(x), mode) == (0, 5 * size)
    for free in (torch.tanh, torch.relu_, F.gelu, lambda x: x + x, lambda x: x.mean(), lambda x: x.reshape(-1).sort(),
                 nn.Dropout(0.5), lambda x: F.cross_entropy(x[0, 0], torch.arange(6))):  # fmt: skip
        assert counted(lambda free=free: free(x.clone()), mode) == (0, 0)


def test_bytes():
    table, numbers = nn.Embedding(1000, 4), torch.tensor([1, 2, 3])
    with CountedOps() as found:
        table(numbers)
    assert found.bytes == 2 * 3 * 4 * 4 + 3 * 8  # rows read and written, and their numbers
    found.clear()
    a, b = torch.ones(3, 5), torch.ones(5, 2)
    with found:
        (a @ b).t()
    assert found.bytes == 4 * (15 + 10 + 6)


def test_published_figures():
    net = lenet()
    x = torch.randn(1024, 1, 32, 32)
    for mode in MODES:
        with CountedOps() as found, mode():
            net(x)
        assert (found.flops, found.macs) == (LENET_FLOPS, LENET_MACS) == (866_076_672, 426_516_480)


def test_alexnet():
    batch = 2
    # Outputs on a side, channels, inputs, kernel of each convolution; then widths of the linear layers.
    layers = [(55, 64, 3, 11), (27, 192, 64, 5), (13, 384, 192, 3), (13, 256, 384, 3), (13, 256, 256, 3)]
    outputs = [side * side * channels for side, channels, _, _ in layers]
    macs = sum(count * before * kernel**2 for count, (_, _, before, kernel) in zip(outputs, layers))
    macs += 256 * 6 * 6 * 4096 + 4096 * 4096 + 4096 * 1000
    pooled = outputs[0] + outputs[1] + outputs[4] + 256 * 6 * 6
    with torch.no_grad():
        found = counted(lambda: alexnet()(torch.zeros(batch, 3, 224, 224)))
    assert found == (batch * macs, batch * (sum(outputs) + pooled)) and macs == 714_188_480


def test_native_kernels():
    """The costs of kernels that torch does not see, forward and backward."""
    rows, out = [2, 0, 5], 4
    x, weights = leaf(7, WIDTH), [leaf(out, WIDTH) for _ in rows]
    product = 7 * WIDTH * out
    assert of_both(lambda x: grouped_product(x, rows, weights), x) == (product, 2 * product)
    stacked = leaf(3, out, WIDTH)
    assert of_both(lambda x: stacked_product(x, rows, stacked), x) == (product, 2 * product)
    assert of_both(lambda x: stacked_product(x, rows, stacked.detach()), x) == (product, product)
    assert counted(lambda: gate(torch.randn(7, 4), 2)) == (0, 28)
    q, k, v = (leaf(BATCH, HEADS, TOKENS, WIDTH) for _ in range(3))
    found = of_both(lambda q: chunked_attention(q, k, v, TOKENS, causal=False), q)
    assert found == (ATTENTION[0], SCORES * 5 * WIDTH)
    assert counted(lambda: chunked_attention(q, k, v, TOKENS, causal=False).sum()) == ATTENTION


def test_an_operator_without_a_row():
    with CountedOps() as found:
        torch.fft.fft(torch.ones(8))
        torch.linalg.cholesky(torch.eye(3))
    assert found.flops == 0 and {"aten::_fft_r2c", "aten::linalg_cholesky_ex"} <= set(found.not_counted)
    library = torch.library.Library("ds_test_costs", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    twice, x = torch.ops.ds_test_costs.twice, torch.ones(3)
    found.clear()
    with found:
        twice(x)
    assert found.not_counted == {"ds_test_costs::twice": 1} and found.bytes == 2 * 3 * 4
    costs("ds_test_costs::twice")(lambda out, x: (0, out.numel()))
    assert counted(lambda: twice(x)) == (0, 3)


def test_a_listener_and_nested_modes():
    seen = []
    with CountedOps(on_op=lambda name, cost, operands, out: seen.append((name, cost, len(operands)))):
        with CountedOps() as inner:
            torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    assert inner.macs == 24 and ("aten::mm", Cost(24, 0, 4 * (6 + 12 + 8)), 2) in seen


@pytest.mark.skipif(not TORCH2, reason="torch 1.13 has no FlopCounterMode")
def test_torchs_own_counter():
    """Its figure is two flops for each MAC, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    x, image = leaf(BATCH, TOKENS, WIDTH), leaf(BATCH, 4, 6, 6)
    q = leaf(BATCH, HEADS, TOKENS, WIDTH)
    cases = [
        (nn.Linear(WIDTH, 5), x),
        (lambda x: x @ x.transpose(1, 2), x),
        (lambda x: torch.einsum("bid,bjd->bij", x, x), x),
        (nn.Conv2d(4, 10, 3, stride=2), image),
        (nn.ConvTranspose2d(4, 10, 3, stride=2), image),
        (nn.Conv1d(4, 5, 3), leaf(BATCH, 4, 9)),
        (nn.Conv3d(4, 5, 3), leaf(BATCH, 4, 5, 5, 5)),
        (lambda q: by_hand(q, q, q), q),
        (nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True), x),
    ]
    for run, one in cases:
        forward, backward = of_both(run, one)
        with FlopCounterMode(display=False) as theirs:
            out = run(one)
        assert 2 * forward == theirs.get_total_flops()
        with FlopCounterMode(display=False) as theirs:
            out.backward(torch.ones_like(out))
        assert 2 * backward == theirs.get_total_flops() > 0
    shape = q.shape  # the form of the CPU is not in their table
    for causal in (False, True):
        run = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
        forward, backward = of_both(lambda q, run=run: run(q, q, q), q)
        assert 2 * forward == sdpa_flop_count(shape, shape, shape)
        assert 2 * backward == sdpa_backward_flop_count(shape, shape, shape, shape)
