"""A small BERT in plain PyTorch, for pre-training, for questions about a text and for classes of sentences.

The architecture of Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding"
(2019), with norms in front of attention and feed-forward network if the configuration has ``pre_layer_norm``. A
``Layer`` has the parameters of ``deepspeed.DeepSpeedTransformerLayer`` under the same names, so a checkpoint of one
loads into the other. All other parameters have the names of transformers' BERT.
"""

import json
import math
import os
import re
import sys
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN = -1e4  # added to the score of a key that is padding


@dataclass
class BertConfig:
    """The section ``bert_model_config`` of a model configuration, with the names of transformers."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pre_layer_norm: bool = False


def read_model_file(path):
    """The model configuration of ``--cf``: a dict with ``bert_model_config``, ``datasets`` and ``training``."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except json.JSONDecodeError as error:
        sys.exit(f"{path}:{error.lineno}: this is not JSON: {error.msg}")
    except OSError as error:
        sys.exit(f"{path}: the model configuration cannot be read: {error.strerror}")
    known = {field.name for field in fields(BertConfig)}
    unknown = sorted(set(found.get("bert_model_config", ())) - known)
    if unknown or "bert_model_config" not in found:
        wrong = f"does not know {', '.join(unknown)}" if unknown else "is missing"
        sys.exit(f"{path}: bert_model_config {wrong}; its keys are {', '.join(sorted(known))}")
    return found


def config_of(model_file, vocabulary, **more):
    """The BertConfig of a model configuration, for the tokens of ``vocabulary``."""
    return replace(BertConfig(**model_file["bert_model_config"]), vocab_size=len(vocabulary), **more)


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a residual, a norm and dropout."""

    def __init__(self, config):
        super().__init__()
        self.config, hidden, wide = config, config.hidden_size, config.intermediate_size
        for name, shape in (
            ("attn_qkvw", (3 * hidden, hidden)), ("attn_qkvb", (3 * hidden,)), ("attn_ow", (hidden, hidden)),
            ("attn_ob", (hidden,)), ("attn_nw", (hidden,)), ("attn_nb", (hidden,)), ("inter_w", (wide, hidden)),
            ("inter_b", (wide,)), ("output_w", (hidden, wide)), ("output_b", (hidden,)), ("norm_w", (hidden,)),
            ("norm_b", (hidden,)),
        ):  # fmt: skip
            setattr(self, name, nn.Parameter(torch.empty(shape)))

    def norm(self, x, weight, bias):
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.config.layer_norm_eps)

    def dropout(self, x):
        return F.dropout(x, self.config.hidden_dropout_prob, self.training)

    def attention(self, x, mask):
        samples, tokens, width = x.shape
        qkv = F.linear(x, self.attn_qkvw, self.attn_qkvb).view(samples, tokens, 3, self.config.num_attention_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        shares = (query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + mask).softmax(-1)
        shares = F.dropout(shares, self.config.attention_probs_dropout_prob, self.training)
        return F.linear((shares @ value).transpose(1, 2).reshape(samples, tokens, width), self.attn_ow, self.attn_ob)

    def forward(self, x, attention_mask):
        before = self.norm(x, self.norm_w, self.norm_b) if self.config.pre_layer_norm else x
        total = x + self.dropout(self.attention(before, attention_mask))
        middle = self.norm(total, self.attn_nw, self.attn_nb)
        inner = F.gelu(F.linear(middle, self.inter_w, self.inter_b), approximate=gelu_of(self.config))
        out = self.dropout(F.linear(inner, self.output_w, self.output_b))
        return total + out if self.config.pre_layer_norm else self.norm(middle + out, self.norm_w, self.norm_b)


def gelu_of(config):
    """The ``approximate`` of torch's GELU."""
    kinds = {"gelu": "none", "gelu_new": "tanh", "gelu_tanh": "tanh"}
    if config.hidden_act not in kinds:
        sys.exit(f"bert_model_config: hidden_act is {config.hidden_act!r}; it is one of {', '.join(sorted(kinds))}")
    return kinds[config.hidden_act]


class Embeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids, segment_ids):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.word_embeddings(input_ids) + self.position_embeddings(places) + self.token_type_embeddings(segment_ids)
        return self.dropout(self.LayerNorm(x))


class Encoder(nn.Module):
    def __init__(self, config, make_layer):
        super().__init__()
        self.layer = nn.ModuleList(make_layer(config) for _ in range(config.num_hidden_layers))
        self.FinalLayerNorm = nn.LayerNorm(config.hidden_size, eps=1e-12) if config.pre_layer_norm else nn.Identity()

    def forward(self, x, attention_mask):
        for layer in self.layer:
            x = layer(x, attention_mask)
        return self.FinalLayerNorm(x)


class Bert(nn.Module):
    """Hidden states of all tokens, [samples, tokens, hidden_size]. ``input_mask`` is 1 at a token and 0 at padding."""

    def __init__(self, config, make_layer=Layer):
        super().__init__()
        self.embeddings, self.encoder = Embeddings(config), Encoder(config, make_layer)

    def forward(self, input_ids, segment_ids, input_mask):
        x = self.embeddings(input_ids, segment_ids)
        return self.encoder(x, ((1.0 - input_mask.to(x.dtype)) * HIDDEN)[:, None, None])


class BertForPreTraining(nn.Module):
    """The loss of guessing masked tokens and of guessing whether the second part follows the first in the text.

    Each sample counts the same, so the loss of a batch is the mean of the losses of its parts of equal size.
    """

    def __init__(self, config, make_layer=Layer):
        super().__init__()
        self.bert = Bert(config, make_layer)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        initialize(self, config)
        self.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, input_ids, segment_ids, input_mask, masked_positions, masked_labels, masked_weights, is_random):
        x = self.bert(input_ids, segment_ids, input_mask)
        follows = self.seq_relationship(torch.tanh(self.pooler(x[:, 0])))
        x = x.gather(1, masked_positions[:, :, None].expand(-1, -1, x.shape[-1]))
        scores = self.decoder(self.LayerNorm(F.gelu(self.transform(x))))
        losses = F.cross_entropy(scores.float().transpose(1, 2), masked_labels, reduction="none") * masked_weights
        return (losses.sum(1) / masked_weights.sum(1)).mean() + F.cross_entropy(follows.float(), is_random)


class BertForQuestionAnswering(nn.Module):
    """Scores of each token as first and as last token of the answer; the loss, where their positions are given."""

    def __init__(self, config, make_layer=Layer):
        super().__init__()
        self.bert = Bert(config, make_layer)
        self.qa_outputs = nn.Linear(config.hidden_size, 2, bias=False)  # one would add the same to all tokens
        initialize(self, config)

    def forward(self, input_ids, segment_ids, input_mask, start_positions=None, end_positions=None):
        start, end = self.qa_outputs(self.bert(input_ids, segment_ids, input_mask)).float().unbind(-1)
        if start_positions is None:
            return start, end
        return (F.cross_entropy(start, start_positions) + F.cross_entropy(end, end_positions)) / 2


class BertForSequenceClassification(nn.Module):
    """Scores of two classes, from the first token; the loss, where the classes are given."""

    def __init__(self, config, make_layer=Layer):
        super().__init__()
        self.bert = Bert(config, make_layer)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, 2)
        initialize(self, config)

    def forward(self, input_ids, segment_ids, input_mask, labels=None):
        pooled = torch.tanh(self.pooler(self.bert(input_ids, segment_ids, input_mask)[:, 0]))
        scores = self.classifier(self.dropout(pooled)).float()
        return scores if labels is None else F.cross_entropy(scores, labels)


@torch.no_grad()
def initialize(model, config):
    """Gives all parameters first values that depend on torch's seed. They are the same for both kinds of layers."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    for name, param in model.named_parameters():
        if param.dim() > 1:
            onto_residual = name.endswith(("attn_ow", "output_w"))
            share = (2 * config.num_hidden_layers) ** -0.5 if onto_residual else 1.0
            param.normal_(0.0, config.initializer_range * share, generator=generator)
        else:
            param.fill_(1.0 if name.endswith(("_nw", "norm_w", "Norm.weight")) else 0.0)


def groups_of(model, weight_decay):
    """Two groups of parameters: with weight decay, and without it (biases and norms)."""
    named = list(model.named_parameters())
    return [
        {"params": [param for _, param in named if param.dim() > 1], "weight_decay": weight_decay},
        {"params": [param for _, param in named if param.dim() == 1], "weight_decay": 0.0},
    ]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def load_checkpoint(model, args):
    """Loads the BERT of the checkpoint ``args.model_file`` into ``model``, and the pooler where both have one.
    ``args.ckpt_type`` is DS for one of the programs here, HF for the state dict of a model of transformers."""
    if not os.path.isfile(args.model_file):
        sys.exit(f"--model_file {args.model_file}: this file does not exist")
    state = torch.load(args.model_file, map_location="cpu", **WEIGHTS_ONLY)
    state = state.get("module", state)
    if args.ckpt_type == "HF":
        state = from_transformers(state, args.model_file)
    wanted = {name for name in model.state_dict() if name.startswith(("bert.", "pooler."))}
    state = {name: value for name, value in state.items() if name.startswith("bert.") or name in wanted}
    words = "bert.embeddings.word_embeddings.weight"
    own = model.state_dict()[words].shape
    if words not in state:
        sys.exit(f"--model_file {args.model_file}: {words} is missing: is it of the --ckpt_type {args.ckpt_type}?")
    if state[words].shape[0] != own[0]:
        sys.exit(
            f"--model_file {args.model_file}: the checkpoint has a vocabulary of {state[words].shape[0]} tokens, and "
            f"the vocabulary of this run has {own[0]}: give --vocab_file the vocabulary that the checkpoint has"
        )
    differ = sorted(name for name in wanted ^ set(state) if name.startswith("bert."))
    if differ:
        names = ", ".join(differ[:3])
        sys.exit(
            f"--model_file {args.model_file}: model and checkpoint do not have the same parameters ({names}, ...): "
            "compare --cf and --preln"
        )
    model.load_state_dict(state, strict=False)


WEIGHTS_ONLY = {"weights_only": False} if int(torch.__version__.split(".")[0]) > 1 else {}


def from_transformers(state, path):
    """A state dict of transformers' BERT with the names of this file."""
    made = {}
    for name, value in state.items():
        name, own = name.replace("gamma", "weight").replace("beta", "bias"), value
        name = name.replace("bert.pooler.dense", "pooler")
        if ".encoder.layer." in name:
            layer, _, kind = name.rpartition(".")
            start, number, part = re.match(r"(.*\.encoder\.layer\.)(\d+)\.(.*)", layer).groups()
            if part in ("attention.self.key", "attention.self.value"):
                continue
            if part not in PARTS:
                sys.exit(f"--model_file {path}: {name} does not belong to a BERT of transformers")
            if part == "attention.self.query":
                own = torch.cat([state[name.replace("query", one)] for one in ("query", "key", "value")])
            name = f"{start}{number}.{PARTS[part]}{kind[0]}"
        made[name] = own
    made.pop("bert.embeddings.position_ids", None)
    return made


PARTS = {
    "attention.self.query": "attn_qkv", "attention.output.dense": "attn_o", "attention.output.LayerNorm": "attn_n",
    "intermediate.dense": "inter_", "output.dense": "output_", "output.LayerNorm": "norm_",
}  # fmt: skip
