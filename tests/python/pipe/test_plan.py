"""deepspeed.pipe.plan: bubble, memory and traffic of a pipeline that is not there."""

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.pipe.profile import LayerCost
from deepspeed.planner.parts import ELEMENTWISE, layer_works
from refusals import refused

WIDTH, BATCH = 32, 4
SAMPLE = torch.ones(BATCH, WIDTH)


def equal_layers(count=8):
    return [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(count)]


def test_work_of_layers():
    frozen = nn.Linear(WIDTH, 2 * WIDTH)
    frozen.requires_grad_(False)
    linear, tanh, fixed, square = layer_works(
        [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False), torch.tanh, frozen, lambda x: x @ x.t()], SAMPLE
    )
    product = 2 * BATCH * WIDTH * WIDTH
    assert (linear.forward, linear.backward_input, linear.backward_weight) == (product, product, product)
    assert linear.parameters == WIDTH * WIDTH
    assert linear.activation_bytes == linear.output_bytes == BATCH * WIDTH * 4  # its input is kept
    assert tanh.forward == ELEMENTWISE * BATCH * WIDTH and tanh.backward_weight == 0
    assert fixed.forward == 2 * product and fixed.backward_weight == 0 and fixed.backward_input == 2 * product
    assert square.backward_input == 2 * square.forward
    assert not frozen.weight.is_meta and frozen.weight.grad is None


def test_convolutions_attention_and_ties():
    def attention(x):
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x

    def logits(module, x):
        return x @ module.weight.t()

    layers = [
        TiedLayerSpec("e", nn.Embedding, 50, 16),
        attention,
        TiedLayerSpec("e", nn.Embedding, 50, 16, forward_fn=logits),
    ]
    embed, attend, head = layer_works(layers, torch.zeros(2, 8, dtype=torch.long))
    assert attend.forward >= 2 * 2 * 2 * 8 * 8 * 16 and attend.backward_weight == 0
    assert head.backward_weight == 2 * 2 * 8 * 16 * 50 and head.output_bytes == 2 * 8 * 50 * 4
    [conv] = layer_works([nn.Conv2d(3, 5, 3, padding=1)], torch.ones(2, 3, 7, 7))
    assert conv.backward_weight == 2 * 2 * 5 * 7 * 7 * 3 * 9
    layers = [nn.ConvTranspose2d(3, 5, 3), nn.LayerNorm(9)]
    turned, norm = layer_works(layers, torch.ones(2, 3, 7, 7))
    assert turned.forward == turned.backward_weight == 2 * 2 * 3 * 7 * 7 * 5 * 9
    assert norm.forward == ELEMENTWISE * (2 * 5 * 9 * 9 + 2 * 2 * 5 * 9)  # what it writes, with means and deviations


class Routed(nn.Module):
    """Four experts of one product, on ``ranks``."""

    def __init__(self, ranks, **options):
        super().__init__()
        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH, bias=False), 4, ranks, min_capacity=1, **options)

    def forward(self, x):
        return self.moe(x)[0]


@pytest.mark.parametrize(
    "options, rows",
    [
        ({"k": 2, "drop_tokens": False}, 2),  # of each token
        ({"k": 2, "capacity_factor": 3.0}, 6),
        ({"k": 1, "capacity_factor": 0.5, "use_residual": True}, 1.5),
        ({"k": 4, "capacity_factor": 1.0, "noisy_gate_policy": "RSample", "z_loss_coeff": 0.1}, 4),
    ],
)
def test_experts_that_ranks_share_have_the_rows_that_their_layer_keeps(options, rows):
    for ranks in (1, 2, 4):
        [layer] = layer_works([LayerSpec(Routed, ranks, **options)], torch.ones(64, WIDTH))
        product, gate = 2 * 64 * WIDTH * WIDTH, 2 * 64 * WIDTH * (4 + 2 * ("use_residual" in options))
        assert layer.backward_weight == rows * product + gate
        assert layer.parameters == WIDTH * WIDTH * 4 // ranks + 4 * WIDTH + (
            WIDTH * WIDTH + 2 * WIDTH + 2 if "use_residual" in options else 0
        )


@pytest.mark.parametrize("schedule, bubble", [("1f1b", 3 / 11), ("gpipe", 3 / 11), ("zb-h1", 3 / 27)])
def test_bubbles(schedule, bubble):
    made = deepspeed.pipe.plan(equal_layers(), 4, 8, schedule, SAMPLE)
    assert made.schedule == schedule and made.bubble == pytest.approx(bubble) and made.seconds is None
    one = BATCH * WIDTH * 4  # of two layers on each stage are kept: both inputs, and the output
    assert [stage.layers for stage in made.stages] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    first = made.stages[0]
    assert first.peak_live == (8 if schedule == "gpipe" else 4)
    # And while a backward runs the gradients of its output, of what is between the layers, and of a weight; the half
    # for weights has kept what came in between.
    needed = 3 * one + (1 if schedule == "zb-h1" else 2) * one + WIDTH * WIDTH * 4
    assert first.peak_activation_bytes == (first.peak_live - 1) * 3 * one + needed
    assert first.parameters == 2 * WIDTH * WIDTH and first.state_bytes == 16 * first.parameters
    assert first.bytes_sent == 8 * BATCH * WIDTH * 4 and made.stages[1].bytes_sent == 2 * first.bytes_sent
    text = str(made)
    assert f"schedule {schedule}: 4 stages x 1 parts, 8 micro-batches, bubble {bubble:.1%}" in text
    assert text.count("stage ") >= 5 and "F0" in made.timeline(200)


def test_parts_and_auto():
    down_and_up = deepspeed.pipe.plan(equal_layers(), 4, 8, "zb-v", SAMPLE, virtual_stages=2)
    assert [stage.layers for stage in down_and_up.stages] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    looped = deepspeed.pipe.plan(equal_layers(), 4, 8, "interleaved", SAMPLE, virtual_stages=2)
    assert [stage.layers for stage in looped.stages] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert down_and_up.bubble < looped.bubble == pytest.approx(3 / 19)
    assert deepspeed.pipe.plan(equal_layers(), 4, 8, "auto", SAMPLE).schedule == "zb-h1"
    assert deepspeed.pipe.plan(equal_layers(), 4, 8, "auto", SAMPLE, virtual_stages=2, placement="v").schedule == "zb-v"
    words = "no pipeline schedule fits into pipeline.memory_limit 1000: the leanest, 1f1b"
    refused(ValueError, words, deepspeed.pipe.plan, equal_layers(), 4, 8, "auto", SAMPLE, memory_limit=1000)


def test_measured_times():
    slow = [LayerCost(forward=3e-3 if layer == 0 else 1e-3, backward=2e-3, activation_bytes=0, output_bytes=0)
            for layer in range(8)]  # fmt: skip
    made = deepspeed.pipe.plan(equal_layers(), 4, 8, "1f1b", SAMPLE, costs=slow, latency=1e-4, bytes_per_second=1e9)
    assert made.seconds > 8 * 8e-3 and "ms" in str(made)
    by_time = deepspeed.pipe.plan(equal_layers(), 2, 8, "1f1b", SAMPLE, costs=slow, partition_method="profile")
    assert by_time.bounds == [0, 4, 8] or by_time.bounds == [0, 3, 8]


def test_large_models_cost_nothing():
    layers = [LayerSpec(nn.Linear, 1 << 15, 1 << 15) for _ in range(8)]  # 34 GB
    made = deepspeed.pipe.plan(layers, 4, 16, "1f1b", torch.empty(1, 1 << 15, device="meta"))
    assert sum(stage.parameters for stage in made.stages) == 8 * ((1 << 30) + (1 << 15))


@pytest.mark.parametrize(
    "words, given, more",
    [
        ("needs sample=", (), {}),
        ("costs= has 1 layers, the pipeline 8", (), {"sample": SAMPLE, "costs": [None]}),
        ("give measured times, too", (), {"sample": SAMPLE, "latency": 1.0}),
        ("the pipeline schedule zb-v wants 2 chunks of layers on each rank, not 1", ("zb-v", SAMPLE), {}),
        ('there is no pipeline schedule "best": there are 1f1b, gpipe', ("best", SAMPLE), {}),
    ],
)
def test_bad_input(words, given, more):
    refused(ValueError, words, deepspeed.pipe.plan, equal_layers(), 4, 8, *given, **more)


def test_layers_that_do_not_fit_each_other():
    words, layers = r"layer 1 \(Linear\) of the pipeline cannot run on meta tensors: ", [(WIDTH, 3), (4, 4)]
    refused(RuntimeError, words, deepspeed.pipe.plan, [nn.Linear(*sizes) for sizes in layers], 2, 2, sample=SAMPLE)


def test_a_backward_that_is_not_split():
    split, whole = (
        deepspeed.pipe.plan(equal_layers(), 4, 8, "zb-h1", SAMPLE, split_backward=split) for split in (True, False)
    )
    assert whole.bubble == pytest.approx(3 / 11) and whole.bubble > split.bubble  # as 1f1b
    assert "backwards are not split" in str(whole) and "not split" not in str(split)
    assert deepspeed.pipe.plan(equal_layers(), 4, 8, "auto", SAMPLE, split_backward=False).schedule == "1f1b"
    assert "not split" not in str(deepspeed.pipe.plan(equal_layers(), 4, 8, "1f1b", SAMPLE, split_backward=False))


class _Values(torch.autograd.Function):
    """A backward that reads memory, which meta tensors have not."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().numpy().item()


def test_memory_of_parts():
    """A stage with 16 micro-batches, so that what one pass needs is little beside what is kept."""
    width, rows = 8, 1024
    one = rows * width * 4

    def block():
        return LayerSpec(nn.Sequential, nn.Linear(width, width), nn.Tanh(), nn.Tanh())

    def kept(interval, layers=None, names=None):
        made = deepspeed.pipe.plan(
            layers or [block() for _ in range(4)], 1, 64, "gpipe", torch.ones(rows, width),
            activation_checkpoint_interval=interval, checkpointable_layers=names,
        )  # fmt: skip
        return made.stages[0].peak_activation_bytes / one / 64, made.note

    assert kept(0)[0] == pytest.approx(1 + 4 * 2, rel=0.05)  # the input, and of each layer two results of tanh
    assert kept(2)[0] == pytest.approx(3, rel=0.1)  # inputs of two segments, and the output
    assert kept(1)[0] == pytest.approx(5, rel=0.05) and kept(2, names=["Conv2d"])[0] == kept(0)[0]
    # A tensor that goes through several layers, and is kept by several, is one.
    through = [lambda x: (x.tanh(), x), lambda pair: (pair[0] * pair[1], pair[1]), lambda pair: pair[0] + pair[1]]
    assert kept(0, layers=[nn.Linear(width, width), *through])[0] == pytest.approx(4, rel=0.05)
    loss = {"loss_fn": lambda out, labels: (out - labels).square().mean(), "labels": torch.zeros(rows, width)}
    with_loss = deepspeed.pipe.plan([block()], 1, 64, "gpipe", torch.ones(rows, width), **loss).stages[0]
    assert with_loss.peak_activation_bytes / one / 64 == pytest.approx(3 + 2, rel=0.05)  # labels, and the difference
    loss["loss_fn"] = lambda out, labels: out.mean() * labels.sum().numpy().item()
    without = deepspeed.pipe.plan([block()], 1, 64, "gpipe", torch.ones(rows, width), **loss)
    assert without.stages[0].peak_activation_bytes / one / 64 == pytest.approx(3, rel=0.05)
    assert "the loss does not run on meta tensors, so its memory is not known: " in without.note
    found, note = kept(0, layers=[block(), _Values.apply, block()])
    assert found == pytest.approx(6, rel=0.05)
    assert "layers 0 to 2 cannot run backward on meta tensors, so its peak is not known: " in note
