"""Helpers that make a pretrained BERT or RoBERTa sparse and long."""

import torch

from deepspeed.ops.sparse_attention.bert_sparse_self_attention import TransformersSparseSelfAttention
from deepspeed.ops.sparse_attention.sparsity_config import SparsityConfig


def _base_of(model):
    """``(the BERT or RoBERTa in a model, positions that its embedding reserves)``."""
    for name, reserved in (("bert", 0), ("roberta", 2)):
        if hasattr(model, name):
            return getattr(model, name), reserved
    if getattr(getattr(model, "config", None), "model_type", None) in ("bert", "roberta"):
        return model, 2 if model.config.model_type == "roberta" else 0
    raise NotImplementedError(
        f"{type(model).__name__} is not a BERT or RoBERTa of transformers (it has no .bert or .roberta): use "
        "replace_self_attention_layer_with_sparse_self_attention_layer on its layers"
    )


class SparseAttentionUtils:
    """Functions for models of transformers."""

    @staticmethod
    def extend_position_embedding(model, max_position):
        """Makes the position embedding of a BERT or RoBERTa longer: its rows are repeated up to ``max_position``
        tokens. Returns ``model``. ValueError if it is as long already."""
        base, reserved = _base_of(model)
        old = base.embeddings.position_embeddings
        kept, tail = old.weight[:reserved], old.weight[reserved:]
        if max_position <= len(tail):
            raise ValueError(f"the position embedding has {len(tail)} rows already, max_position is {max_position}")
        repeats = -(-max_position // len(tail))
        rows = torch.cat((kept, tail.repeat(repeats, 1)[:max_position])).detach()
        made = torch.nn.Embedding(len(rows), rows.shape[1], padding_idx=old.padding_idx, _weight=rows.clone())
        base.embeddings.position_embeddings = made
        model.config.max_position_embeddings = len(rows)
        for name in ("position_ids", "token_type_ids"):
            kept_ids = getattr(base.embeddings, name, None)
            if torch.is_tensor(kept_ids):
                numbers = torch.arange(len(rows), device=kept_ids.device) * (name == "position_ids")
                base.embeddings.register_buffer(name, numbers.expand(1, -1), persistent=False)
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer, max_position):
        """Lets a tokenizer make ``max_position`` tokens. Returns it."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model,
        max_position,
        sparsity_config=SparsityConfig(num_heads=4),  # noqa: B008 (published default)
    ):
        """Gives all layers of a BERT or RoBERTa sparse attention, with their weights. Returns ``model``.
        ``max_position``: the most tokens of a sequence."""
        base, reserved = _base_of(model)
        model.config.max_position_embeddings = max_position + reserved
        SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
            model.config, base.encoder.layer, sparsity_config
        )
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config,
        layers,
        sparsity_config=SparsityConfig(num_heads=4),  # noqa: B008 (published default)
    ):
        """Gives ``layers`` of BERT's form (``layer.attention.self`` with ``query``, ``key`` and ``value``) sparse
        attention, with their weights. Returns ``layers``."""
        for layer in layers:
            old = layer.attention.self
            made = TransformersSparseSelfAttention(config, sparsity_config)
            made.query, made.key, made.value = old.query, old.key, old.value
            layer.attention.self = made.train(old.training)
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size,
        input_ids,
        attention_mask,
        token_type_ids,
        position_ids,
        inputs_embeds,
        pad_token_id,
        model_embeddings,
    ):
        """Pads a batch ``[batch, tokens]`` to whole blocks of ``block_size`` tokens.

        Any of the tensors may be None. ``inputs_embeds`` ``[batch, tokens, hidden]`` are padded with the embedding that
        ``model_embeddings`` gives to ``pad_token_id``; the padding has 0 in ``attention_mask``. Returns ``(tokens
        added, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)``.
        """
        batch, tokens = (input_ids if input_ids is not None else inputs_embeds).shape[:2]
        added = -tokens % block_size

        def padded(one, value):
            return one if one is None else torch.nn.functional.pad(one, (0, added), value=value)

        if added:
            if inputs_embeds is not None:
                fill = torch.full((batch, added), pad_token_id, dtype=torch.long, device=inputs_embeds.device)
                inputs_embeds = torch.cat((inputs_embeds, model_embeddings(fill)), dim=1)
            input_ids, position_ids = padded(input_ids, pad_token_id), padded(position_ids, pad_token_id)
            attention_mask, token_type_ids = padded(attention_mask, False), padded(token_type_ids, 0)
        return added, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len, sequence_output):
        """``sequence_output`` without the ``pad_len`` last tokens."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len] if pad_len else sequence_output
