"""Small models with experts, as transformers makes its own: "listed", of modules in a list (4.x), and "stacked",
of rows of one parameter, whose routers choose and are recorded by their class (5.x)."""

import types

import torch
from torch import nn
from torch.nn import functional as F

from models import beside

WIDTH, INNER, EXPERTS = 6, 5, 4


class GatedMLP(nn.Module):
    def __init__(self, names=("gate_proj", "down_proj", "up_proj")):
        super().__init__()
        self.names = names
        for name, shape in zip(names, ((WIDTH, INNER), (INNER, WIDTH), (WIDTH, INNER)), strict=True):
            setattr(self, name, nn.Linear(*shape, bias=False))
        self.act_fn = nn.SiLU()

    def forward(self, x):
        gate, down, up = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


def choose(config, logits, bias=None):
    """``(weights, experts)`` of tokens, as the family does."""
    sigmoid = config.model_type == "deepseek_v3"
    scores = logits.sigmoid() if sigmoid else logits.float().softmax(-1)
    choice = scores if bias is None else scores + bias
    groups = getattr(config, "n_group", 1)
    if groups > 1 and getattr(config, "topk_method", "") != "greedy":
        grouped = choice.view(len(choice), groups, -1)
        of_groups = grouped.topk(2, dim=-1)[0].sum(-1) if sigmoid else grouped.max(-1)[0]
        best = of_groups.topk(config.topk_group, dim=-1, sorted=False)[1]
        closed = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf") if sigmoid else 0.0).view_as(choice)
    chosen = choice.topk(config.num_experts_per_tok, dim=-1)[1]
    weights = scores.gather(1, chosen)
    if config.norm_topk_prob and config.model_type != "deepseek_v2":
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * getattr(config, "routed_scaling_factor", 1.0), chosen


class TopKRouter(nn.Module):
    """The router of 5.x: logits first, of which transformers makes losses."""

    def __init__(self, config):
        super().__init__()
        self.config, self.weight = config, nn.Parameter(torch.empty(EXPERTS, WIDTH))
        if config.model_type == "deepseek_v3":
            self.register_buffer("e_score_correction_bias", torch.linspace(0.0, 0.3, EXPERTS))

    def forward(self, x):
        x, weight = x.reshape(-1, WIDTH), self.weight
        if self.config.model_type.startswith("deepseek"):
            x, weight = x.float(), weight.float()
        logits = F.linear(x, weight)
        return logits, *choose(self.config, logits, getattr(self, "e_score_correction_bias", None))


class MoEGate(TopKRouter):
    """The router of DeepSeek in 4.x."""

    def forward(self, x):
        _, weights, chosen = super().forward(x)
        return chosen, weights


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.act_fn = nn.SiLU()

    def run(self, e, rows):
        gate, up = F.linear(rows, self.gate_up_proj[e]).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[e])


class MoeBlock(nn.Module):
    """The part that the families have in common: ``routed`` gives weights and experts of tokens."""

    def __init__(self, config, listed):
        super().__init__()
        self.config = config
        names = ("w1", "w2", "w3") if config.model_type == "mixtral" else ("gate_proj", "down_proj", "up_proj")
        self.experts = nn.ModuleList([GatedMLP(names) for _ in range(EXPERTS)]) if listed else Experts()
        if config.model_type == "qwen2_moe":
            self.shared_expert, self.shared_expert_gate = GatedMLP(), nn.Linear(WIDTH, 1, bias=False)
        if config.model_type.startswith("deepseek"):
            self.shared_experts = GatedMLP()

    def through(self, x, weights, chosen):
        """Rows of experts, times their weights."""
        out = torch.zeros_like(x)
        run = self.experts.run if isinstance(self.experts, Experts) else lambda e, rows: self.experts[e](rows)
        for e in range(EXPERTS):
            token, place = (chosen == e).nonzero(as_tuple=True)
            out = out.index_add(0, token, run(e, x[token]) * weights[token, place, None].to(x.dtype))
        if hasattr(self, "shared_expert"):
            out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out + self.shared_experts(x) if hasattr(self, "shared_experts") else out


class StackedBlock(MoeBlock):
    def __init__(self, config):
        super().__init__(config, False)
        self.gate = TopKRouter(config)

    def forward(self, hidden_states):
        x = hidden_states.view(-1, WIDTH)
        _, weights, chosen = self.gate(x)
        return self.through(x, weights, chosen).view(hidden_states.shape)


class ListedBlock(MoeBlock):
    def __init__(self, config):
        super().__init__(config, True)
        self.top_k, self.gate = config.num_experts_per_tok, nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, hidden_states):
        x = hidden_states.view(-1, WIDTH)
        router_logits = self.gate(x)
        return self.through(x, *choose(self.config, router_logits)).view(hidden_states.shape), router_logits


class ListedDeepseekMoE(MoeBlock):
    def __init__(self, config):
        super().__init__(config, True)
        self.gate = MoEGate(config)

    def forward(self, hidden_states):
        x = hidden_states.view(-1, WIDTH)
        chosen, weights = self.gate(x)
        return self.through(x, weights, chosen).view(hidden_states.shape)


CONFIGS = {
    "mixtral": {"norm_topk_prob": True},
    "qwen2_moe": {"norm_topk_prob": False},
    "qwen3_moe": {"norm_topk_prob": True},
    "deepseek_v2": {
        "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
}  # fmt: skip
FORMS = ("listed", "stacked")
USUAL = {"qwen3_moe": "stacked", "deepseek_v3": "stacked"}  # of tests that try one form


class Block(nn.Module):
    def __init__(self, config, dense, form):
        super().__init__()
        self.moe_name = "block_sparse_moe" if (config.model_type == "mixtral" and form == "listed") else "mlp"
        listed = ListedDeepseekMoE if config.model_type.startswith("deepseek") else ListedBlock
        block = GatedMLP() if dense else (listed if form == "listed" else StackedBlock)(config)
        setattr(self, self.moe_name, block)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        made = getattr(self, self.moe_name)(self.norm(x))
        out, logits = made if isinstance(made, tuple) else (made, None)
        return x + out, [] if logits is None else [logits]


class Body(nn.Module):
    def __init__(self, config, dense_first, form):
        super().__init__()
        self.layers = nn.ModuleList([Block(config, dense_first and n == 0, form) for n in range(2)])


class Model(nn.Module):
    """``forward`` returns a loss, with one of the router's logits in it where transformers has them."""

    def __init__(self, family, dense_first=None, form=None):
        super().__init__()
        self.config = types.SimpleNamespace(
            model_type=family, num_experts_per_tok=2, hidden_act="silu", **CONFIGS[family]
        )
        self.dense_first = family.startswith("deepseek") if dense_first is None else dense_first
        self.form = form or USUAL.get(family, "listed")
        self.model, self.head = Body(self.config, self.dense_first, self.form), nn.Linear(WIDTH, 3)
        self.hooked, self.recorded = False, []

    def forward(self, x):
        if self.form == "stacked" and not self.hooked:  # at the first forward, as transformers does
            self.hooked = True
            for module in self.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(lambda _, given, out: self.recorded.append(out[0]))
        self.recorded.clear()
        x, logits = beside(self.model.layers[0].norm.weight, x), []
        for layer in self.model.layers:
            x, more = layer(x)
            logits += more
        logits += self.recorded
        self.recorded.clear()
        return self.head(x).square().mean() + 0.01 * sum(one.float().square().mean() for one in logits)


def model_of(family, **more):
    model = Model(family, **more)
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            wave = torch.sin(torch.arange(param.numel(), dtype=torch.float32) * 0.37 + number)
            param.copy_(wave.view(param.shape) * 0.8)
    return model
