"""Frozen parameters of small floats, and linear layers over them, in one process."""

import copy
import gc
import io

import pytest
import torch

import deepspeed
from deepspeed import linear
from deepspeed.formats.coded_weight import CodedWeight
from deepspeed.formats.weight_files import as_weight
from deepspeed.linear import (
    Init,
    LoRAConfig,
    LoRAOptimizedLinear,
    OptimizedLinear,
    QuantizationConfig,
    QuantizedLinear,
    QuantizedParameter,
    init_lora,
)
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear as published_layer
from deepspeed.ops.fp_quantizer import FP_Quantize
from deepspeed.ops.fp_quantizer.weight_form import WeightForm
from refusals import refused, refusing

FORMS = [(bits, dtype) for bits in (4, 6, 8, 12) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


def reloaded(value):
    """A copy of ``value`` by way of torch.save."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **({"weights_only": False} if hasattr(torch, "compile") else {}))


# ---- parameters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits, dtype", FORMS)
def test_a_parameter_is_the_codes_of_fp_quantize(bits, dtype):
    values, config = torch.randn(6, 64).to(dtype), QuantizationConfig(q_bits=bits, group_size=32)
    param, quantizer = QuantizedParameter(values, quantization_config=config), FP_Quantize(config)
    assert torch.equal(param.data, quantizer.quantize(values, q_bits=bits))
    assert torch.equal(param.dequantized(), quantizer.dequantize(param.data, q_bits=bits))
    assert param.dequantized().dtype == dtype and param.dequantized().shape == values.shape
    assert param.dtype == config.q_dtype and not param.requires_grad


@pytest.mark.parametrize("bits, dtype", FORMS)
@pytest.mark.parametrize("shape", [(5, 5), (7,), (3, 11, 2)])
def test_any_number_of_elements_comes_back(bits, dtype, shape):
    values = torch.randn(shape).to(dtype)
    param = QuantizedParameter(values, quantization_config=QuantizationConfig(q_bits=bits, group_size=16))
    found = param.dequantized()
    assert found.shape == values.shape
    bound = {4: 0.26, 6: 0.13, 8: 0.07, 12: 0.01}[bits] * values.abs().max()
    assert (found.float() - values.float()).abs().max() <= bound


@pytest.mark.parametrize("bits, dtype", FORMS)
def test_files_are_decoded_to_the_same_bits(bits, dtype):
    values = torch.cat([torch.randn(60), torch.randn(30) * 1e-3, torch.zeros(20), torch.tensor([1e4, -3.0, 0.5])])
    values = values.to(dtype)
    form = WeightForm(values.shape, dtype, bits, 16)
    rows = form.encode(values)
    found = CodedWeight(as_weight(rows), form.facts()).contiguous()
    assert found.dtype == dtype and torch.equal(found, form.decode(rows))
    wide = CodedWeight(as_weight(rows), form.facts(), torch.float32).contiguous()
    assert torch.equal(wide, form.decode(rows, torch.float32))


def test_files_with_other_facts_are_refused():
    form = WeightForm(torch.Size([32]), torch.float32, 8, 16)
    rows = as_weight(form.encode(torch.randn(32)))
    refused(ValueError, r"codes of shape \(2, 20\).*\(48,\)", CodedWeight, rows, {**form.facts(), "shape": [48]})
    refused(ValueError, "6 bits: the checkpoint is damaged", CodedWeight, rows, {**form.facts(), "q_bits": 6})


def test_requires_grad_is_refused():
    refused(ValueError, "codes have no gradient", QuantizedParameter, torch.rand(8, 8), requires_grad=True)


def test_copies_keep_what_they_are():
    param = QuantizedParameter(torch.randn(8, 64).bfloat16(), quantization_config=QuantizationConfig(q_bits=6))
    for other in (copy.deepcopy(param), reloaded(param), type(param)(param.data, **param.__dict__), param.to("cpu")):
        assert type(other) is QuantizedParameter and torch.equal(other.data, param.data)
        assert torch.equal(other.dequantized(), param.dequantized())
    assert copy.deepcopy(param).data_ptr() != param.data_ptr()
    assert torch.equal(param.clone(), param.data)  # codes


def test_to_changes_the_dtype_of_what_comes_back():
    param = QuantizedParameter(torch.randn(4, 16), quantization_config=QuantizationConfig(group_size=16))
    narrow = param.to(dtype=torch.bfloat16)
    assert narrow.dequantized().dtype == torch.bfloat16 and param.dequantized().dtype == torch.float32
    assert torch.equal(narrow.data, param.data) and param.to(torch.float32) is param


def test_offload_and_back_keeps_the_codes():
    param = QuantizedParameter(torch.randn(4, 16), quantization_config=QuantizationConfig(group_size=16))
    before = param.dequantized()
    param.offload()
    assert param.device.type == "cpu" and torch.equal(param.dequantized(), before)
    param.offload(revert=True)
    assert torch.equal(param.cuda("cpu").dequantized(), before)


def test_codes_of_nobody_are_refused():
    with refusing(ValueError, "without the quantizer"):
        QuantizedParameter(torch.zeros(2, 20, dtype=torch.uint8)).dequantized()


# ---- configurations ------------------------------------------------------------------------------------------------


def test_defaults_are_the_published_ones():
    lora, coded = LoRAConfig(), QuantizationConfig()
    assert (lora.lora_r, lora.lora_alpha, lora.base_weight_sharding) == (64, 16.0, 1)
    assert (lora.offload, lora.offload_ratio, lora.delay_lora_init) == (False, 0.0, False)
    assert "q_proj" in lora.target_mods and "down_proj" in lora.target_mods
    assert (coded.q_bits, coded.mantissa_bits, coded.group_size, coded.q_dtype) == (8, 3, 512, torch.uint8)


def test_values_out_of_range_are_refused():
    refused(ValueError, "lora_r is 0", LoRAConfig, lora_r=0)
    refused(ValueError, "base_weight_sharding is 2.0", LoRAConfig, base_weight_sharding=2.0)
    refused(ValueError, "offload_ratio is 1.5", LoRAConfig, offload=True, offload_ratio=1.5)
    refused(ValueError, "set offload=True", LoRAConfig, offload_ratio=0.5)
    refused(ValueError, "target_mods is a list", LoRAConfig, target_mods="q_proj")
    refused(ValueError, "q_bits is 5", QuantizationConfig, q_bits=5)
    refused(ValueError, "q_mantisa_bits is 2", QuantizationConfig, mantissa_bits=2)
    refused(ValueError, "group_size is 3", QuantizationConfig, q_bits=4, group_size=3)
    refused(ValueError, "q_dtype is torch.int8", QuantizationConfig, q_dtype=torch.int8)
    refused(TypeError, "lora_config is a dict", OptimizedLinear, 4, 4, lora_config={"lora_r": 4})
    refused(ValueError, "knows no other ranks", OptimizedLinear, 8, 8, lora_config=LoRAConfig(base_weight_sharding=2))


# ---- layers --------------------------------------------------------------------------------------------------------


def test_it_makes_the_layer_that_is_asked_for():
    lora, coded = LoRAConfig(lora_r=2), QuantizationConfig(group_size=16)
    assert type(OptimizedLinear(8, 8)) is torch.nn.Linear and OptimizedLinear(8, 8).weight.dtype == torch.bfloat16
    assert type(OptimizedLinear(8, 8, quantization_config=coded)) is QuantizedLinear
    assert type(OptimizedLinear(8, 8, lora_config=lora)) is LoRAOptimizedLinear is published_layer
    both = OptimizedLinear(8, 6, lora_config=lora, quantization_config=coded)
    assert type(both.weight) is QuantizedParameter and both.lora_weight_1.weight.shape == (2, 8)
    assert both.lora_weight_2.weight.shape == (6, 2) and not both.lora_weight_2.weight.any()
    assert [name for name, param in both.named_parameters() if param.requires_grad] == [
        "lora_weight_1.weight", "lora_weight_2.weight",
    ]  # fmt: skip
    assert both.weight.ds_optim_param


@pytest.mark.parametrize("bits", [None, 4, 8, 12])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype, gap", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_outputs_and_gradients_are_the_formulas(bits, bias, dtype, gap):
    if bits is not None and dtype == torch.float64:
        dtype, gap = torch.float32, 1e-5  # fp64 has no codes
    torch.manual_seed(1)
    coded = bits and QuantizationConfig(q_bits=bits, group_size=16)
    layer = OptimizedLinear(10, 7, bias, LoRAConfig(lora_r=3, lora_alpha=6), coded, dtype=dtype)
    torch.nn.init.normal_(layer.lora_weight_2.weight)
    x = torch.randn(2, 5, 10).to(dtype).requires_grad_()
    out = layer(x)
    weights = [layer.full_weight(), layer.lora_weight_1.weight, layer.lora_weight_2.weight]
    leaves = [one.detach().double().requires_grad_() for one in (x, *weights[1:])]
    wide, first, second = leaves
    expected = wide @ weights[0].double().t() + wide @ first.t() @ second.t() * 2
    expected = expected + layer.bias.double() if bias else expected
    assert out.dtype == dtype and (out - expected).abs().max() <= gap * expected.abs().max()
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, [x, *weights[1:]], grad)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, grad.double())):
        assert (one - other).abs().max() <= gap * other.abs().max()


def test_linear_without_f_linear_is_the_product():
    layer = OptimizedLinear(6, 4, lora_config=LoRAConfig(lora_r=2), dtype=torch.float32)
    x = torch.randn(3, 6)
    assert torch.allclose(layer.linear_without_F_linear(x, layer.full_weight()), x @ layer.full_weight().t())


def test_no_decoded_weight_waits_for_backward():
    """Between forward and backward autograd keeps nothing of the size of a weight."""
    layers = torch.nn.Sequential(
        *(OptimizedLinear(256, 256, quantization_config=QuantizationConfig(), dtype=torch.float32) for _ in range(3))
    )
    x = torch.randn(2, 256, requires_grad=True)
    out = layers(x)
    gc.collect()
    sizes = [one.numel() for one in gc.get_objects() if torch.is_tensor(one) and one.dtype == torch.float32]
    assert max(sizes) < 256 * 256
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        layers(x)
    assert sum(saved) < 256 * 256
    out.sum().backward()
    assert x.grad is not None


def test_autocast_computes_in_its_dtype():
    layer = OptimizedLinear(16, 16, quantization_config=QuantizationConfig(group_size=16), dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(torch.randn(2, 16, requires_grad=True))
    assert out.dtype == torch.bfloat16
    out.sum().backward()


def test_second_derivatives_are_refused():
    layer = OptimizedLinear(8, 8, quantization_config=QuantizationConfig(group_size=8), dtype=torch.float32)
    x = torch.randn(2, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with refusing(RuntimeError, "once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("bits", [None, 8])
def test_disable_gives_the_base_layer_back(bits):
    coded = bits and QuantizationConfig(group_size=16)
    layer = OptimizedLinear(8, 8, lora_config=LoRAConfig(lora_r=2), quantization_config=coded, dtype=torch.float32)
    weight, x = layer.full_weight(), torch.randn(3, 8)
    layer.disable()
    assert torch.equal(layer.weight, weight) and list(dict(layer.named_parameters())) == ["weight"]
    assert torch.allclose(layer(x), x @ weight.t(), atol=1e-6) and not layer.weight.requires_grad


def test_states_load_from_codes_and_from_values():
    def make():
        return OptimizedLinear(
            16, 8, lora_config=LoRAConfig(lora_r=2), quantization_config=QuantizationConfig(group_size=16),
            dtype=torch.float32,
        )  # fmt: skip

    source, taken, plain = make(), make(), torch.nn.Linear(16, 8, bias=False)
    taken.load_state_dict(source.state_dict())
    assert torch.equal(taken.full_weight(), source.full_weight())
    taken.load_state_dict({**source.state_dict(), "weight": plain.weight.detach()})
    assert torch.equal(
        taken.weight, QuantizedParameter(plain.weight.data, quantization_config=QuantizationConfig(group_size=16))
    )
    for other in (copy.deepcopy(source), reloaded(source)):
        assert torch.equal(other.full_weight(), source.full_weight()) and other.weight.ds_optim_param


# ---- models --------------------------------------------------------------------------------------------------------


class Projections(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16, bias=False)
        self.norm, self.lm_head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.lm_head(self.norm(torch.relu(self.q_proj(x)) + self.k_proj(x)))


def test_init_makes_layers_that_wait_for_their_weights():
    plain, x = Projections(), torch.randn(3, 16)
    with Init(LoRAConfig(lora_r=2), QuantizationConfig(q_bits=12, group_size=16)):
        model = Projections()
    assert type(torch.nn.Linear(2, 2)) is torch.nn.Linear
    with refusing(RuntimeError, "call deepspeed.linear.init_lora(model)"):
        model(x)
    model.load_state_dict(plain.state_dict())
    assert init_lora(model) is model
    assert model.q_proj.initialized and model.k_proj.initialized and model.lm_head.disabled
    assert {name.split(".")[0] for name, param in model.named_parameters() if param.requires_grad} == {
        "q_proj", "k_proj",
    }  # fmt: skip
    assert (model(x) - plain(x)).abs().max() < 0.02 * plain(x).abs().max()
    before = model(x)
    init_lora(model)  # again: nothing happens
    assert torch.equal(model(x), before)


def test_classes_and_checks_see_torchs_own_class_inside_of_init():
    with Init(LoRAConfig(lora_r=2)):

        class Mine(torch.nn.Linear):
            pass

        mine = Mine(4, 4)
        assert type(mine) is Mine and isinstance(mine, torch.nn.Linear) and issubclass(Mine, torch.nn.Linear)
        assert not isinstance(torch.nn.Linear(4, 4), torch.nn.Linear)  # it has become another layer
    assert isinstance(mine, torch.nn.Linear)
    with Init():
        assert type(torch.nn.Linear(4, 4)) is torch.nn.Linear
    with Init(LoRAConfig()), refusing(RuntimeError, "does not nest"):
        Init(LoRAConfig()).__enter__()


def test_an_error_inside_of_init_brings_torchs_class_back():
    with refusing(ZeroDivisionError), Init(LoRAConfig()):
        raise ZeroDivisionError
    assert type(torch.nn.Linear(4, 4)) is torch.nn.Linear


def test_target_mods_choose_layers():
    with Init(LoRAConfig(lora_r=2, target_mods=["k_"])):
        model = Projections()
    init_lora(model)
    assert model.q_proj.disabled and model.k_proj.initialized
    with Init(LoRAConfig(lora_r=2, target_mods=["nothing"])):
        model = Projections()
    refused(ValueError, r"target_mods \['nothing'\].*q_proj", init_lora, model)
    with Init(LoRAConfig(lora_r=2)):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    init_lora(model)
    assert all(layer.initialized for layer in model)


def test_quantization_alone_leaves_tied_weights():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.middle = torch.nn.Embedding(16, 16), torch.nn.Linear(16, 16)
            self.head = torch.nn.Linear(16, 16, bias=False)
            self.head.weight = self.words.weight

    with Init(quant_config=QuantizationConfig(group_size=16)):
        model = Tied()
    init_lora(model)
    assert type(model.middle.weight) is QuantizedParameter and model.head.weight is model.words.weight
    assert model.head(torch.randn(2, 16)).shape == (2, 16)


def test_a_share_of_the_elements_rests_on_the_host():
    for ratio, expected in ((0.0, 4), (0.25, 1), (0.5, 2), (1.0, 4)):
        with Init(LoRAConfig(lora_r=2, offload=True, offload_ratio=ratio)):
            model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        assert sum(layer.on_host for layer in init_lora(model)) == expected


def test_weights_without_values_are_refused():
    with Init(LoRAConfig(lora_r=2)):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, device="meta"))
    refused(ValueError, r"^0: the weight \[4, 4\] is on the meta device", init_lora, model)


def test_weights_that_zero_init_has_sharded_are_taken():
    plain = torch.nn.Linear(16, 8)
    with deepspeed.zero.Init(), Init(LoRAConfig(lora_r=2), QuantizationConfig(q_bits=12, group_size=16)):
        model = torch.nn.Sequential(torch.nn.Linear(16, 8))
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model[0].weight.data.copy_(plain.weight.data)
    init_lora(model)
    assert (model[0].full_weight() - plain.weight).abs().max() < 0.01
    assert type(linear.Init) is type
