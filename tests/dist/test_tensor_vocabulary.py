"""A vocabulary that ranks share: its layers, its losses, and training with the embedding, the head and the loss cut."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensor_models as look_alikes
from deepspeed import comm as dist
from deepspeed.module_inject.layers import VocabParallelEmbedding, VocabParallelLinear, set_autotp_mode
from deepspeed.module_inject.vocab_logits import VocabLogits
from deepspeed.sequence.cross_entropy import (
    VocabParallelCausalLMLoss,
    VocabParallelCrossEntropyLoss,
    configure_vocab_parallel_loss,
    vocab_parallel_cross_entropy,
)
from deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from deepspeed.sequence.vocab_parallel_ops import (
    vocab_parallel_entropy,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
)
from deepspeed.utils import groups
from harness import on_ranks
from refusals import refused

WORDS, WIDTH = 11, 6


def ranks_of(world):
    groups.clear()
    set_autotp_mode(training=True)
    return groups._init_tp_mesh_device(world)[1]


def sample(rank, world, seed=0):
    """``(logits of all words, this rank's as a leaf, targets)``, of which one does not count."""
    generator = torch.Generator().manual_seed(seed)
    whole = (torch.randn(2, 5, WORDS, generator=generator, dtype=torch.float64) * 4).requires_grad_()
    own = whole.detach().tensor_split(world, -1)[rank].clone().requires_grad_()
    targets = torch.randint(0, WORDS, (2, 5), generator=generator)
    targets[1, 2] = -100
    return whole, own, targets


def check(own, whole, made, wanted, rank, world, what):
    """Values and gradients of two tensors in fp64."""
    assert torch.allclose(made, wanted, rtol=1e-9, atol=1e-9), what
    factors = torch.arange(1.0, made.numel() + 1, dtype=made.dtype).view(made.shape)
    (found,) = torch.autograd.grad((made * factors).sum(), own, retain_graph=True)
    (expected,) = torch.autograd.grad((wanted * factors).sum(), whole, retain_graph=True)
    assert torch.allclose(found, expected.tensor_split(world, -1)[rank], rtol=1e-9, atol=1e-9), what


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks(init=True)
def test_losses_equal_those_of_all_words(rank, world):
    group = ranks_of(world)
    whole, own, targets = sample(rank, world)
    for reduction in ("none", "mean", "sum"):
        for smoothing in (0.0, 0.1):
            wanted = F.cross_entropy(
                whole.flatten(0, 1), targets.flatten(), reduction=reduction, label_smoothing=smoothing
            )
            made = vocab_parallel_cross_entropy(own, targets, group, reduction=reduction, label_smoothing=smoothing)
            wanted = wanted.view(targets.shape) if reduction == "none" else wanted
            check(own, whole, made, wanted, rank, world, (reduction, smoothing))
    made = VocabParallelCrossEntropyLoss(group)(own, targets)
    check(own, whole, made, F.cross_entropy(whole.flatten(0, 1), targets.flatten()), rank, world, "module")
    made = VocabParallelCausalLMLoss(group)(own, targets, num_items_in_batch=3)
    wanted = F.cross_entropy(whole[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum") / 3
    check(own, whole, made, wanted, rank, world, "model's loss")


@pytest.mark.parametrize("world", [1, 3])
@on_ranks(init=True)
def test_functions_of_probabilities(rank, world):
    group = ranks_of(world)
    whole, own, targets = sample(rank, world)
    other, own_other, _ = sample(rank, world, seed=1)
    targets = targets.clamp(min=0)
    logprobs = whole.log_softmax(-1)
    wanted = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    check(own, whole, vocab_parallel_logprobs(own, targets, group), wanted, rank, world, "logprobs")
    check(own, whole, vocab_parallel_entropy(own, group), -(logprobs.exp() * logprobs).sum(-1), rank, world, "entropy")
    wanted = (logprobs.exp() * (logprobs - other.log_softmax(-1))).sum(-1)
    made = vocab_parallel_kl_div(own, own_other, group)
    check(own, whole, made, wanted, rank, world, "divergence")
    check(own_other, other, vocab_parallel_kl_div(own, own_other, group),
          (whole.log_softmax(-1).exp() * (whole.log_softmax(-1) - other.log_softmax(-1))).sum(-1),
          rank, world, "divergence, reference")  # fmt: skip


@on_ranks(2, init=True)
def test_a_head_and_its_loss_in_blocks(rank, world):
    group, generator = ranks_of(world), torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 4, WIDTH, generator=generator), torch.randn(WORDS, WIDTH, generator=generator)
    targets = torch.randint(0, WORDS, (3, 4), generator=generator)
    for rows, reduction in ((5, "mean"), (None, "none"), (12, "sum")):
        own_hidden, whole_hidden = (hidden.clone().requires_grad_() for _ in range(2))
        own, whole = nn.Parameter(weight.tensor_split(world)[rank].clone()), nn.Parameter(weight.clone())
        made = vocab_parallel_linear_cross_entropy(
            own_hidden, own, targets, group, reduction=reduction, block_rows=rows
        )
        wanted = F.cross_entropy((whole_hidden @ whole.t()).flatten(0, 1), targets.flatten(), reduction=reduction)
        assert torch.allclose(made.flatten(), wanted, atol=1e-5)
        made.sum().backward()
        wanted.sum().backward()
        assert torch.allclose(own.grad, whole.grad.tensor_split(world)[rank], atol=1e-5)
        assert torch.allclose(own_hidden.grad, whole_hidden.grad, atol=1e-5)


@on_ranks(2, init=True)
def test_layers_by_themselves(rank, world):
    group = ranks_of(world)
    torch.manual_seed(0)
    embedding, head = nn.Embedding(WORDS, WIDTH, padding_idx=3), nn.Linear(WIDTH, WORDS)
    words, targets = torch.randint(0, WORDS, (2, 5)), torch.randint(0, WORDS, (2, 5))
    words[0, 0] = 3
    own_embedding = VocabParallelEmbedding(copy.deepcopy(embedding), group)
    own_head = VocabParallelLinear(copy.deepcopy(head), group)
    logits = own_head(own_embedding(words))
    wanted = head(embedding(words))
    assert isinstance(logits, VocabLogits) and logits.shape[-1] == own_head.words.stop - own_head.words.start
    assert torch.allclose(logits.whole(), wanted, atol=1e-5)
    F.cross_entropy(logits.float().view(-1, WORDS), targets.view(-1)).backward()
    F.cross_entropy(wanted.view(-1, WORDS), targets.view(-1)).backward()
    mine = slice(own_head.words.start, own_head.words.stop)
    for own, whole in (
        (own_embedding.weight, embedding.weight),
        (own_head.weight, head.weight),
        (own_head.bias, head.bias),
    ):
        assert torch.allclose(own.grad, whole.grad[mine], atol=1e-6)
    assert torch.allclose(logits.float().sum(), wanted.sum(), atol=1e-4)
    evaluated = own_head.eval()(own_embedding(words))
    assert type(evaluated) is torch.Tensor and torch.allclose(evaluated, wanted, atol=1e-5)
    with pytest.raises(IndexError, match="word 11 is not one of the 11 words"):
        own_embedding(torch.tensor([WORDS]))
    with pytest.raises(ValueError, match="target 11 is not one of the 11 words"):
        F.cross_entropy(logits.view(-1, WORDS), torch.full((10,), WORDS))


FUNCTIONS = {  # what scripts do with logits; the second number: whether every rank gets those of all words
    "shifted": (lambda x: x[..., :-1, :].contiguous(), False),
    "the last token": (lambda x: x[:, -1], False),
    "the last token of all": (lambda x: x[:, -1, :], False),
    "chosen tokens": (lambda x: x[torch.tensor([[True, False, True, True, False]] * 2)], False),
    "rows": (lambda x: x.reshape(-1, x.size(-1)), False),
    "rows of words": (lambda x: x.view(-1, WORDS), False),
    "rows, the rest": (lambda x: x.view(10, -1), False),
    "flat tokens": (lambda x: x.flatten(0, 1), False),
    "tokens first": (lambda x: x.transpose(0, 1), False),
    "temperature": (lambda x: x.float() / 2.0, False),
    "soft cap": (lambda x: torch.tanh(x / 3) * 3, False),
    "half types": (lambda x: x.to(torch.bfloat16), False),
    "some words": (lambda x: x[..., 2:4], True),
    "one word": (lambda x: x[:, :, 7], True),
    "best": (lambda x: x.argmax(-1), True),
    "probabilities": (lambda x: x.softmax(-1), True),
    "a bias for each word": (lambda x: x + torch.arange(float(WORDS)), True),
    "turned": (lambda x: x.transpose(1, 2), True),
    "turned all": (lambda x: x[0].T, True),
    "two of them": (lambda x: torch.cat([x, x]), True),
    "flat": (lambda x: x.view(-1), True),
}


@on_ranks(2, init=True)
def test_functions_of_logits(rank, world):
    group = ranks_of(world)
    torch.manual_seed(0)
    head, x = nn.Linear(WIDTH, WORDS), torch.randn(2, 5, WIDTH)
    own = VocabParallelLinear(copy.deepcopy(head), group)
    for name, (function, whole) in FUNCTIONS.items():
        made, wanted = function(own(x)), function(head(x))
        assert isinstance(made, VocabLogits) is not whole, name
        if not whole:
            assert made.shape[:-1] == wanted.shape[:-1], name
            made = made.whole()
        assert torch.allclose(made.float(), wanted.float(), atol=2e-2 if name == "half types" else 1e-5), name


@on_ranks(2, init=True)
def test_losses_that_need_all_words(rank, world):
    group = ranks_of(world)
    torch.manual_seed(0)
    head, x, targets = nn.Linear(WIDTH, WORDS), torch.randn(10, WIDTH), torch.randint(0, WORDS, (10,))
    own = VocabParallelLinear(copy.deepcopy(head), group)
    for given in ({"weight": torch.rand(WORDS)}, {"target": torch.rand(10, WORDS).softmax(-1)}):
        call = {"target": targets, **given}
        own.weight.grad = head.weight.grad = None
        made, wanted = F.cross_entropy(own(x), **call), F.cross_entropy(head(x), **call)
        assert torch.allclose(made, wanted, atol=1e-5)
        made.backward()
        wanted.backward()
        assert torch.allclose(own.weight.grad, head.weight.grad[own.words.start : own.words.stop], atol=1e-5)


@on_ranks(2, init=True)
def test_what_does_not_fit_is_named(rank, world):
    group = ranks_of(world)
    _, own, targets = sample(rank, world)
    refused(
        ValueError, "vocab_start_index is 3, and the ranks", vocab_parallel_cross_entropy, own, targets, group, None, 3
    )
    refused(ValueError, "reduction is 'best'", VocabParallelCrossEntropyLoss, reduction="best")
    refused(ValueError, "need targets of shape", vocab_parallel_cross_entropy, own, targets[0], group)
    refused(ValueError, "has no loss_function", configure_vocab_parallel_loss, nn.Linear(2, 2))
    assert dist.get_world_size(group) == world and look_alikes.WORDS
