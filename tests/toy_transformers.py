"""As much of transformers as sequence parallelism meets: its table of attention functions, and a causal language model
that asks it. For runs where the package is not installed."""

import contextlib
import sys
import types

import torch
import torch.utils.checkpoint


def sdpa_attention_forward(module, query, key, value, mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    """``[batch, heads, sequence, size]`` to ``[batch, sequence, heads, size]``. ``mask``: True where a query looks."""
    groups = module.num_key_value_groups
    key, value = (one[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for one in (key, value))
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.matmul(scores, value).transpose(1, 2).contiguous(), None


class Table(dict):
    def register(self, name, function):
        self[name] = function


@contextlib.contextmanager
def installed():
    """The modules that are imported by name."""
    names = ("transformers", "transformers.modeling_utils", "transformers.modeling_outputs")
    before = {name: sys.modules.get(name) for name in names}
    table = Table(sdpa=sdpa_attention_forward, odd=lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs))
    utils, outputs = types.ModuleType(names[1]), types.ModuleType(names[2])
    utils.ALL_ATTENTION_FUNCTIONS = table
    outputs.CausalLMOutputWithPast = lambda loss=None, logits=None: types.SimpleNamespace(loss=loss, logits=logits)
    sys.modules.update(zip(names, (types.ModuleType(names[0]), utils, outputs)))
    try:
        yield table
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


class Config(types.SimpleNamespace):
    def get_text_config(self):
        return self


class Attention(torch.nn.Module):
    is_causal = True

    def __init__(self, config):
        super().__init__()
        self.config, self.size = config, config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        widths = [config.hidden_size] + 2 * [config.num_key_value_heads * self.size]
        self.q, self.k, self.v = (torch.nn.Linear(config.hidden_size, width, bias=False) for width in widths)
        self.o = torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x):
        parts = [one(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for one in (self.q, self.k, self.v)]
        function = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return self.o(function(self, *parts, None, dropout=0.0, scaling=self.size**-0.5)[0].flatten(2))


class Mlp(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = torch.nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = torch.nn.Linear(config.intermediate_size, config.hidden_size)
        self.most = 0

    def forward(self, x):
        self.most = max(self.most, x.shape[1])
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Layer(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        self.first, self.second = torch.nn.LayerNorm(config.hidden_size), torch.nn.LayerNorm(config.hidden_size)

    def forward(self, x):
        x = x + self.self_attn(self.first(x))
        return x + self.mlp(self.second(x))


class Decoder(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm, self.recompute = torch.nn.LayerNorm(config.hidden_size), False

    def forward(self, input_ids, **kwargs):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            run = self.recompute and self.training
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True) if run else layer(x)
        return (self.norm(x),)


class ToyForCausalLM(torch.nn.Module):
    supports_gradient_checkpointing = True

    def __init__(self, heads=4, kv=2, hidden=16, layers=2, vocabulary=31, intermediate=32, implementation="sdpa"):
        super().__init__()
        torch.manual_seed(3)
        self.config = Config(
            num_attention_heads=heads, num_key_value_heads=kv, hidden_size=hidden, num_hidden_layers=layers,
            vocab_size=vocabulary, intermediate_size=intermediate, _attn_implementation=implementation,
        )  # fmt: skip
        self.model = Decoder(self.config)
        self.lm_head = torch.nn.Linear(hidden, vocabulary, bias=False)

    @property
    def is_gradient_checkpointing(self):
        return self.model.recompute

    def gradient_checkpointing_enable(self):
        self.model.recompute = True

    def get_decoder(self):
        return self.model

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, labels=None, shift_labels=None, use_cache=False):
        logits, loss = self.lm_head(self.model(input_ids)[0]), None
        if labels is not None or shift_labels is not None:
            if shift_labels is None:
                shift_labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), shift_labels.flatten())
        return sys.modules["transformers.modeling_outputs"].CausalLMOutputWithPast(loss=loss, logits=logits)
