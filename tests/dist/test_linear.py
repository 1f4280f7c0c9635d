"""Linear layers of ``deepspeed.linear`` in engines against one plain process with the same frozen weights: stages, ranks,
sharing, small floats, dtypes, accumulation; their checkpoints and exports at other numbers of ranks."""

import functools
import itertools
import os

import pytest
import torch
import torch.utils.checkpoint

import deepspeed
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.convert.export import export
from deepspeed.formats.safetensors_file import read_safetensors
from deepspeed.linear import Init, LoRAConfig, LoRAOptimizedLinear, OptimizedLinear, QuantizationConfig, init_lora
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import safe_get_full_grad
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import on_ranks, run_ranks
from runs import NATIVE, engine_of, load_or_error, raised, settings, take_step, together
from sequence_models import of_cases, plain_sgd, sgd_engine

WIDTH, HIDDEN, STEPS, RATE = 12, 20, 4, 0.05
GAPS = {"fp32": 1e-5, "bf16": 0.05}


def quantization(bits):
    return None if bits is None else QuantizationConfig(q_bits=bits, group_size=16)


class Model(torch.nn.Module):
    """Two layers with LoRA, the first of which may be used twice, and one that is trained as a whole."""

    def __init__(self, sharding=1, bits=None, shared=False, offload=False, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        lora = LoRAConfig(lora_r=3, lora_alpha=6.0, base_weight_sharding=sharding, offload=offload)
        make = functools.partial(OptimizedLinear, lora_config=lora, quantization_config=quantization(bits), dtype=dtype)
        self.first, self.second = make(WIDTH, WIDTH), make(WIDTH, HIDDEN, bias=True)
        self.head = torch.nn.Linear(HIDDEN, 2).to(dtype)
        for layer in (self.first, self.second):  # zeros would leave the other matrix without gradients at first
            torch.nn.init.normal_(layer.lora_weight_2.weight, std=0.3)
        self.shared = shared

    def forward(self, x):
        x = x.to(self.head.weight.dtype)
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.first(x)) if self.shared else x
        return self.head(torch.tanh(self.second(x)))


class PlainLoRA(torch.nn.Module):
    """The function of a ``LoRAOptimizedLinear`` in torch's own layers."""

    def __init__(self, layer):
        super().__init__()
        self.weight = torch.nn.Parameter(layer.full_weight().clone(), requires_grad=False)
        self.bias = layer.bias
        self.lora_weight_1, self.lora_weight_2 = layer.lora_weight_1, layer.lora_weight_2
        self.scale = layer.lora_scaling_factor

    def forward(self, x):
        base = torch.nn.functional.linear(x, self.weight, self.bias)
        return base + self.lora_weight_2(self.lora_weight_1(x)) * self.scale


def plain_model(bits, shared, dtype=torch.float32):
    model = Model(1, bits, shared, dtype=dtype)
    model.first, model.second = PlainLoRA(model.first), PlainLoRA(model.second)
    return model


def batch_of(micro, rank):
    generator = torch.Generator().manual_seed(31 * micro + rank)
    return torch.randn(2, WIDTH, generator=generator)


def loss_of(model, x):
    return model(x).float().square().mean()


def trained(engine):
    """name -> whole value of what is trained."""
    params = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
    with deepspeed.zero.GatheredParameters(list(params.values())):
        return {name: param.detach().float().clone() for name, param in params.items()}


def engine_with(model, stage, dtype="fp32", accumulate=1, **more):
    adam = {"type": "Adam", "params": {"lr": RATE}}
    return engine_of(model, settings(stage, 2, accumulate, dtype=dtype, optimizer=adam, **more))


def gap_of(rank, world, stage, sharding, bits, shared, dtype, accumulate, offload):
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = Model(sharding, bits, shared, offload, torch_dtype)
    engine = sgd_engine(model, stage, RATE, accumulate, dtype=dtype, zero={"reduce_bucket_size": 300})
    losses = []
    for micro in range(STEPS * accumulate):
        losses.append(take_step(engine, loss_of(engine, batch_of(micro, rank))))
    ours = trained(engine)
    engine.destroy()

    def plain_loss(model, step, part):
        return loss_of(model, batch_of(step * accumulate + part // world, part % world))

    plain = plain_sgd(plain_model(bits, shared, torch_dtype), RATE, plain_loss, STEPS, accumulate * world)
    expected = sum(plain.losses, [])[rank::world]
    gaps = [float((ours[name] - plain.params[name].float()).abs().max()) for name in ours]
    return max([*gaps, *(abs(one - other) for one, other in zip(losses, expected))])


def cases(world):
    bits = itertools.cycle([None, 8, 4, 6, 12])
    others = itertools.cycle(itertools.product((False, True), (1, 2)))
    made = []
    for stage, sharding, dtype in itertools.product(range(4), (1, 2, 4), ("fp32", "bf16")):
        if world % sharding == 0:
            shared, accumulate = next(others)
            made.append((stage, sharding, next(bits), shared, dtype, accumulate, stage < 3 and accumulate == 2))
    return made


@pytest.mark.parametrize("world", [1, 2, 4])
def test_engines_equal_one_process_with_the_same_frozen_weights(world):
    chosen = cases(world)
    for gaps in run_ranks(world, of_cases, gap_of, chosen, init=True, timeout=300):
        for case, gap in zip(chosen, gaps):
            assert gap < GAPS[case[4]], (case, gap)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def held(engine):
    """Values of the whole model on this rank, the codes of frozen weights among them, as lists."""
    found = {name: value.tolist() for name, value in trained(engine).items()}
    for name, layer in engine.module.named_modules():
        if isinstance(layer, LoRAOptimizedLinear):
            with deepspeed.zero.GatheredParameters([layer.weight] if hasattr(layer.weight, "ds_handle") else []):
                found[f"{name}.weight"] = layer.full_weight().float().tolist()
    return found


def make(rank, stage, sharding, bits, checkpoint=None, dtype="fp32", seed=None):
    model = Model(sharding, bits, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    if seed is not None:  # another model, whose values a load replaces
        with torch.no_grad():
            for layer in (model.first, model.second):
                layer.melt()
                layer.weight.normal_()
                layer.freeze(quantization(bits), sharding)
    whole = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = engine_with(model, stage, dtype, checkpoint=checkpoint or {}, zero=whole)
    return engine, lambda: take_step(engine, loss_of(engine, batch_of(engine.global_steps, rank)))


def save(rank, world, stage, sharding, bits, folder, checkpoint=None, dtype="fp32"):
    engine, step = make(rank, stage, sharding, bits, checkpoint, dtype)
    step()
    engine.save_checkpoint(folder, tag="t")
    engine.save_16bit_model(folder, "model.bin")
    engine.save_16bit_model(folder, "model.safetensors")
    return held(engine)


def load(rank, world, stage, sharding, bits, folder, checkpoint=None, tag="t", dtype="fp32"):
    engine, step = make(rank, stage, sharding, bits, checkpoint, dtype, seed=1)
    engine.load_checkpoint(folder, tag=tag)
    found = held(engine)
    step()
    return found


LAYOUTS = [((2, 2), (2, 1)), ((2, 2), (4, 4)), ((4, 2), (2, 2)), ((4, 4), (1, 1)), ((2, 1), (4, 2))]


@pytest.mark.sample("values", 8)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("stages", [(0, 1), (1, 3), (2, 2), (3, 0), (3, 3)], ids=str)
@pytest.mark.parametrize("bits", [None, 8, 12])
@pytest.mark.parametrize("format", ["torch", "native"])
def test_frozen_weights_load_at_any_sharing_and_stage(layout, stages, bits, format, tmp_path):
    (world, sharding), (other_world, other_sharding) = layout
    checkpoint = NATIVE if format == "native" else None
    saved = run_ranks(world, save, stages[0], sharding, bits, str(tmp_path), checkpoint, init=True)
    loaded = run_ranks(other_world, load, stages[1], other_sharding, bits, str(tmp_path), checkpoint, init=True)
    assert all(found == saved[0] for found in [*saved, *loaded])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bits", [None, 6, 8])
def test_exports_have_whole_decoded_weights(stage, bits, tmp_path):
    expected = run_ranks(2, save, stage, 2, bits, str(tmp_path), init=True)[0]
    found = [get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "t")]
    (path,) = export(str(tmp_path), str(tmp_path / "out"), tag="t", safe_serialization=False)
    found.append(torch.load(path))
    found.append(torch.load(str(tmp_path / "model.bin")))
    found.append({name: one.read() for name, one in read_safetensors(str(tmp_path / "model.safetensors"))[0].items()})
    for one in found:
        for name, value in expected.items():
            assert one[name].tolist() == value, name


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_native_exports_have_whole_decoded_weights(stage, tmp_path):
    expected = run_ranks(2, save, stage, 2, 8, str(tmp_path), NATIVE, init=True)[0]
    (path,) = export(str(tmp_path), str(tmp_path / "out"), tag="t", safe_serialization=False)
    assert all(torch.load(path)[name].tolist() == value for name, value in expected.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_checkpoints_keep_frozen_weights(stage, tmp_path):
    saved = run_ranks(2, save, stage, 2, 8, str(tmp_path), init=True)
    convert = ["--input_folder", str(tmp_path / "t"), "--output_folder", str(tmp_path / "u")]
    ds_to_universal.main(ds_to_universal.parse_arguments(convert))
    loaded = run_ranks(4, load, 1, 4, 8, str(tmp_path), {"load_universal": True}, "u", init=True)
    assert all(found == saved[0] for found in loaded)


# ---- what ranks do with them ---------------------------------------------------------------------------------------


@on_ranks(2, init=True)
def test_initialize_leaves_shared_rows_as_they_are(rank, world):
    model = torch.nn.Sequential(
        *(OptimizedLinear(16, 16, lora_config=LoRAConfig(lora_r=2, base_weight_sharding=2)) for _ in range(2))
    )
    before = [layer.weight.float().norm().item() for layer in model]
    engine = engine_with(model, 1, "bf16")
    assert [layer.weight.float().norm().item() for layer in engine.module] == before
    assert together(before)[0] != together(before)[1]


@on_ranks(4, init=True)
def test_each_rank_has_its_share(rank, world):
    for sharding, bits in ((1, None), (2, None), (4, 8), (2, 6)):
        torch.manual_seed(0)
        layer = OptimizedLinear(
            48, 32, lora_config=LoRAConfig(lora_r=2, base_weight_sharding=sharding),
            quantization_config=quantization(bits), dtype=torch.float32,
        )  # fmt: skip
        sizes = together(layer.weight.numel())
        assert (
            sum(sizes[:sharding]) == (96 * 16 if bits is None else 96 * (16 * bits // 8 + 4)) and len(set(sizes)) == 1
        )
        whole = together(layer.full_weight().tolist())
        assert all(one == whole[0] for one in whole)
        layer.disable()
        assert layer.weight.tolist() == whole[0]


def impossible(rank, world):
    make = functools.partial(OptimizedLinear, 8, 2, dtype=torch.float32)
    found = [raised(make, lora_config=LoRAConfig(base_weight_sharding=3))]
    found.append(raised(make, lora_config=LoRAConfig(base_weight_sharding=4), quantization_config=quantization(8)))
    return found


def test_sharing_that_cannot_be_is_refused():
    for found in run_ranks(4, impossible, init=True):
        assert found[0] == ("ValueError", "base_weight_sharding is 3, which does not divide the 4 ranks of the job")
        assert found[1][0] == "ValueError" and "the weight has 1 rows" in found[1][1]


def stage_of_two(rank, world, sharding):
    torch.manual_seed(0)
    lora = LoRAConfig(lora_r=2, base_weight_sharding=sharding)
    layers = [LayerSpec(OptimizedLinear, 8, 8, lora_config=lora, dtype=torch.float32) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=lambda out, label: out.square().mean())
    config = settings(1, 2, 2, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    error = raised(deepspeed.initialize, model=model, config=config)
    if error is not None:
        return error
    engine = deepspeed.initialize(model=model, config=config)[0]
    return engine.train_batch(iter([(torch.ones(2, 8), torch.ones(2, 8))] * 2)).item()


def test_stages_of_a_pipeline_share_weights_among_their_own_ranks():
    losses = run_ranks(4, stage_of_two, 2, init=True)
    assert losses == run_ranks(4, stage_of_two, 1, init=True) and len(set(losses)) == 1
    for kind, text in run_ranks(4, stage_of_two, 4, init=True):
        assert kind == "ValueError" and "base_weight_sharding=4" in text and "on ranks [" in text


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, init=True)
def test_zero_init_and_checkpointed_activations(rank, world, stage):
    """Models that zero.Init has sharded; weights are gathered again where a segment runs again."""
    settings_of_init = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    lora = LoRAConfig(lora_r=2, base_weight_sharding=2)
    torch.manual_seed(4)
    plain = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    sharded = deepspeed.zero.Init(config_dict_or_path=settings_of_init, enabled=stage == 3)
    with sharded, Init(lora, quantization(8)):
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    for layer, source in zip(model, plain):
        with deepspeed.zero.GatheredParameters(list(layer.parameters()), modifier_rank=0):
            layer.weight.data.copy_(source.weight.data)
            layer.bias.data.copy_(source.bias.data)
    init_lora(model)
    engine, seen = engine_with(model, stage), []
    for again in (False, True):
        x = batch_of(0, rank).requires_grad_()
        for layer in engine.module:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        engine.backward(x.square().mean())
        seen.append([safe_get_full_grad(param).tolist() for param in engine.module.parameters() if param.requires_grad])
        engine.zero_grad()
        engine.optimizer.zero_grad()
    expected = plain[1](plain[0](batch_of(0, rank)))
    assert (x - expected).abs().max() < 0.1
    assert seen[0] == seen[1]


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2, init=True)
def test_saves_without_frozen_parameters(rank, world, stage, folder):
    engine, step = make(rank, stage, 2, 8)
    step()
    engine.save_checkpoint(folder, tag="t", exclude_frozen_parameters=True)
    assert not any("frozen" in name for name in os.listdir(os.path.join(folder, "t")))
    wanted = held(engine)
    other, _ = make(rank, stage, 2, 8)
    other.load_checkpoint(folder, tag="t", load_module_strict=False)
    assert held(other) == wanted


def load_otherwise(rank, world, folder):
    return load_or_error(make(rank, 1, 2, 4)[0], folder)


def test_other_codes_are_refused(tmp_path):
    run_ranks(2, save, 1, 2, 8, str(tmp_path), init=True)
    for text in run_ranks(2, load_otherwise, str(tmp_path), init=True):
        assert "RuntimeError" in text and "'first.weight' was saved with shape (9, 20), the model has (9, 12)" in text
