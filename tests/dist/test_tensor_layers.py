"""Layers under their published names, used by themselves, give slices of what whole layers give."""

import copy

import pytest
import torch
from torch import nn

import tensor_models as look_alikes
from deepspeed._native import _C
from deepspeed.module_inject import layers
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, SubParamLinearLayer, cut_of, set_autotp_mode
from deepspeed.utils import groups
from harness import on_ranks
from refusals import refused

INSIDE, OUTSIDE = 12, 24


def own_slice(tensor, dim, sizes, rank, world=2):
    """A rank's slices of the sub-parameters of ``sizes``, side by side."""
    return torch.cat([part.tensor_split(world, dim)[rank] for part in tensor.split(sizes, dim)], dim)


def tensor_group():
    groups.clear()
    set_autotp_mode(training=True)
    return groups._init_tp_mesh_device(2)[1]


def whole_layer(transposed, bias=True):
    torch.manual_seed(0)
    return look_alikes.Conv1D(OUTSIDE, INSIDE) if transposed else nn.Linear(INSIDE, OUTSIDE, bias=bias)


def same(found, expected, what):
    assert found.shape == expected.shape, what
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6), what


def trained(layer, x, grad):
    """``(result, gradient of the input)`` of one run of a layer whose result has the gradient ``grad``."""
    x = x.clone().requires_grad_()
    made = layer(x)
    made.backward(grad)
    return made.detach(), x.grad


COLUMNS = [  # class, further arguments, sizes of sub-parameters, whether it is a Conv1D
    ("LinearLayer", {}, [24], False),
    ("LinearLayer", {"overlap": True}, [24], False),
    ("LinearLayer", {"gather_output": True}, [24], False),
    ("LinearLayer", {"overlap": True}, [24], True),
    ("fused_LinearLayer", {}, [8, 8, 8], False),
    ("GateUpPack_LinearLayer", {}, [12, 12], False),
    ("conv_LinearLayer", {}, [8, 8, 8], True),
    ("Yuan_LinearLayer", {}, [12, 12], False),
    ("Yuan_LinearLayer", {"gather_output": True}, [12, 12], False),
    ("SubParamLinearLayer", {"shape": (3, -1), "partition_dim": 0}, [8, 8, 8], False),
    ("SubParamLinearLayer", {"shape": ((16, 4, 4), -1)}, [16, 4, 4], False),
    ("SubParamLinearLayer", {"shape": ((18, 3, 3), INSIDE), "gather_output": True}, [18, 3, 3], False),
]


@pytest.mark.parametrize("name, more, sizes, transposed", COLUMNS)
@on_ranks(2, init=True)
def test_layers_that_are_cut_along_their_outputs(rank, world, name, more, sizes, transposed):
    whole, group = whole_layer(transposed), tensor_group()
    layer = getattr(layers, name)(copy.deepcopy(whole), group, **more)
    gathered, dim = "gather_output" in more, int(transposed)
    x, grad = torch.randn(2, 5, INSIDE), torch.randn(2, 5, OUTSIDE)
    expected, input_grad = trained(whole, x, grad)
    made, found = trained(layer, x, grad if gathered else own_slice(grad, -1, sizes, rank))
    same(made, expected if gathered else own_slice(expected, -1, sizes, rank), "result")
    same(found, input_grad, "gradient of the input")
    for param, other, along in ((layer.weight, whole.weight, dim), (layer.bias, whole.bias, 0)):
        same(param.data, own_slice(other.data, along, sizes, rank), "parameter")
        same(param.grad, own_slice(other.grad, along, sizes, rank), "gradient of a parameter")
        assert (param.tensor_model_parallel, param.partition_dim) == (True, along)
    assert (layer.in_features, layer.out_features) == (INSIDE, layer.bias.numel())
    check_round_trip(layer, whole)


ROWS = [
    ("LinearAllreduce", {}, [12], False),
    ("LinearAllreduce", {"overlap": True}, [12], True),
    ("SubParamLinearAllreduce", {"shape": (-1, 2), "partition_dim": 1}, [6, 6], False),
    ("SubParamLinearAllreduce", {"shape": (OUTSIDE, (7, 5))}, [7, 5], False),
    ("Yuan_LinearAllreduce", {}, [6, 6], False),
    ("LmHeadLinearAllreduce", {}, [12], False),
]


@pytest.mark.parametrize("name, more, sizes, transposed", ROWS)
@on_ranks(2, init=True)
def test_layers_that_are_cut_along_their_inputs(rank, world, name, more, sizes, transposed):
    whole, group = whole_layer(transposed), tensor_group()
    layer = getattr(layers, name)(copy.deepcopy(whole), group, **more)
    x, grad = torch.randn(2, 5, INSIDE), torch.randn(2, 5, OUTSIDE)
    expected, input_grad = trained(whole, x, grad)
    takes_all = name == "LmHeadLinearAllreduce"
    made, found = trained(layer, x if takes_all else own_slice(x, -1, sizes, rank), grad)
    same(made, expected, "result: the bias is added once")
    same(found, input_grad if takes_all else own_slice(input_grad, -1, sizes, rank), "gradient of the input")
    dim = int(not transposed)
    same(layer.weight.data, own_slice(whole.weight.data, dim, sizes, rank), "weight")
    same(layer.weight.grad, own_slice(whole.weight.grad, dim, sizes, rank), "gradient of the weight")
    same(layer.bias.data, whole.bias.data, "bias")
    same(layer.bias.grad, whole.bias.grad, "gradient of the bias")
    assert cut_of(layer.bias) is None and layer.out_features == OUTSIDE
    check_round_trip(layer, whole)


def check_round_trip(layer, whole):
    """``gather_params`` makes parameters whole, and ``_tp_partition`` and ``uneven_partition`` slices again."""
    params, own = [layer.weight, layer.bias], [layer.weight.detach().clone(), layer.bias.detach().clone()]
    for back in (layer._tp_partition, layer.uneven_partition):
        layer.gather_params(params)
        assert torch.equal(layer.weight, whole.weight) and torch.equal(layer.bias, whole.bias)
        assert torch.equal(layer.weight.data_partition, own[0])
        back(params)
        assert torch.equal(layer.weight, own[0]) and torch.equal(layer.bias, own[1])
    assert layer.weight is params[0]


@on_ranks(2, init=True)
def test_copies_have_the_sum_of_their_gradients_also_after_a_round_trip(rank, world):
    whole, group = whole_layer(False), tensor_group()
    layer = LinearLayer(copy.deepcopy(whole), group, cut=_C.TensorCut([OUTSIDE], [[(0, OUTSIDE), (0, OUTSIDE)]]))
    x = torch.randn(3, INSIDE)
    for turn in range(2):
        layer.zero_grad()
        layer(x).backward(torch.full((3, OUTSIDE), rank + 1.0))
        same(layer.weight.grad, 3 * x.sum(0).expand(OUTSIDE, -1), f"gradient, turn {turn}")
        same(layer.bias.grad, torch.full((OUTSIDE,), 9.0), f"gradient of the bias, turn {turn}")
        assert layer.weight.ds_tensor_copies == (rank == 1)
        layer.gather_params([layer.weight, layer.bias])
        same(layer.weight.data, whole.weight.data, "weight")
        layer._tp_partition([layer.weight, layer.bias])


@on_ranks(2, init=True)
def test_a_pair_of_layers_trains_as_two_whole_ones(rank, world):
    group = tensor_group()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(INSIDE, OUTSIDE, bias=False), nn.Tanh(), nn.Linear(OUTSIDE, INSIDE))
    copied = copy.deepcopy(whole)
    pair = nn.Sequential(LinearLayer(copied[0], group), nn.Tanh(), LinearAllreduce(copied[2], group))
    assert pair[0].bias is None and "ranks=2" in repr(pair[0])
    x = torch.randn(4, INSIDE)
    for model in (whole, pair):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    same(pair(x), whole(x), "result")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        overlapped = LinearLayer(nn.Linear(INSIDE, OUTSIDE), group, overlap=True)
        assert overlapped(x).dtype == pair(x).dtype == torch.bfloat16
        made = overlapped(x.requires_grad_())
    made.float().sum().backward()
    same(overlapped.bias.grad, torch.full((OUTSIDE // 2,), 4.0), "gradient under autocast")


@on_ranks(2, init=True)
def test_embeddings(rank, world):
    group = tensor_group()
    torch.manual_seed(0)
    whole, tokens = nn.Embedding(10, 7, padding_idx=1), torch.randint(0, 10, (3, 4))
    layer = layers.HiddenParallelEmbedding(copy.deepcopy(whole), group, name="words")
    grad = torch.randn(3, 4, 7)
    made, expected = layer(tokens), whole(tokens)
    assert torch.equal(made, expected)
    made.backward(grad)
    expected.backward(grad)
    same(layer.weight.grad, own_slice(whole.weight.grad, 1, [7], rank), "gradient")
    limited = nn.Embedding(10, 8, max_norm=1.0)
    refused(ValueError, "'words' has a max_norm", layers.HiddenParallelEmbedding, limited, group, "words")


@on_ranks(2, init=True)
def test_layers_of_one_rank_and_of_slices(rank, world):
    group, weight, bias = tensor_group(), torch.randn(OUTSIDE, INSIDE), torch.randn(OUTSIDE)
    layer, x = LinearLayer.from_weights(weight=weight, bias=bias), torch.randn(2, INSIDE)
    same(layer(x), nn.functional.linear(x, weight, bias), "result")
    empty = LinearLayer.from_weights((OUTSIDE, INSIDE), gather_output=True)
    assert (empty.weight.shape, empty.weight.dtype, empty.bias) == ((OUTSIDE, INSIDE), torch.half, None)
    assert empty.gather_output and empty.tp_world_size == 1
    layer = LinearLayer(nn.Linear(INSIDE, OUTSIDE), group, skip_partition=True)
    assert layer.weight.shape == (OUTSIDE, INSIDE) and cut_of(layer.weight) is None
    words = r"shape \(\(20, 3\), -1\) does not fit dimension 0 of 'qkv', which has 24 elements"
    refused(ValueError, words, SubParamLinearLayer, nn.Linear(INSIDE, OUTSIDE), group, ((20, 3), -1), name="qkv")
    refused(ValueError, "does not fit", SubParamLinearLayer, nn.Linear(INSIDE, OUTSIDE), group, (5, -1), name="qkv")


# ---- AutoTP ---------------------------------------------------------------------------------------------------------
class Projections(nn.Module):
    """Layers that nobody calls."""

    def __init__(self):
        super().__init__()
        self.qkv, self.up, self.out = nn.Linear(INSIDE, OUTSIDE), nn.Linear(INSIDE, OUTSIDE), nn.Linear(OUTSIDE, INSIDE)
        self.norm, self.words, self.heads = nn.LayerNorm(INSIDE), nn.Embedding(5, INSIDE), 4


def rule(name, kind, **more):
    return TPLayerSpec([rf".*{name}\.weight$"], PartitionType[kind], **more)


def replaced(model, *specs, state=None, prefix="", **more):
    set_autotp_mode(training=True)
    config = AutoTPConfig(tp_size=2, layer_specs=list(specs), use_default_specs=False) if specs else None
    made = AutoTP(model, more.pop("rows", ()), prefix, state, None, more.pop("kind", None), partition_config=config)
    made.set_tensor_parallel_config(2, tensor_group())
    made.update_linear_policies()
    return made, made._replace_module(model)


@on_ranks(2, init=True)
def test_auto_tp_replaces_layers_as_rules_say(rank, world):
    torch.manual_seed(0)
    whole = Projections()
    _, model = replaced(
        copy.deepcopy(whole),
        rule("qkv", "COLUMN", shape=((16, 4, 4), -1), partition_dim=0),
        rule("up", "COLUMN", gather_output=True),
        rule("out", "ROW"),
        rule("norm", "SKIP", grad_allreduce=True),
    )
    assert [type(one) for one in (model.qkv, model.up, model.out)] == [
        SubParamLinearLayer, LinearLayer, LinearAllreduce,
    ]  # fmt: skip
    same(model.qkv.weight.data, own_slice(whole.qkv.weight.data, 0, [16, 4, 4], rank), "qkv")
    x = torch.randn(2, INSIDE)
    same(model.up(x), whole.up(x), "up")
    same(model.out(whole.up(x).chunk(2, -1)[rank]), whole.out(whole.up(x)), "out")
    model.norm(x * (rank + 1)).sum().backward()
    same(model.norm.bias.grad, torch.full((INSIDE,), 4.0), "gradient of the norm")


@on_ranks(2, init=True)
def test_auto_tp_of_a_model_that_runs(rank, world):
    tokens, state = look_alikes.tokens_of(), look_alikes.model_of("llama", seed=1).state_dict()
    rows = ("o_proj", "down_proj")
    given = {"rows": rows, "kind": look_alikes.LlamaBlock, "prefix": "model."}
    expected = look_alikes.model_of("llama", seed=1)(tokens)
    state = {f"model.{name}": value for name, value in state.items()}
    tool, model = replaced(look_alikes.model_of("llama"), state=state, **given)
    same(model(tokens), expected, "logits")
    assert type(model.blocks[1].mlp.down_proj) is LinearAllreduce and model.blocks[0].self_attn.num_heads == 3
    policy = dict(AutoTP.tp_parser(look_alikes.model_of("llama")))
    assert {one.rpartition(".")[2] for one in policy[look_alikes.LlamaBlock]} == set(rows)
    assert tool.register_replicated_grad_hooks(model) == []
    owner = Projections()
    owner.num_heads = 4
    tool.update_mp_params(owner, "owner")
    assert owner.num_heads == 2
