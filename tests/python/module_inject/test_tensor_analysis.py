"""The analysis that finds which layers of a block can be cut over ranks, and the sources of rules before it."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensor_models as look_alikes
from deepspeed.config.errors import DeepSpeedConfigError
from deepspeed.config.sections import TPTrainingConfig
from deepspeed.module_inject.block_twin import NotAnalysed
from deepspeed.module_inject.cut_plan import plan_of
from deepspeed.module_inject.tensor_analysis import analyse
from refusals import refused

WIDTH = 24


def found(groups):
    """``{rows: {layer: [(size, readers)] of its parts}}`` of groups."""
    return {
        " ".join(one.rows): {name: [(p.size, p.readers) for p in parts] for name, parts in one.columns.items()}
        for one in groups
    }


def analysed(block, ranks=2, training=True):
    return analyse(block, ((torch.randn(2, 5, WIDTH),), {}), ranks, training)


def one_of(groups, row):
    return next(one for one in groups if row in one.rows)


# ---- look-alikes ----------------------------------------------------------------------------------------------------
def _attention_of_t5(prefix, bias):
    own = {f"{prefix}.{name}": [(48, 1)] for name in "qkv"}
    return {**own, f"{prefix}.relative_attention_bias": [(6, 1)]} if bias else own


def _units_of_t5(index):
    return {f"layer.{index}.DenseReluDense.wo": {f"layer.{index}.DenseReluDense.wi": [(40, 1)]}}


_SELF, _CROSS = "layer.0.SelfAttention", "layer.1.EncDecAttention"
GROUPS = {
    ("llama", "blocks.0"): {
        "self_attn.o_proj": {
            "self_attn.q_proj": [(48, 1)], "self_attn.k_proj": [(16, 3)], "self_attn.v_proj": [(16, 3)],
        },
        "mlp.down_proj": {"mlp.gate_proj": [(40, 1)], "mlp.up_proj": [(40, 1)]},
    },
    ("gpt2", "blocks.0"): {"c_out": {"c_fc": [(192, 1)]}, "c_proj": {"c_attn": [(48, 1)] * 3}},
    ("bloom", "blocks.0"): {
        "dense_4h_to_h": {"dense_h_to_4h": [(192, 1)]}, "dense": {"query_key_value": [(144, 1)]},
    },
    ("falcon", "blocks.0"): {"dense_4h_to_h": {"dense_h_to_4h": [(224, 1)]}},
    ("t5", "encoder.0"): {f"{_SELF}.o": _attention_of_t5(_SELF, True), **_units_of_t5(1)},
    ("t5", "encoder.1"): {f"{_SELF}.o": _attention_of_t5(_SELF, False), **_units_of_t5(1)},
    ("t5", "decoder.0"): {
        f"{_SELF}.o": _attention_of_t5(_SELF, True), f"{_CROSS}.o": _attention_of_t5(_CROSS, False), **_units_of_t5(2),
    },
    ("t5", "decoder.1"): {
        f"{_SELF}.o": _attention_of_t5(_SELF, False), f"{_CROSS}.o": _attention_of_t5(_CROSS, False), **_units_of_t5(2),
    },
}  # fmt: skip


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("name", list(look_alikes.MODELS))
def test_groups_of_look_alikes(name, meta):
    model = look_alikes.model_of(name)
    plan = plan_of(model.to("meta") if meta else model, 2)
    groups = {(name, block): found(one.groups) for block, one in plan.kinds().items()}
    assert groups == {key: one for key, one in GROUPS.items() if key[0] == name}
    assert not any(one.partial or one.params or one.draws for block in plan.blocks.values() for one in block.groups)


@pytest.mark.parametrize(
    "name, row, counts",
    [
        ("llama", "self_attn.o_proj", {"num_heads": ("units", 1), "num_key_value_heads": ("shared", 1)}),
        ("gpt2", "c_proj", {"num_heads": ("units", 1), "split_size": ("units", 8)}),
        ("bloom", "dense", {"num_heads": ("units", 1), "hidden_size": ("units", 8)}),
        ("t5", f"{_SELF}.o", {"n_heads": ("units", 1), "inner_dim": ("units", 8)}),
        ("llama", "mlp.down_proj", {}),
    ],
)
def test_integers_that_change_with_the_heads(name, row, counts):
    group = one_of(next(iter(plan_of(look_alikes.model_of(name), 2).kinds().values())).groups, row)
    assert {attribute: (kind, each) for _, attribute, kind, each in group.counts} == counts


def test_arguments_and_results_that_have_something_for_each_head():
    alibi = one_of(plan_of(look_alikes.model_of("bloom"), 2).blocks["blocks.0"].groups, "dense")
    assert (alibi.arguments, alibi.shared) == ([((0, 1), 0)], [(0, 1)])
    blocks = plan_of(look_alikes.model_of("t5"), 2).blocks
    first, second = (one_of(blocks[f"encoder.{index}"].groups, f"{_SELF}.o") for index in (0, 1))
    assert (first.arguments, first.results) == ([], [((1,), 1)])
    assert (second.arguments, second.results) == ([((0, 1), 1)], [])


def test_shared_heads_that_ranks_do_not_divide_are_cut_for_inference_alone():
    plans = [plan_of(look_alikes.model_of("falcon"), 2, training=training).blocks["blocks.0"] for training in (1, 0)]
    assert "only inference can cut it" in plans[0].whole["dense"]
    assert found(plans[1].groups)["dense"] == {"query_key_value": [(56, 1), (16, 7)]}


@pytest.mark.parametrize(
    "heads, shared, ranks, units, copies",
    [
        (3, 3, 2, [2, 1], [2, 1]),
        (8, 8, 3, [3, 3, 2], [3, 3, 2]),
        (16, 8, 3, [6, 6, 4], [3, 3, 2]),
        (8, 2, 4, [2, 2, 2, 2], [1, 1, 1, 1]),
    ],
)
def test_heads_over_ranks(heads, shared, ranks, units, copies):
    block = look_alikes.LlamaBlock(heads=heads, shared_heads=shared)
    model = look_alikes.Decoder([block], "rotary", 48)
    group = one_of(plan_of(model, ranks).blocks["blocks.0"].groups, "self_attn.o_proj")
    assert [stop - start for start, stop in group.runs(ranks)] == units
    cut = group.cut(group.columns["self_attn.k_proj"], ranks)
    assert [cut.width(rank) // 8 for rank in range(ranks)] == copies
    assert cut.copied() == (sum(copies) > shared)


def test_more_ranks_than_heads():
    plan = plan_of(look_alikes.model_of("llama"), 8).blocks["blocks.0"]
    assert plan.whole["self_attn.o_proj"] == "it has 6 heads or channels for 8 ranks"
    assert found(plan.groups) == {"mlp.down_proj": GROUPS["llama", "blocks.0"]["mlp.down_proj"]}


# ---- blocks of this file --------------------------------------------------------------------------------------------
class Attention(nn.Module):
    """Attention of 4 heads with what lies between the projections and them."""

    def __init__(self, norm=None, norm_width=6, drop=0.0):
        super().__init__()
        self.heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.drop = norm and look_alikes.RMSNorm(norm_width), nn.Dropout(drop)

    def forward(self, x):
        query, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.norm is not None and self.norm.weight.numel() == WIDTH:
            query = self.norm(query)
        query, keys, values = (look_alikes.heads_of(one, self.heads) for one in (query, keys, values))
        if self.norm is not None and self.norm.weight.numel() < WIDTH:
            query = self.norm(query)
        scores = (query @ keys.transpose(-1, -2)).softmax(-1)
        return self.o_proj((self.drop(scores) @ values).transpose(1, 2).flatten(2))


ATTENTION = {"o_proj": {"q_proj": [(24, 1)], "k_proj": [(24, 1)], "v_proj": [(24, 1)]}}


def test_a_norm_of_each_head_sees_a_part_of_its_gradient():
    made = analysed(Attention(norm=True))
    assert found(made.groups) == ATTENTION
    assert made.groups[0].partial == ["norm.weight"]


def test_a_norm_over_all_heads_names_the_layer_before_it():
    made = analysed(Attention(norm=True, norm_width=WIDTH))
    assert made.groups == []
    assert "'q_proj'" in made.whole["o_proj"] and "norm over all heads" in made.whole["o_proj"]


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_random_numbers_between_layers(drop):
    group = analysed(Attention(drop=drop)).groups[0]
    assert group.draws == (("v_proj", "o_proj") if drop else ())
    assert analysed(Attention(drop=drop), training=False).groups[0].draws == ()


class Units(nn.Module):
    """Two layers with an elementwise function between them, and a parameter for each channel."""

    def __init__(self, kind, inner=40):
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(WIDTH, inner * (2 if "fused" in kind else 1))
        self.down, self.scale = nn.Linear(inner, WIDTH), nn.Parameter(torch.rand(inner) + 0.5)

    def forward(self, x):
        made = self.up(x)
        if self.kind == "fused halves":
            gate, made = made.chunk(2, -1)
            made = F.silu(gate) * made
        elif self.kind == "fused pairs":
            made = F.silu(made[..., ::2]) * made[..., 1::2]
        elif self.kind == "residual":
            made = made + F.pad(x, (0, made.shape[-1] - WIDTH))
        elif self.kind == "turned":
            made = made.flip(-1)
        elif self.kind == "returned":
            return self.down(made), made
        elif self.kind == "twice":
            made = made + self.up(x * 2)
        elif self.kind == "sums":
            made = made + made.mean(-1, keepdim=True)
        return self.down(made * self.scale)


@pytest.mark.parametrize("kind, parts", [("plain", [40]), ("fused halves", [40, 40]), ("fused pairs", [80])])
def test_gates_and_values_in_one_weight(kind, parts):
    made = analysed(Units(kind))
    assert found(made.groups) == {"down": {"up": [(size, 1) for size in parts]}}
    dim, part = made.groups[0].params["scale"]
    assert (dim, part.size, made.groups[0].partial) == (0, 40, [])


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("turned", "do not fall into heads or channels"),
        ("returned", "returns what 'up' gives"),
        ("twice", "'up' runs several times"),
        ("sums", "it reads sums over all channels|do not fall into heads"),
        ("residual", "."),
    ],
)
def test_units_that_stay_whole(kind, reason):
    made = analysed(Units(kind))
    assert made.groups == []
    assert re.search(reason, made.whole["down"])


def test_layers_in_a_sequence():
    block = nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, WIDTH))
    made = analysed(block)
    assert found(made.groups) == {"2": {"0": [(40, 1)]}}
    assert set(made.whole) == {"4"}


def test_conv1d():
    block = nn.Sequential(look_alikes.Conv1D(40, WIDTH), nn.GELU(), look_alikes.Conv1D(WIDTH, 40))
    assert found(analysed(block).groups) == {"2": {"0": [(40, 1)]}}


class SameLinear(nn.Linear):
    """As Falcon's: it computes what a linear layer does, in two steps."""

    def forward(self, x):
        made = x @ self.weight.T
        return made if self.bias is None else made + self.bias


class OtherLinear(nn.Linear):
    """It computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind, expected", [(SameLinear, {"2": {"0": [(40, 1)]}}), (OtherLinear, {})])
def test_a_class_derived_from_linear(kind, expected):
    assert found(analysed(nn.Sequential(kind(WIDTH, 40), nn.GELU(), kind(40, WIDTH))).groups) == expected


class Adapted(nn.Module):
    """A layer with an adapter of low rank beside it."""

    def __init__(self, layer):
        super().__init__()
        self.base = layer
        self.a, self.b = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_adapters_are_cut_with_their_layer():
    block = Attention()
    block.q_proj, block.o_proj = Adapted(block.q_proj), Adapted(block.o_proj)
    made = analysed(block)
    columns = {"q_proj.base": [(24, 1)], "q_proj.b": [(24, 1)], "k_proj": [(24, 1)], "v_proj": [(24, 1)]}
    assert {" ".join(sorted(one.rows)): one.columns.keys() for one in made.groups} == {
        "o_proj.a o_proj.base": columns.keys()
    }
    assert set(made.whole) == {"q_proj.a", "o_proj.b"}


class NeedsMore(nn.Module):
    """It runs with arguments that no probe guesses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH))])

    def forward(self, pictures, *, scale):
        return self.layers[0](pictures * scale)


class TellsMore(NeedsMore):
    @property
    def dummy_inputs(self):
        return {"pictures": torch.ones(2, 5, WIDTH), "scale": 2.0}


def test_a_model_that_does_not_run_on_the_probe():
    refused(NotAnalysed, "NeedsMore does not run on a probe.*dummy_inputs", plan_of, NeedsMore(), 2)
    assert found(plan_of(TellsMore(), 2).blocks["layers.0"].groups) == {"2": {"0": [(40, 1)]}}


def test_the_model_stays_as_it_is_and_its_hooks_do_not_run():
    model = look_alikes.model_of("t5")
    before, called = copy.deepcopy(model), []
    for module in model.modules():
        module.register_forward_hook(lambda *given: called.append(given))
    plan_of(model, 2)
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    assert model.training and all(len(module._forward_hooks) == 1 for module in model.modules())
    assert called == []


# ---- sources --------------------------------------------------------------------------------------------------------
def settings_of(*specs, **more):
    rules = {"use_default_specs": False, "layer_specs": [dict(one) for one in specs], **more}
    return TPTrainingConfig(partition_config=rules)


def rule(pattern, kind="column", **more):
    return {"patterns": [pattern], "partition_type": kind, **more}


LLAMA = rule(r".*(q|k|v|gate|up)_proj\.weight$"), rule(r".*(o|down)_proj\.weight$", "row")


def ruled(*specs, **more):
    return plan_of(look_alikes.model_of("llama"), 2, settings_of(*specs, **more))


def test_rules_that_agree_with_the_analysis_get_its_heads():
    plan = ruled(*LLAMA)
    assert plan.source.name == "tensor_parallel.partition_config" and plan.source.by_user
    assert found(plan.blocks["blocks.0"].groups) == GROUPS["llama", "blocks.0"]
    assert plan.blocks["blocks.0"].ruled == {} and plan.outside == {}


def test_the_first_rule_that_fits_decides():
    block = ruled(rule(r".*mlp.*", "skip"), *LLAMA).blocks["blocks.0"]
    assert list(found(block.groups)) == ["self_attn.o_proj"]
    assert set(block.whole) == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


def test_a_rule_by_itself():
    wanted = rule(r".*up_proj\.weight$", shape=[2, -1], partition_dim=0, gather_output=True)
    block = ruled(wanted).blocks["blocks.0"]
    spec = block.ruled["mlp.up_proj"]
    assert (list(block.ruled), block.groups) == (["mlp.up_proj"], [])
    assert (spec.shape, spec.gather_output) == ((2, -1), True)


def test_layers_outside_of_blocks():
    assert list(ruled(*LLAMA, rule("lm_head", gather_output=True)).outside) == ["lm_head"]
    tied = plan_of(look_alikes.model_of("llama", tied=True), 2, settings_of(*LLAMA, rule("lm_head")))
    assert (tied.outside, tied.kept) == ({}, {"lm_head": "another module has the same weight"})
    assert "LayerNorm cannot be cut" in ruled(*LLAMA, rule(r"norm\.weight")).kept["norm"]
    assert ruled(*LLAMA, rule(r"norm\.weight", "skip", grad_allreduce=True)).summed == ["norm"]


def test_rules_that_do_not_fit():
    refused(ValueError, r"no parameter of Decoder fits the patterns \['nothing'\]", ruled, *LLAMA, rule("nothing"))
    refused(ValueError, "strict_mode", ruled, *LLAMA, strict_mode=True)
    assert ruled(*LLAMA, rule("lm_head", "skip"), strict_mode=True).outside == {}
    assert ruled(*LLAMA, rule("nothing", model_types=["gpt2"])).outside == {}
    refused(DeepSpeedConfigError, "preset_model", TPTrainingConfig, preset_model="unknown")


def test_a_preset():
    plan = plan_of(look_alikes.model_of("llama"), 2, TPTrainingConfig(preset_model="llama"))
    assert not plan.source.by_user
    assert found(plan.blocks["blocks.0"].groups) == GROUPS["llama", "blocks.0"]


STYLES = {"o_proj": "rowwise", "down_proj": "rowwise"}


@pytest.mark.parametrize("style, known", [("colwise", True), ("sideways", False)])
def test_the_plan_of_the_model(style, known):
    model = look_alikes.model_of("llama")
    parts = {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}
    names = [f"blocks.*.{part}.{one}_proj" for part, layers in parts.items() for one in layers]
    model._tp_plan = {name: STYLES.get(name.rpartition(".")[2], style) for name in names}
    plan = plan_of(model, 2)
    assert (plan.source.name == "the tensor-parallel plan of the model") == known
    assert found(plan.blocks["blocks.1"].groups) == GROUPS["llama", "blocks.0"]


@pytest.mark.parametrize("key", [look_alikes.LlamaBlock, "LlamaBlock"])
def test_a_policy_of_a_script(key):
    plan = plan_of(look_alikes.model_of("llama"), 2, policy={key: ("self_attn.o_proj", ".down_proj")})
    assert plan.source.name == "injection_policy" and plan.source.by_user
    assert found(plan.blocks["blocks.0"].groups) == GROUPS["llama", "blocks.0"]
    words = r"no block of the model has a layer of \[\('GPT2Block'"
    refused(ValueError, words, plan_of, look_alikes.model_of("llama"), 2, None, {look_alikes.GPT2Block: "c_proj"})
