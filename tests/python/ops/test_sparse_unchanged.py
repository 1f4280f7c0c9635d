"""The section ``sparse_attention``: models that nobody changes attend to the blocks of a pattern, under their own masks."""

import copy

import pytest
import torch

import toy_transformers
from deepspeed.ops import sparse_attention as sparse
from deepspeed.ops.sparse_attention import unchanged
from refusals import refusing

FIXED = {"mode": "fixed", "block": 4, "num_local_blocks": 2}


@pytest.fixture
def toy():
    with toy_transformers.installed() as table:
        yield table


def seen_by(section, heads, tokens):
    """Bool ``[heads, tokens, tokens]``."""
    pattern = unchanged.pattern_of(section, heads)
    padded = -(-tokens // pattern.block) * pattern.block
    layout = pattern.make_layout(padded).bool()
    return layout.repeat_interleave(pattern.block, 1).repeat_interleave(pattern.block, 2)[:, :tokens, :tokens]


@pytest.mark.parametrize("tokens", [16, 13])
@pytest.mark.parametrize(
    "section", [FIXED, {"mode": "bigbird", "block": 4, "num_random_blocks": 1, "different_layout_per_head": True}]
)
def test_attention_is_that_of_the_pattern_and_the_models_mask(toy, section, tokens):
    model = toy_transformers.ToyForCausalLM()
    plain, ids = copy.deepcopy(model), torch.randint(31, (2, tokens))
    sparse.sparsify(model, section)
    seen = seen_by(section, 4, tokens) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    toy["masked"] = lambda module, q, k, v, mask, **more: toy_transformers.sdpa_attention_forward(
        module, q, k, v, seen, **more
    )
    plain.config._attn_implementation = "masked"
    found, expected = (one(input_ids=ids, labels=ids) for one in (model, plain))
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    found.loss.backward(), expected.loss.backward()
    for one, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_other_models_and_calls_are_as_before(toy):
    model, other = toy_transformers.ToyForCausalLM(), toy_transformers.ToyForCausalLM()
    ids = torch.randint(31, (2, 16))
    expected = other(input_ids=ids).logits
    sparse.sparsify(model, FIXED)
    assert torch.equal(other(input_ids=ids).logits, expected)
    assert not torch.allclose(model(input_ids=ids).logits, expected)


def call(function, q, k, v, mask=None, causal=False, **more):
    module = torch.nn.Module()
    module.is_causal = causal
    return function(module, q, k, v, mask, scaling=0.5, **more)[0].transpose(1, 2)


def reference(q, k, v, seen, bias=0.0):
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.5 + bias).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).nan_to_num() @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize("form", ["none", "padding", "bool", "heads", "added", "bias", "window", "cache"])
def test_masks_of_models(form):
    torch.manual_seed(0)
    section = {"mode": "fixed", "block": 4, "num_local_blocks": 2, "attention": "bidirectional"}
    function = unchanged.SparseFunction(unchanged.pattern_of(section, 4), toy_transformers.sdpa_attention_forward)
    q, k, v = torch.randn(2, 4, 14, 8), torch.randn(2, 2, 14, 8), torch.randn(2, 2, 14, 8)
    layout, given, bias, rows = seen_by(section, 4, 14), {}, 0.0, slice(None)
    seen, tril = layout.expand(2, -1, -1, -1), torch.ones(14, 14, dtype=torch.bool).tril()
    kept = torch.ones(2, 14, dtype=torch.bool)
    kept[0, 9:] = False
    if form == "padding":
        given, seen = {"mask": kept.long()}, seen & kept[:, None, None]
    elif form == "bool":
        given, seen = {"mask": kept[:, None, None] & tril, "causal": True}, seen & kept[:, None, None] & tril
    elif form == "heads":
        own = torch.rand(2, 4, 14, 14) < 0.5
        given, seen = {"mask": own}, seen & own
    elif form == "added":
        bias = torch.randn(2, 1, 14, 14)
        given = {"mask": bias}
    elif form == "bias":
        bias = torch.randn(1, 4, 14, 14)
        given = {"position_bias": bias}
    elif form == "window":
        given, seen = {"causal": True, "sliding_window": 5}, seen & tril & ~tril.tril(-5)
    elif form == "cache":
        rows, given, seen = slice(11, 14), {"causal": True}, seen & tril
    found = call(function, q[:, :, rows], k, v, **given)
    expected = reference(q, k, v, seen, bias)[:, :, rows]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_made_sparse_says_so(toy):
    with refusing(ValueError, "Linear is none", "SparseSelfAttention"):
        sparse.sparsify(torch.nn.Linear(2, 2), FIXED)
    with refusing(ValueError, 'attn_implementation "eager" cannot be made sparse', "sdpa"):
        sparse.sparsify(toy_transformers.ToyForCausalLM(implementation="eager"), FIXED)
    with refusing(NotImplementedError, "'strided'", "bigbird"):
        unchanged.pattern_of({"mode": "strided"}, 2)
    function = unchanged.SparseFunction(unchanged.pattern_of(FIXED, 4), None)
    q = torch.randn(1, 4, 8, 8)
    with refusing(ValueError, "passes s_aux to its attention"):
        call(function, q, q, q, s_aux=torch.ones(4))
    already = torch.nn.Sequential(sparse.SparseSelfAttention(sparse.FixedSparsityConfig(4)))
    assert sparse.sparsify(already, FIXED) is None


def test_a_pattern_is_explained():
    told = sparse.explain({"mode": "fixed", "block": 4, "num_local_blocks": 2}, 30, num_heads=3, head_size=8)
    layout = sparse.FixedSparsityConfig(3, 4, num_local_blocks=2).make_layout(32)
    assert told.density == pytest.approx(float(layout.float().mean()))
    assert told.flops == 14 * int(layout.sum()) * 16 * 8 and told.dense_flops == 14 * 3 * 32 * 32 * 8
    assert told.dense_bytes == 4 * 3 * 32 * 32 and told.rows_without_keys == 0
    assert "3 heads of 30 tokens" in str(told)

    class Nothing(sparse.SparsityConfig):
        def make_layout(self, seq_len):
            layout = self.setup_layout(seq_len)
            layout[:, 0, 0] = 1
            return layout

    assert sparse.explain(Nothing(2, 4), 16).rows_without_keys == 6
    with refusing(ValueError, "num_heads"):
        sparse.explain({"mode": "fixed"}, 32)


@pytest.mark.parametrize("kind", ["Bert", "Llama"])
def test_models_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "AttentionInterface"):
        pytest.skip("this transformers has no table of attention functions")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=40, attn_implementation="sdpa",
    )  # fmt: skip
    make = transformers.BertForMaskedLM if kind == "Bert" else transformers.LlamaForCausalLM
    model = make(config).eval()
    tokens, mask = torch.randint(3, 50, (2, 14)), torch.ones(2, 14, dtype=torch.long)
    mask[1, 11:] = 0
    expected = model(tokens, attention_mask=mask).logits
    dense, thin = copy.deepcopy(model), copy.deepcopy(model)
    sparse.sparsify(dense, {"mode": "dense", "block": 4})
    sparse.sparsify(thin, FIXED)
    for row, stop in ((0, 14), (1, 11)):
        found = dense(tokens, attention_mask=mask).logits[row, :stop]
        torch.testing.assert_close(found, expected[row, :stop], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(thin(tokens, attention_mask=mask).logits[row, :stop], expected[row, :stop], atol=1e-3)
    if kind == "Llama":
        whole = thin(tokens).logits
        first = thin(tokens[:, :10], use_cache=True)
        again = thin(tokens[:, 10:], past_key_values=first.past_key_values).logits
        torch.testing.assert_close(again, whole[:, 10:], rtol=1e-4, atol=1e-5)
