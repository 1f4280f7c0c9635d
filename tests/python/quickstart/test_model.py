"""The model of the quickstart: its size, its causality, and both ways to attend."""

import pytest
import torch
import torch.nn.functional as F

import model

SMALL = model.Shape(vocab_size=64, context=16, layers=2, heads=2, width=32)


def test_has_about_ten_million_parameters():
    assert 9e6 < sum(p.numel() for p in model.GPT(model.Shape()).parameters()) < 11e6


@pytest.fixture
def gpt():
    torch.manual_seed(0)
    return model.GPT(SMALL).eval()


def test_looks_at_the_past_only(gpt):
    x = torch.randint(0, 64, (2, 16))
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    a, b = gpt(x), gpt(changed)
    assert torch.allclose(a[:, :9], b[:, :9], atol=1e-6) and not torch.allclose(a[:, 9:], b[:, 9:], atol=1e-3)


def test_both_attentions_agree(gpt, monkeypatch):
    x = torch.randint(0, 64, (2, 11))
    here = gpt(x)
    if hasattr(F, "scaled_dot_product_attention"):
        monkeypatch.delattr(F, "scaled_dot_product_attention")
    else:

        def reference(q, k, v, is_causal):
            later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
            return torch.softmax(scores, -1) @ v

        monkeypatch.setattr(F, "scaled_dot_product_attention", reference, raising=False)
    assert torch.allclose(here, gpt(x), atol=1e-5)


def test_loss_is_that_of_guessing_before_training(gpt):
    x = torch.randint(0, 64, (8, 16))
    assert abs(gpt(x, torch.randint(0, 64, (8, 16))).item() - torch.tensor(64.0).log().item()) < 0.2


def test_generation_repeats_with_a_seed(gpt):
    run = lambda: gpt.generate([1, 2], 30, generator=torch.Generator().manual_seed(1))
    assert run() == run() and len(run()) == 32


def test_groups_hold_every_parameter_once(gpt):
    ids = [id(p) for group in model.parameter_groups(gpt, 0.1) for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in gpt.parameters())
