"""The proof of a plan names what a wrong cut changes, before any weight moves."""

import copy
import logging
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensor_models as look_alikes
from deepspeed import comm as dist
from deepspeed.config.sections import TPTrainingConfig
from deepspeed.module_inject.cut_group import Part
from deepspeed.module_inject.cut_plan import plan_of
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode
from deepspeed.module_inject.tensor_proof import PlanError, prove
from deepspeed.module_inject.tp_model import cut_over
from harness import on_ranks
from logs import logged
from refusals import refused


class NormedAttention(look_alikes.LlamaAttention):
    """Queries pass a norm of each head, as in Qwen3."""

    def __init__(self, *given):
        super().__init__(*given)
        self.q_norm = look_alikes.RMSNorm(self.head_dim)

    def forward(self, x, angles, cache=None):
        query = look_alikes.heads_of(self.q_proj(x), self.num_heads)
        shared = (look_alikes.heads_of(one(x), self.num_key_value_heads) for one in (self.k_proj, self.v_proj))
        keys, values = (one.repeat_interleave(self.num_key_value_groups, 1) for one in shared)
        return self.o_proj(look_alikes.attend(self.q_norm(query), keys, values))


class FusedUnits(nn.Module):
    """The gate and the values in one weight, as in Phi-3."""

    def __init__(self, width, inner):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


def qwen(units=None):
    block = look_alikes.LlamaBlock()
    block.self_attn, block.mlp = NormedAttention(48, 6, 2, 8), FusedUnits(48, 40)
    return look_alikes.Decoder([block], "rotary", 48)


def group_of(plan, row):
    return next(one for one in plan.groups if row in one.rows)


def bias_on_every_rank(plan):
    def forward(self, input):
        return self.exchange.sum_out(self._own(input, self.bias))

    return mock.patch.object(LinearAllreduce, "forward", forward)


def a_norm_is_not_summed(plan):
    group_of(plan, "self_attn.o_proj").partial = []


def heads_are_split(plan):
    group_of(plan, "self_attn.o_proj").columns["self_attn.q_proj"] = [Part(24), Part(24)]


def heads_are_counted_as_channels(plan):
    group = group_of(plan, "self_attn.o_proj")
    group.units, group.columns = 48, {one: [Part(parts[0].size, 1)] for one, parts in group.columns.items()}


def gates_are_mixed(plan):
    group_of(plan, "mlp.down_proj").columns["mlp.gate_up_proj"] = [Part(80)]


def half_a_pair(plan):
    group_of(plan, "mlp.down_proj").rows = []


def an_integer_stays(plan):
    group_of(plan, "self_attn.o_proj").counts = []


def an_argument_stays(plan):
    group_of(plan, "dense").arguments = []


def an_argument_is_not_summed(plan):
    group_of(plan, "self_attn.o_proj").shared = []


FAULTS = [
    (look_alikes.MODELS["gpt2"], bias_on_every_rank, "the output of 'c_proj' differs"),
    (qwen, bias_on_every_rank, "the output of 'mlp.down_proj' differs"),
    (qwen, a_norm_is_not_summed, "the gradient of parameter 'self_attn.q_norm.weight' differs"),
    (look_alikes.MODELS["llama"], heads_are_split, "the output of 'self_attn.o_proj' differs"),
    (look_alikes.MODELS["llama"], heads_are_counted_as_channels, "block 'blocks.0'.*no rank has"),
    (qwen, gates_are_mixed, "the output of 'mlp.down_proj' differs"),
    (qwen, half_a_pair, "'mlp.down_proj'"),
    (qwen, an_integer_stays, "'self_attn"),
    (look_alikes.MODELS["bloom"], an_argument_stays, "block 'blocks.0'"),
    (look_alikes.MODELS["llama"], an_argument_is_not_summed, r"the gradient of argument \(0, 1, 0\) differs"),
]


@pytest.mark.parametrize("make, fault, words", FAULTS)
@on_ranks(2, init=True)
def test_the_proof_names(rank, world, make, fault, words):
    torch.manual_seed(0)
    set_autotp_mode(training=True)
    model, group = make(), dist.get_world_group()
    name, plan = next(iter(plan_of(model, world).kinds().items()))
    given = model.get_submodule(name), name, plan, world, group
    prove(*given)  # it is right
    before = copy.deepcopy(model.state_dict())
    with fault(plan) or mock.MagicMock():
        refused(PlanError, words, prove, *given)
    assert all(torch.equal(one, before[key]) for key, one in model.state_dict().items())


class MeanBlock(nn.Module):
    """Its layer cannot be cut: what comes behind it is a mean over all channels."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(24, 24)

    def forward(self, x):
        return x + self.up(x).mean(-1, keepdim=True)


class Means(nn.Module):
    def __init__(self, planned):
        super().__init__()
        self.blocks = nn.ModuleList([MeanBlock() for _ in range(2)])
        if planned:
            self._tp_plan = {"blocks.*.up": "colwise"}

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


RULES = {"layer_specs": [{"patterns": [r".*up\.weight$"], "partition_type": "column"}]}


@on_ranks(2, init=True)
def test_a_wrong_plan_is_an_error_and_a_wrong_rule_of_the_user_a_warning(rank, world):
    group = dist.get_world_group()
    model = Means(planned=True)
    words = r"block 'blocks.0' \(MeanBlock\).*the output of the block differs.*partition_type skip"
    refused(PlanError, words, cut_over, model, group, TPTrainingConfig(autotp_size=2))
    assert [tuple(param.shape) for param in model.parameters()] == [(24, 24), (24,)] * 2
    assert type(model.blocks[0].up) is nn.Linear

    cut_over(model, group, TPTrainingConfig(autotp_size=2, verify=False))
    assert type(model.blocks[0].up) is LinearLayer and model.blocks[0].up.weight.shape == (12, 24)

    for verify in (True, False):
        model = Means(planned=False)
        with logged(logging.WARNING) as lines:
            cut_over(model, group, TPTrainingConfig(autotp_size=2, partition_config=RULES, verify=verify))
        assert type(model.blocks[1].up) is LinearLayer
        told = [line for line in lines if "partition_config: tensor parallelism: block 'blocks.0'" in line]
        assert len(told) == verify
