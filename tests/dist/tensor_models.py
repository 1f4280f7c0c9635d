"""Small language models whose blocks compute what those of Llama, GPT-2, BLOOM, Falcon and T5 do, without transformers.
Tests of tensor parallelism cut them over ranks."""

import math

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 50


class Conv1D(nn.Module):
    """A linear layer whose weight has the shape (inputs, outputs), as that of transformers' GPT-2."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * nx**-0.5), nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class RMSNorm(nn.Module):
    """A norm by the root of the mean square."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Cache:
    """Keys and values of the tokens so far, by attention; ``tokens``: how many these are."""

    def __init__(self):
        self.kept, self.tokens = {}, 0

    def extend(self, attention, *new):
        """Keys and values (samples, heads, tokens, width) of all tokens, where ``new`` are those of the last ones."""
        kept = self.kept.get(id(attention))
        self.kept[id(attention)] = new if kept is None else [torch.cat(pair, 2) for pair in zip(kept, new)]
        return self.kept[id(attention)]


def heads_of(x, heads):
    """(samples, tokens, heads * width) as (samples, heads, tokens, width)."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def attend(query, keys, values, bias=None, causal=True):
    """The result of an attention, (samples, tokens, heads * width). ``bias``: is added to the scores."""
    scores = query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if causal:
        tokens, all_tokens = scores.shape[-2:]
        later = torch.ones(tokens, all_tokens, dtype=torch.bool, device=scores.device).triu(all_tokens - tokens + 1)
        scores = scores.masked_fill(later, -1e4)
    return (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)


def turned(x, angles):
    """Rotary positions. x: (samples, heads, tokens, width), ``angles``: (cosines, sines), each (tokens, width)."""
    first, second = x.chunk(2, -1)
    cosines, sines = (one.to(x.dtype) for one in angles)
    return x * cosines + torch.cat([-second, first], -1) * sines


def angles_of(start, stop, width, device):
    """Cosines and sines of the rotary positions from ``start`` up to ``stop``."""
    rates = 100.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(start, stop, device=device).view(-1, 1) * torch.cat([rates, rates])
    return angles.cos(), angles.sin()


# ---- blocks ---------------------------------------------------------------------------------------------------------
class LlamaAttention(nn.Module):
    def __init__(self, width, heads, shared_heads, head_dim):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, shared_heads, head_dim
        self.num_key_value_groups = heads // shared_heads
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, shared_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, shared_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x, angles, cache=None):
        query = turned(heads_of(self.q_proj(x), self.num_heads), angles)
        shared = (
            turned(heads_of(self.k_proj(x), self.num_key_value_heads), angles),
            heads_of(self.v_proj(x), self.num_key_value_heads),
        )
        shared = shared if cache is None else cache.extend(self, *shared)
        keys, values = (one.repeat_interleave(self.num_key_value_groups, 1) for one in shared)
        return self.o_proj(attend(query, keys, values))


class LlamaMLP(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    """Heads of keys and values that several query heads share, rotary positions, a gated unit."""

    def __init__(self, width=48, heads=6, shared_heads=2, head_dim=8, inner=40):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)
        self.self_attn = LlamaAttention(width, heads, shared_heads, head_dim)
        self.mlp = LlamaMLP(width, inner)

    def forward(self, x, angles, cache=None):
        x = x + self.self_attn(self.input_layernorm(x), angles, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT2Block(nn.Module):
    """Query, key and value side by side in one ``Conv1D``, biases, layer norms."""

    def __init__(self, width=48, heads=6):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.num_heads, self.split_size, self.head_dim = heads, width, width // heads
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.c_fc, self.c_out = Conv1D(4 * width, width), Conv1D(width, 4 * width)

    def forward(self, x, cache=None):
        query, *new = (heads_of(one, self.num_heads) for one in self.c_attn(self.ln_1(x)).split(self.split_size, 2))
        keys, values = new if cache is None else cache.extend(self, *new)
        x = x + self.c_proj(attend(query, keys, values))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class BloomBlock(nn.Module):
    """Query, key and value of each head side by side, and a bias for each head from outside (alibi)."""

    def __init__(self, width=48, heads=6):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.num_heads, self.hidden_size = heads, width
        self.query_key_value, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, alibi, cache=None):
        samples, tokens, _ = x.shape
        fused = self.query_key_value(self.input_layernorm(x)).view(samples, tokens, self.num_heads, 3, -1)
        query, *new = fused.permute(3, 0, 2, 1, 4)
        keys, values = new if cache is None else cache.extend(self, *new)
        made = attend(query, keys, values, alibi.view(samples, self.num_heads, 1, -1))
        x = x + self.dense(made.reshape(samples, tokens, self.hidden_size))
        return x + self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x))))


class FalconBlock(nn.Module):
    """One head of keys and values behind all query heads in one weight; attention and units run side by side."""

    def __init__(self, width=56, heads=7):
        super().__init__()
        self.input_layernorm, self.num_heads, self.head_dim = nn.LayerNorm(width), heads, width // heads
        self.query_key_value = nn.Linear(width, (heads + 2) * self.head_dim, bias=False)
        self.dense = nn.Linear(width, width, bias=False)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, angles, cache=None):
        x, before = self.input_layernorm(x), x
        fused = heads_of(self.query_key_value(x), self.num_heads + 2)
        query, *new = fused[:, :-2], fused[:, -2:-1], fused[:, -1:]
        query, new[0] = turned(query, angles), turned(new[0], angles)
        keys, values = new if cache is None else cache.extend(self, *new)
        return before + self.dense(attend(query, keys, values)) + self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class T5Attention(nn.Module):
    def __init__(self, width, heads, relative, causal):
        super().__init__()
        self.n_heads, self.key_value_proj_dim, self.inner_dim = heads, width // heads, width
        self.causal = causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        if relative:
            self.relative_attention_bias = nn.Embedding(16, heads)

    def bias_of(self, tokens, all_tokens):
        """The relative position bias, (1, heads, the last ``tokens``, all of them)."""
        at = torch.arange(all_tokens, device=self.relative_attention_bias.weight.device)
        distance = (at.view(1, -1) - at[all_tokens - tokens :].view(-1, 1)).clamp(-8, 7) + 8
        return self.relative_attention_bias(distance).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x, memory=None, bias=None, cache=None):
        source = x if memory is None else memory
        keys, values = heads_of(self.k(source), self.n_heads), heads_of(self.v(source), self.n_heads)
        if cache is not None and memory is None:
            keys, values = cache.extend(self, keys, values)
        if bias is None and memory is None:
            bias = self.bias_of(x.shape[1], keys.shape[2])
        made = attend(heads_of(self.q(x), self.n_heads), keys, values, bias, self.causal)
        return self.o(made.view(*x.shape[:2], self.inner_dim)), bias


class T5Part(nn.Module):
    """A norm, and a layer whose results are added, under the name ``name``."""

    def __init__(self, name, layer, width):
        super().__init__()
        setattr(self, name, layer)
        self.name, self.layer_norm = name, RMSNorm(width)

    def forward(self, x, *given):
        made = getattr(self, self.name)(self.layer_norm(x), *given)
        return (x + made[0], made[1]) if isinstance(made, tuple) else x + made


class T5DenseReluDense(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.wi, self.wo = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.wo(F.relu(self.wi(x)))


class T5Block(nn.Module):
    """A block of an encoder, or of a decoder, which attends to what the encoder gave. The first block makes the bias of
    relative positions for all of them."""

    def __init__(self, first, decoder, width=48, heads=6, inner=40):
        super().__init__()
        parts = [T5Part("SelfAttention", T5Attention(width, heads, first, decoder), width)]
        if decoder:
            parts.append(T5Part("EncDecAttention", T5Attention(width, heads, False, False), width))
        parts.append(T5Part("DenseReluDense", T5DenseReluDense(width, inner), width))
        self.layer = nn.ModuleList(parts)

    def forward(self, x, bias=None, memory=None, cache=None):
        x, bias = self.layer[0](x, None, bias, cache)
        if memory is not None:
            x, _ = self.layer[1](x, memory)
        return self.layer[-1](x), bias


# ---- models ---------------------------------------------------------------------------------------------------------
class _Generates:
    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens=8, use_cache=True, do_sample=False):
        """``input_ids`` with the likeliest next tokens behind them, or random ones (``do_sample``)."""
        cache, seen = Cache() if use_cache else None, 0
        for _ in range(max_new_tokens):
            logits = self.forward(input_ids[:, seen:], cache=cache)[:, -1].float()
            seen = input_ids.shape[1] if use_cache else 0
            found = torch.multinomial(logits.softmax(-1), 1) if do_sample else logits.argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, found], 1)
        return input_ids

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head


class Decoder(_Generates, nn.Module):
    """A model of ``blocks``. ``tied``: the head has the weight of the embedding. ``positions``: the kind of these."""

    def __init__(self, blocks, positions, width, head_dim=8, heads=6, tied=False):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, width), nn.ModuleList(blocks)
        self.places = nn.Embedding(64, width) if positions == "learned" else None
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.positions, self.head_dim, self.heads = positions, head_dim, heads
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids, cache=None):
        """Logits of the next tokens. ``cache``: has the tokens before these, and gets these."""
        start = 0 if cache is None else cache.tokens
        stop, x = start + input_ids.shape[1], self.embed(input_ids)
        given = ()
        if self.positions == "learned":
            x = x + self.places(torch.arange(start, stop, device=x.device))
        elif self.positions == "rotary":
            given = (angles_of(start, stop, self.head_dim, x.device),)
        elif self.positions == "alibi":
            slopes = 2.0 ** -torch.arange(1, self.heads + 1, device=x.device)
            alibi = slopes.view(-1, 1, 1) * torch.arange(stop, device=x.device)
            given = (alibi.repeat(x.shape[0], 1, 1),)
        for block in self.blocks:
            x = block(x, *given, cache=cache)
        if cache is not None:
            cache.tokens = stop
        return self.lm_head(self.norm(x))


class EncoderDecoder(nn.Module):
    """A model as T5: ``encoder`` reads, ``decoder`` writes."""

    def __init__(self, width=48, blocks=2, tied=False):
        super().__init__()
        self.shared = nn.Embedding(WORDS, width)
        self.encoder = nn.ModuleList([T5Block(index == 0, False, width) for index in range(blocks)])
        self.decoder = nn.ModuleList([T5Block(index == 0, True, width) for index in range(blocks)])
        self.norm, self.lm_head = RMSNorm(width), nn.Linear(width, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.shared.weight

    get_output_embeddings = _Generates.get_output_embeddings

    def get_input_embeddings(self):
        return self.shared

    @property
    def dummy_inputs(self):
        return {"input_ids": torch.arange(6).view(2, 3), "decoder_input_ids": torch.arange(8).view(2, 4)}

    def encode(self, input_ids):
        x, bias = self.shared(input_ids), None
        for block in self.encoder:
            x, bias = block(x, bias)
        return x

    def forward(self, input_ids=None, decoder_input_ids=None, memory=None, cache=None):
        """Logits of the next tokens of ``decoder_input_ids``. ``memory``: what ``encode`` gave."""
        memory = self.encode(input_ids) if memory is None else memory
        x, bias = self.shared(decoder_input_ids), None
        for block in self.decoder:
            x, bias = block(x, bias, memory, cache)
        return self.lm_head(self.norm(x))

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens=8, use_cache=True):
        """The likeliest tokens of the decoder, from token 0 on."""
        memory, cache, seen = self.encode(input_ids), Cache() if use_cache else None, 0
        made = torch.zeros_like(input_ids[:, :1])
        for _ in range(max_new_tokens):
            logits = self.forward(decoder_input_ids=made[:, seen:], memory=memory, cache=cache)[:, -1]
            seen = made.shape[1] if use_cache else 0
            made = torch.cat([made, logits.argmax(-1, keepdim=True)], 1)
        return made


def _llama(**given):
    return Decoder([LlamaBlock() for _ in range(2)], "rotary", 48, **given)


def _gpt2(**given):
    return Decoder([GPT2Block() for _ in range(2)], "learned", 48, **given)


def _bloom(**given):
    return Decoder([BloomBlock() for _ in range(2)], "alibi", 48, **given)


def _falcon(**given):
    return Decoder([FalconBlock() for _ in range(2)], "rotary", 56, heads=7, **given)


MODELS = {"llama": _llama, "gpt2": _gpt2, "bloom": _bloom, "falcon": _falcon, "t5": EncoderDecoder}


def model_of(name, tied=False, seed=0):
    """The model of a family with random weights, the same ones at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = MODELS[name](tied=tied)
        with torch.no_grad():
            for param in made.parameters():
                if param.dim() == 1:  # norms and biases that begin alike would hide a cut of them
                    param.add_(torch.randn(param.shape) * 0.1)
        return made


def logits_of(model, tokens, name):
    """The logits of a call that every family takes."""
    return model(tokens, tokens[:, :4]) if name == "t5" else model(tokens)


def tokens_of(samples=2, length=7, seed=0):
    """Random tokens."""
    return torch.randint(0, WORDS, (samples, length), generator=torch.Generator().manual_seed(seed))
