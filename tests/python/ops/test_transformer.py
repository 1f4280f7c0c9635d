"""Operations of transformer layers against formulas in float64, and layers against those of torch and transformers."""

import copy
import random

import pytest
import torch
import torch.utils.checkpoint

import deepspeed
from deepspeed._compat import memory_of, storage_of
from deepspeed.ops.sparse_attention import FixedSparsityConfig
from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer, functions
from deepspeed.profiling.op_costs import cost_of
from refusals import refusing

FLAGS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- operations ------------------------------------------------------------------------------------------------------
class Case:
    """A random call: leaves in float64, and ``call(leaves)``."""

    def __init__(self, seed):
        pick = random.Random(seed)
        self.op = pick.choice(["norm", "dropout_add", "dropout_add_norm", "activation", "rotary"])
        lead = pick.choice([(3,), (2, 5), (1, 1, 4)])
        size = pick.choice([4, 6, 17, 64, 130])
        drop = functions.Dropout(0.3, seed) if pick.random() < 0.5 else None
        centered, keep = pick.random() < 0.5, pick.random() < 0.3
        maybe = [pick.random() < 0.6 for _ in range(4)]
        rows, vector = normal(*lead, size, seed=seed), [normal(size, seed=seed + n) for n in range(1, 4)]
        vector[1] = vector[1].sign() * (vector[1].abs() + 0.3)  # of a norm that may be inverted
        residual = normal(*lead, size, seed=seed + 9)
        bias, weight, shift = (one if given else None for one, given in zip(vector, maybe))
        if self.op == "norm":
            self.given = [rows, weight, shift]
            self.call = lambda x, w, b: functions.norm(x, w, b, 1e-5, centered, keep)
        elif self.op == "dropout_add":
            self.given = [rows, bias, residual if maybe[3] else None]
            self.call = lambda x, b, r: functions.dropout_add(x, b, r, drop)
        elif self.op == "dropout_add_norm":
            self.given = [rows, bias, residual, weight, shift]
            self.call = lambda *given: torch.cat(functions.dropout_add_norm(*given, drop, 1e-5, centered, keep))
        elif self.op == "activation":
            kind, gated = pick.choice(functions.ACTIVATIONS), size % 2 == 0 and pick.random() < 0.5
            self.given = [rows, bias]
            self.call = lambda x, b: functions.activation(x, b, kind, gated)
        else:
            heads = normal(*lead, 3, size // 2 * 2, seed=seed)
            places = torch.randint(5000, lead[-1:] if maybe[0] else lead)
            turned, interleaved = pick.choice([None, 2]), maybe[1]
            self.given = [heads]
            self.call = lambda x: functions.rotary(x, places, turned, interleaved=interleaved)

    def run(self, dtype):
        leaves = [None if one is None else one.to(dtype).requires_grad_() for one in self.given]
        out = self.call(*leaves)
        wanted = [one for one in leaves if one is not None]
        return [out.detach(), *torch.autograd.grad(out, wanted, normal(*out.shape, seed=5).to(dtype))]


def errors_of(found, expected):
    return sum(
        float((one.double() - other).abs().max() / other.abs().max().clamp(min=1e-3))
        for one, other in zip(found, expected)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_operations_equal_formulas(dtype, monkeypatch):
    gaps = {"kernel": {}, "formula": {}}
    for seed in range(150):
        case = Case(seed)
        with monkeypatch.context() as patch:
            patch.setattr(functions, "by_kernel", lambda x: False)
            expected = case.run(torch.float64)
            formula = case.run(dtype)
        found = case.run(dtype)
        if dtype in (torch.float32, torch.float64):
            for one, other in zip(found, expected):
                torch.testing.assert_close(
                    one.double(), other, rtol=2e-5, atol=2e-5, msg=f"{seed} {case.op}"
                )
        for name, results in (("kernel", found), ("formula", formula)):
            gaps[name].setdefault(case.op, []).append(errors_of(results, expected))
    assert set(gaps["kernel"]) == {"norm", "dropout_add", "dropout_add_norm", "activation", "rotary"}
    if dtype in (torch.bfloat16, torch.float16):
        for op, errors in gaps["kernel"].items():
            assert sum(errors) <= 2 * sum(gaps["formula"][op]), (op, errors)


def test_dropout_keeps_its_share_and_its_bits_everywhere():
    x, drop = torch.ones(100, 1001), functions.Dropout(0.2, 7)
    kept = functions.dropout_add(x, dropout=drop)
    assert torch.equal(kept, drop.factors(x))
    assert abs(float((kept != 0).float().mean()) - 0.8) < 4 * (0.16 / x.numel()) ** 0.5
    assert torch.equal(functions.dropout_add(x[:7], dropout=drop), kept[:7])
    assert functions.Dropout.drawn(0.0) is None
    torch.manual_seed(3)
    seeds = {functions.Dropout.drawn(0.5).seed for _ in range(4)}
    torch.manual_seed(3)
    assert functions.Dropout.drawn(0.5).seed in seeds and len(seeds) == 4


def test_operations_run_on_meta_and_are_counted():
    x = torch.empty(2, 3, 8, device="meta", requires_grad=True)
    weight = torch.empty(8, device="meta", requires_grad=True)
    total, y = functions.dropout_add_norm(x, weight, x, weight, weight, functions.Dropout(0.1, 1))
    out = functions.activation(functions.norm(y + total, weight), weight, "silu", gated=True)
    assert out.shape == (2, 3, 4)
    out.sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
    for name in ("norm", "norm_backward", "activation", "bias_dropout_residual", "rotary"):
        more = (None, x) if name == "bias_dropout_residual" else ()
        assert cost_of(f"deepspeed::{name}", (x, *more), {}, x)[1] >= x.numel()


def test_operands_that_do_not_fit_are_named():
    x = torch.zeros(2, 8)
    with refusing(ValueError, "weight has the shape (7,)", "(8,)"):
        functions.norm(x, torch.ones(7))
    with refusing(ValueError, "'swish' is not one of gelu_tanh, gelu, relu, silu"):
        functions.activation(x, kind="swish")
    with refusing(ValueError, "7 elements have no half"):
        functions.activation(torch.zeros(2, 7), gated=True)
    with refusing(ValueError, "rotated is 3"):
        functions.rotary(torch.zeros(2, 1, 8), torch.arange(2), 3)
    with refusing(ValueError, "positions have the shape (3,)"):
        functions.rotary(torch.zeros(2, 1, 8), torch.arange(3))
    with refusing(ValueError, "dropout is 1"):
        functions.Dropout(1, 0)


# ---- layers ----------------------------------------------------------------------------------------------------------
def torchs(norm_first=False, activation="gelu", dropout=0.0, hidden=32, seed=0, **more):
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(
        hidden, 4, 4 * hidden, dropout, activation, batch_first=True, norm_first=norm_first, **more
    )
    for param in layer.parameters():
        torch.nn.init.normal_(param, 1.0 if param.dim() == 1 else 0.0, 0.2)
    return layer


def grads_of(layer, x, **more):
    for param in layer.parameters():
        param.grad = None
    x = x.clone().requires_grad_()
    out = layer(x, **more)
    out.backward(normal(*out.shape, seed=8).to(out.dtype))
    return out.detach(), x.grad


def config_of(**more):
    return DeepSpeedTransformerConfig(
        **{"hidden_size": 32, "heads": 4, "num_hidden_layers": 2, "initializer_range": 0.2, "seed": 3, **more}
    )


@pytest.mark.parametrize("flags", [(), *((flag,) for flag in FLAGS), FLAGS])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_layer_equals_torchs(norm_first, activation, flags):
    reference = torchs(norm_first, activation).double()
    config = DeepSpeedTransformerConfig(pre_layer_norm=norm_first, **dict.fromkeys(flags, True))
    layer = DeepSpeedTransformerLayer.from_layer(reference.float(), config)
    reference.double()
    x, hidden = normal(3, 13, 32, seed=1), torch.zeros(3, 13, dtype=torch.bool)
    hidden[0, 9:] = hidden[2, 3:] = True
    expected, dx = grads_of(reference, x, src_key_padding_mask=hidden)
    expected_grads = copy.deepcopy(reference)
    with torch.no_grad():
        for param in expected_grads.parameters():
            param.copy_(dict(zip(expected_grads.parameters(), reference.parameters()))[param].grad)
    wanted = DeepSpeedTransformerLayer.from_layer(expected_grads, config)
    masks = [
        {"attention_mask": ~hidden},
        {"attention_mask": (~hidden).long()[:, None, None, :]},
        {"src_key_padding_mask": hidden},
    ]
    masks.append({"attention_mask": hidden[:, None, None, :] * -1e30})
    masks.append({"attention_mask": (~hidden)[:, None, None, :].expand(3, 4, 13, 13)})
    for mask in masks:
        found, grad = grads_of(layer, x.float(), **mask)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad.double(), dx, rtol=2e-5, atol=2e-5)
        for name, param in layer.named_parameters():
            other = getattr(wanted, name).detach()
            torch.testing.assert_close(param.grad.double(), other, rtol=2e-5, atol=5e-5, msg=name)


def test_layers_of_fp16_on_the_cpu():
    for norm_first in (False, True):
        exact = torchs(norm_first)
        layer = DeepSpeedTransformerLayer.from_layer(exact).half()
        x = normal(2, 40, 32, seed=2).half()
        found, expected = grads_of(layer, x), grads_of(exact, x.float())
        for one, other in zip(found, expected):
            assert one.dtype == torch.float16
            torch.testing.assert_close(one.float(), other, rtol=0.02, atol=0.02)


def test_16_bits_have_at_most_twice_the_error_of_torchs():
    for dtype in (torch.bfloat16,):
        for norm_first in (False, True):
            exact = torchs(norm_first).double()
            rounded = torchs(norm_first).to(dtype)
            layer = DeepSpeedTransformerLayer.from_layer(rounded)
            x = normal(2, 40, 32, seed=2)
            expected, dx = grads_of(exact, x)
            theirs, ours = grads_of(rounded, x.to(dtype)), grads_of(layer, x.to(dtype))
            for one, other, true in zip(ours, theirs, (expected, dx)):
                assert (one - true).norm() <= 2 * (other - true).norm()


@pytest.mark.parametrize("flags", [(), FLAGS])
@pytest.mark.parametrize("pre", [False, True])
def test_dropout_is_the_same_when_a_forward_is_repeated(pre, flags):
    drops = {"attn_dropout_ratio": 0.2, "hidden_dropout_ratio": 0.3, "pre_layer_norm": pre}
    layer = DeepSpeedTransformerLayer(config_of(**drops, **dict.fromkeys(flags, True)))
    x = torch.randn(2, 9, 32)
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(5)
        call = layer
        if checkpointed:

            def call(x):
                return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

        results.append([*grads_of_call(layer, call, x)])
    for one, other in zip(*results):
        assert torch.equal(one, other)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def grads_of_call(layer, call, x):
    for param in layer.parameters():
        param.grad = None
    x = x.clone().requires_grad_()
    out = call(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(param.grad for param in layer.parameters())]


def test_flags_give_the_gradients_of_a_layer_without_them():
    results = []
    for flags in ((), *((flag,) for flag in FLAGS), FLAGS):
        config = config_of(attn_dropout_ratio=0.2, hidden_dropout_ratio=0.3, **dict.fromkeys(flags, True))
        layer = DeepSpeedTransformerLayer(config)
        torch.manual_seed(5)
        results.append(grads_of_call(layer, layer, torch.ones(2, 9, 32) + torch.arange(32) / 9))
    for other in results[1:]:
        for one, two in zip(results[0], other):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_a_norm_with_a_weight_near_zero_keeps_its_input():
    layer = DeepSpeedTransformerLayer(config_of(normalize_invertible=True))
    plain = copy.deepcopy(layer)
    plain.config.normalize_invertible = False
    with torch.no_grad():
        for one in (layer, plain):
            one.norm_w[3] = 0.0
            one.attn_nw[5] = 1e-4
    x = torch.randn(2, 5, 32)
    for one, other in zip(grads_of_call(layer, layer, x), grads_of_call(plain, plain, x)):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def saved_by(layer, x):
    """Bytes of the storages that autograd keeps of a call, beside those of parameters."""
    kept, apart = {}, {memory_of(param) for param in layer.parameters()}

    def pack(tensor):
        if memory_of(tensor) not in apart:
            kept[memory_of(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x + 0)
    assert out is not None
    return sum(storage_of(one).nbytes() for one in kept.values())


def test_saved_bytes_fall_with_each_flag_and_are_what_is_kept():
    made = {}
    for flags in ((), *((flag,) for flag in FLAGS), FLAGS):
        config = config_of(
            hidden_size=64, heads=4, attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1, **dict.fromkeys(flags, True)
        )
        layer = DeepSpeedTransformerLayer(config)
        made[flags] = layer.saved_bytes(2, 64)
        x = torch.randn(2, 64, 64, requires_grad=True)
        kept = saved_by(layer, x)
        assert made[flags] <= kept <= made[flags] + x.numel() * 4  # and the input
        assert layer.saved_bytes(2, 64, torch.bfloat16) < 0.6 * made[flags]
    assert all(made[()] > made[flag,] > made[FLAGS] for flag in FLAGS)


def test_saved_bytes_against_torchs_layer():
    """Targets: 1/1.7 of what torch's layer keeps without dropout, 1/3 at 512 tokens with it."""
    for dropout, tokens, share in ((0.0, 128, 1.7), (0.1, 512, 3.0)):
        reference = torchs(True, dropout=dropout, hidden=256)
        config = DeepSpeedTransformerConfig(
            attn_dropout_ratio=dropout, hidden_dropout_ratio=dropout, **dict.fromkeys(FLAGS, True)
        )
        layer = DeepSpeedTransformerLayer.from_layer(reference, config)
        x = torch.randn(2, tokens, 256, requires_grad=True)
        assert saved_by(reference, x) > share * layer.saved_bytes(2, tokens)


# ---- modules ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pre", [False, True])
def test_an_empty_batch(pre):
    layer = DeepSpeedTransformerLayer(config_of(pre_layer_norm=pre, hidden_dropout_ratio=0.1))
    out = layer(torch.zeros(0, 5, 32))
    assert out.shape == (0, 5, 32)
    out.sum().backward()
    assert all(not param.grad.any() for param in layer.parameters())


def test_initial_values_depend_on_the_seed_and_the_number_of_the_layer():
    config = config_of()
    first, second = DeepSpeedTransformerLayer(config), DeepSpeedTransformerLayer(config)
    torch.rand(3)
    again = DeepSpeedTransformerLayer(config_of())
    assert not torch.equal(first.inter_w, second.inter_w)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), again.parameters()))
    assert abs(float(first.inter_w.detach().std()) - 0.2) < 0.01
    assert abs(float(first.output_w.detach().std()) - 0.2 / 4**0.5) < 0.01
    whole = DeepSpeedTransformerLayer(config_of(adjust_init_range=False))
    assert abs(float(whole.output_w.detach().std()) - 0.2) < 0.01
    assert second.config.layer_id == first.config.layer_id + 1
    torch.manual_seed(1)
    one = DeepSpeedTransformerLayer(config_of(seed=-1))
    torch.manual_seed(1)
    assert torch.equal(one.attn_ow, DeepSpeedTransformerLayer(config_of(seed=-1)).attn_ow)


def test_a_deep_copy_is_a_layer_of_its_own():
    layer = DeepSpeedTransformerLayer(config_of())
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.inter_w.zero_()
    other.config.return_tuple = True
    x = torch.randn(1, 3, 32)
    assert isinstance(layer(x), torch.Tensor) and isinstance(other(x), tuple)
    assert not torch.equal(layer(x), other(x)[0])


def test_initial_weights_are_those_of_the_tutorial():
    reference = torchs(True)
    attention = reference.self_attn
    weights = [*attention.in_proj_weight.chunk(3), attention.out_proj.weight, reference.norm2.weight]
    weights += [reference.linear1.weight, reference.linear2.weight, reference.norm1.weight]
    biases = [*attention.in_proj_bias.chunk(3), attention.out_proj.bias, reference.norm2.bias]
    biases += [reference.linear1.bias, reference.linear2.bias, reference.norm1.bias]
    config = config_of(layer_norm_eps=1e-5)
    config.activation = "gelu"
    layer, grads = DeepSpeedTransformerLayer(config, weights, biases), []
    x = torch.randn(2, 6, 32)
    torch.testing.assert_close(layer(x), reference(x), rtol=1e-5, atol=1e-5)
    layer(x, grads=grads).sum().backward()
    assert {name for _, name in grads} >= {"V_W", "O_W", "int_B", "norm_W"} and len(grads) == 12
    with refusing(ValueError, "7 and 8 tensors"):
        DeepSpeedTransformerLayer(config, weights[:7], biases)
    with refusing(ValueError, "initial value of attn_ow", "(3, 3)", "(32, 32)"):
        DeepSpeedTransformerLayer(config, [*weights[:3], torch.ones(3, 3), *weights[4:]], biases)


def test_layers_are_converted_back():
    for norm_first in (False, True):
        reference = torchs(norm_first, "relu")
        layer = DeepSpeedTransformerLayer.from_layer(reference)
        again = layer.to_layer(torchs(norm_first, "relu", seed=4))
        for one, other in zip(reference.parameters(), again.parameters()):
            assert torch.equal(one, other)
    with refusing(ValueError, "pre_layer_norm of the configuration is True", "False"):
        layer.to_layer(torchs(False, "relu"))
    with refusing(ValueError, "hidden_size of the configuration is 64", "32"):
        DeepSpeedTransformerLayer.from_layer(reference, config_of(hidden_size=64))
    with refusing(TypeError, "Linear is neither a layer of transformers' BERT"):
        DeepSpeedTransformerLayer.from_layer(torch.nn.Linear(2, 2))
    with refusing(ValueError, "batch_first=True"):
        DeepSpeedTransformerLayer.from_layer(torch.nn.TransformerEncoderLayer(8, 2))


def test_layers_stand_in_torchs_encoder():
    encoder = torch.nn.TransformerEncoder(torchs(), 2, enable_nested_tensor=False).eval()
    x, hidden = torch.randn(2, 6, 32), torch.arange(6).expand(2, 6) > 3
    expected = encoder(x, src_key_padding_mask=hidden)
    for at, layer in enumerate(encoder.layers):
        encoder.layers[at] = DeepSpeedTransformerLayer.from_layer(layer)
    torch.testing.assert_close(encoder(x, src_key_padding_mask=hidden)[:, :4], expected[:, :4], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_a_model_of_transformers_answers_as_before(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=40,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    tokens, mask = torch.randint(3, 50, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    expected = model(tokens, attention_mask=mask).logits
    layers = getattr(model, kind.lower()).encoder.layer
    kept = copy.deepcopy(layers[0])
    for at in range(len(layers)):
        layers[at] = DeepSpeedTransformerLayer.from_layer(layers[at], DeepSpeedTransformerConfig(gelu_checkpoint=True))
    found = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1, :7], expected[1, :7], rtol=1e-5, atol=1e-5)
    model.train()(tokens, attention_mask=mask, labels=tokens).loss.backward()
    assert all(param.grad is not None for param in layers.parameters())
    back = layers[0].to_layer(copy.deepcopy(kept))
    assert all(torch.equal(one, other) for one, other in zip(back.parameters(), kept.parameters()))


def test_attention_over_blocks_alone():
    sparse = FixedSparsityConfig(num_heads=4, block=4, num_local_blocks=2)
    layer = DeepSpeedTransformerLayer(config_of(), sparsity_config=sparse)
    seen = sparse.make_layout(16).bool().repeat_interleave(4, 1).repeat_interleave(4, 2).unsqueeze(0)
    dense = copy.deepcopy(layer)
    dense.sparsity_config = None
    x = torch.randn(2, 16, 32)
    torch.testing.assert_close(layer(x), dense(x, attention_mask=seen), rtol=1e-5, atol=1e-5)
    with refusing(ValueError, "sparsity_config has 8 heads", "4"):
        DeepSpeedTransformerLayer(config_of(), sparsity_config=FixedSparsityConfig(num_heads=8))
    with refusing(ValueError, "15"):
        layer(x[:, :15])


def test_configurations():
    config = DeepSpeedTransformerConfig.from_dict({"hidden_size": 8, "heads": 2, "batch_size": 3, "max_seq_length": 5})
    assert config.intermediate_size == 32 and DeepSpeedTransformerConfig(hidden_size=8).intermediate_size == 32
    layer = deepspeed.DeepSpeedTransformerLayer(config)
    with refusing(ValueError, "a batch of 4", "batch_size, 3"):
        layer(torch.zeros(4, 5, 8))
    with refusing(ValueError, "6 tokens", "max_seq_length, 5"):
        layer(torch.zeros(1, 6, 8))
    with refusing(ValueError, "(1, 5, 9)", "[batch, tokens, 8]"):
        layer(torch.zeros(1, 5, 9))
    x = torch.zeros(1, 5, 8)
    for name in ("head_mask", "encoder_hidden_states", "past_key_value", "cache"):
        with refusing(ValueError, f"{name} is given", "has none of it"):
            layer(x, **{name: x})
    with refusing(ValueError, "ropes is given", "does not know it"):
        layer(x, ropes=x)
    with refusing(ValueError, "is_causal"):
        layer(x, is_causal=True)
    with refusing(ValueError, "output_attentions"):
        layer(x, output_attentions=True)
    with refusing(ValueError, "attention_mask has the shape (1, 4)", "[1, 5]"):
        layer(x, torch.ones(1, 4))
    with refusing(ValueError, "hidden_size 9 is not a multiple of the 2 heads"):
        DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(hidden_size=9, heads=2))
    with refusing(ValueError, "heads is -1"):
        DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(hidden_size=8))
    with refusing(ValueError, "attn_dropout_ratio is 1.5"):
        DeepSpeedTransformerLayer(config_of(attn_dropout_ratio=1.5))


def test_a_configuration_of_a_file(tmp_path, caplog):
    path = tmp_path / "bert.json"
    path.write_text('{"hidden_size": 8, "heads": 2, "vocab_size": 30522}')
    config = DeepSpeedTransformerConfig.from_json_file(path)
    assert config.hidden_size == 8 and config.vocab_size == 30522


def test_a_layer_runs_under_autocast():
    layer = DeepSpeedTransformerLayer(config_of())
    x = torch.randn(2, 6, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, layer(x), rtol=0.05, atol=0.1)
    out.sum().backward()
    assert layer.inter_w.grad.dtype == torch.float32


def test_the_builders_load_it():
    from deepspeed.ops.op_builder import StochasticTransformerBuilder, TransformerBuilder

    for builder in (TransformerBuilder(), StochasticTransformerBuilder()):
        assert builder.is_compatible()
        assert builder.load().DeepSpeedTransformerLayer is DeepSpeedTransformerLayer
