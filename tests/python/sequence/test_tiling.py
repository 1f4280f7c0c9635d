"""``sequence.tile``: what is tiled, what is proven before, what is refused."""

import sys
import types
from unittest import mock

import torch

from deepspeed.sequence import tile
from deepspeed.sequence.tiled import TiledFusedLogitsLoss
from gradients import gradients
from refusals import refused

WIDTH = 4


class Mlp(torch.nn.Module):
    def __init__(self, mixes=False):
        super().__init__()
        self.up, self.down, self.mixes, self.most = torch.nn.Linear(WIDTH, 9), torch.nn.Linear(9, WIDTH), mixes, 0

    def forward(self, x):
        self.most = max(self.most, x.shape[1])
        x = x + x.mean(1, keepdim=True) if self.mixes else x
        return self.down(torch.nn.functional.dropout(self.up(x), 0.5, self.training).relu())


class Layer(torch.nn.Module):
    def __init__(self, mixes=False):
        super().__init__()
        self.norm, self.mlp = torch.nn.LayerNorm(WIDTH), Mlp(mixes)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def test_mlps_are_found_and_equal():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Layer(), Layer(mixes=True), Layer()).eval()
    x = torch.randn(2, 10, WIDTH, requires_grad=True)
    expected = model(x)
    leaves = [x, *model.parameters()]
    wanted = gradients(expected.square().sum(), leaves)
    assert tile(model) == ["0.mlp", "2.mlp"]
    model[0].mlp.most = 0
    found = model(x)
    assert model[0].mlp.most == WIDTH and model[1].mlp.most == 10 and not model.training
    torch.testing.assert_close(gradients(found.square().sum(), leaves), wanted, rtol=1e-5, atol=1e-5)
    assert torch.allclose(found, expected, atol=1e-6)
    assert model.train()(x).shape == x.shape and model[0].mlp.training


def test_a_named_module_must_treat_tokens_alone():
    words = r"'mlp' \(Mlp\) cannot be cut along the sequence: tokens change"
    refused(ValueError, words, tile, Layer(mixes=True), mlp=["mlp"])
    refused(ValueError, "'norm' .*it has no linear layer", tile, Layer(), mlp=["norm"])
    odd = torch.nn.Module()
    odd.attention = torch.nn.MultiheadAttention(WIDTH, 1)
    odd.attention.own = torch.nn.Linear(WIDTH, 1)
    refused(ValueError, r"called with a tensor of shape \(2, 5, 4\) it raises TypeError", tile, odd, mlp=["attention"])
    for arguments in ({"mlp": 3}, {"loss": "mean"}):
        refused(ValueError, "it must be", tile, Layer(), **arguments)
    assert tile(Layer(), mlp=None) == []


class ToyForCausalLM(torch.nn.Module):
    """As far as transformers' models matter here."""

    def __init__(self, **config):
        super().__init__()
        torch.manual_seed(0)
        self.config = types.SimpleNamespace(**config)
        self.model, self.lm_head = torch.nn.Embedding(11, WIDTH), torch.nn.Linear(WIDTH, 11)

    def get_decoder(self):
        return lambda input_ids: (self.model(input_ids),)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, labels=None):
        return self.lm_head(self.model(input_ids))


def test_the_loss(monkeypatch):
    made = types.SimpleNamespace(CausalLMOutputWithPast=lambda loss: types.SimpleNamespace(loss=loss))
    monkeypatch.setitem(sys.modules, "transformers.modeling_outputs", made)
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    apply = mock.Mock(wraps=TiledFusedLogitsLoss.apply)
    monkeypatch.setattr(TiledFusedLogitsLoss, "apply", apply)
    assert tile(ToyForCausalLM(final_logit_softcapping=30.0)) == []
    model, tokens = ToyForCausalLM(), torch.randint(0, 11, (2, 9))
    logits = model(tokens)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert tile(model) == ["loss"] and torch.equal(model(tokens), logits)
    assert torch.allclose(model(input_ids=tokens, labels=tokens).loss, expected)
    assert [call.args[5] for call in apply.call_args_list] == [3]
    count = torch.tensor(5)
    assert torch.allclose(model(input_ids=tokens, labels=tokens, num_items_in_batch=count).loss, expected * 16 / 5)
    shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    assert torch.allclose(model(input_ids=tokens, shift_labels=shifted).loss, expected)
