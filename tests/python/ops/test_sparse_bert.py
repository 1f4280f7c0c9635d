"""BERT and RoBERTa of transformers with sparse attention: the dense pattern gives what the model gave."""

import copy
import types

import pytest
import torch

from deepspeed.ops import sparse_attention as sparse
from refusals import refused

Utils = sparse.SparseAttentionUtils


def config_of(**more):
    return types.SimpleNamespace(hidden_size=32, num_attention_heads=4, **more)


def test_bert_sparse_self_attention_is_attention_of_its_projections():
    torch.manual_seed(1)
    layer = sparse.BertSparseSelfAttention(config_of(), sparse.DenseSparsityConfig(4, block=8))
    assert sorted(layer.state_dict()) == [
        f"{one}.{kind}" for one in ("key", "query", "value") for kind in ("bias", "weight")
    ]
    x, mask = torch.randn(2, 24, 32), torch.zeros(2, 1, 1, 24)
    mask[1, ..., 20:] = -1e9
    q, k, v = (layer.transpose_for_scores(one(x)) for one in (layer.query, layer.key, layer.value))
    expected = ((q @ k.transpose(-1, -2) / 8**0.5 + mask).softmax(-1) @ v).transpose(1, 2).flatten(2)
    assert float((layer(x, mask) - expected).abs().max()) < 1e-6
    bad = types.SimpleNamespace(hidden_size=30, num_attention_heads=4)
    refused(
        ValueError,
        r"hidden size \(30\) is not a multiple of the number of attention heads \(4\)",
        sparse.BertSparseSelfAttention,
        bad,
    )


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_a_model_of_transformers_becomes_sparse(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=34, attn_implementation="eager",
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    tokens, kept = torch.randint(3, 50, (2, 32)), torch.ones(2, 32, dtype=torch.long)
    kept[1, 27:] = 0
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=kept).logits
        dense = copy.deepcopy(model)
        made = Utils.replace_model_self_attention_with_sparse_self_attention(
            dense, 64, sparse.DenseSparsityConfig(4, 8)
        )
        assert made is dense and dense.config.max_position_embeddings == 64 + 2 * (kind == "Roberta")
        found = dense(input_ids=tokens, attention_mask=kept).logits
        assert float((found - expected)[kept.bool()].abs().max()) < 1e-5
        # Longer sequences than the model knew, padded to whole blocks.
        Utils.extend_position_embedding(dense, 100)
        long = torch.randint(3, 50, (2, 61))
        padded = Utils.pad_to_block_size(8, long, torch.ones_like(long), None, None, None, 1, None)
        assert padded[0] == 3 and padded[1].shape == (2, 64) and padded[2].sum() == 2 * 61
        logits = Utils.unpad_sequence_output(padded[0], dense(input_ids=padded[1], attention_mask=padded[2]).logits)
        assert logits.shape == (2, 61, 50) and logits.isfinite().all()
    dense.train()
    dense(input_ids=tokens, attention_mask=kept, labels=tokens).loss.backward()
    assert all(one.grad is not None for layer in dense.base_model.encoder.layer for one in layer.parameters())
    refused(ValueError, "has 100 rows already", Utils.extend_position_embedding, dense, 50)
    layer = dense.base_model.encoder.layer[0].attention.self
    refused(ValueError, "got head_mask", layer, torch.zeros(1, 8, 32), head_mask=torch.ones(4))


def test_padding_of_embeddings_and_the_tokenizer():
    table = torch.nn.Embedding(5, 3)
    embeds = torch.randn(2, 5, 3)
    added, ids, mask, types_of, positions, found = Utils.pad_to_block_size(
        4, None, torch.ones(2, 5), torch.ones(2, 5), torch.arange(5).expand(2, 5), embeds, 4, table
    )
    assert added == 3 and ids is None and found.shape == (2, 8, 3) and torch.equal(found[0, 7], table.weight[4])
    assert mask[:, 5:].sum() == 0 and types_of[:, 5:].sum() == 0 and positions[0].tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert Utils.pad_to_block_size(5, None, None, None, None, embeds, 4, table)[0] == 0
    assert Utils.unpad_sequence_output(0, embeds) is embeds
    tokenizer = types.SimpleNamespace(model_max_length=3, init_kwargs={})
    assert Utils.update_tokenizer_model_max_length(tokenizer, 64).init_kwargs == {"model_max_length": 64}
    refused(
        NotImplementedError,
        "Linear is not a BERT or RoBERTa",
        Utils.extend_position_embedding,
        torch.nn.Linear(1, 1),
        9,
    )
