"""Domino: Megatron's transformer cut over ranks, whose sums run while the other half of the batch is computed."""

import contextlib
import re
import types

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.domino.transformer import AttnMaskType, DominoTransformer, LayerType, ModelType
from deepspeed.utils.param_cut import cut_of
from deepspeed.utils.random_state import get_cuda_rng_tracker
from domino_models import TOKENS, Case, config_of, plain, whole_of
from harness import on_ranks, run_ranks
from mpu import Mpu, two_by_two
from plan_calls import calls_of, calls_while, planned_calls
from refusals import refused
from runs import engine_of, moments, settings, take_step, together
from sampling import every_case
from zero_models import relative

KINDS = ("inter_layer_overlap_forward", "intra_layer_overlap_forward")


def mpu_of_all():
    """The mpu where all ranks share one model."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return Mpu(groups[dist.get_rank()], dist.get_world_group())


def trained(forward, model, case, x):
    """``(result, gradient of the input, whole gradients of the parameters)``."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    made = forward(x, case.mask, case.angles)
    made.backward(case.grad)
    return made.detach(), x.grad, whole_of(model, lambda param: param.grad)


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks(init=True)
def test_random_models_equal_one_plain_process(rank, world):
    mpu = mpu_of_all()
    for seed in range(60 if every_case() else 8):
        case = Case(100 * world + seed, world)
        model = case.model(mpu)
        whole, alone = whole_of(model), whole_of(case.model(None))
        assert all(torch.equal(value, alone[name]) for name, value in whole.items()), "weights depend on the ranks"
        whole = {name: value.double().requires_grad_() for name, value in whole.items()}
        x = case.x.double().requires_grad_()
        case.angles = None if case.angles is None else case.angles.double()
        expected = plain(case, whole, x)
        expected.backward(case.grad.double())
        case.angles = None if case.angles is None else case.angles.float()
        for kind in KINDS:
            made, x_grad, grads = trained(getattr(model, kind), model, case, case.x)
            where = f"seed {seed}, {kind}, {vars(case.config)}"
            assert relative(made, expected.detach()) < 1e-5, where
            assert relative(x_grad, x.grad) < 1e-5, where
            for name, grad in grads.items():
                assert relative(grad, whole[name].grad) < 2e-5, f"{name}, {where}"


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(init=True)
def test_halves_equal_samples_that_are_not_divided(rank, world):
    for seed in range(4):
        case = Case(seed, world)
        model = case.model(mpu_of_all())
        for kind in KINDS:
            forward = getattr(model, kind)
            made, x_grad, grads = trained(forward, model, case, case.x)
            one, total = types.SimpleNamespace(angles=case.angles), None
            for sample in range(case.samples):
                one.mask = case.mask if case.masked in (None, 1) else case.mask[sample : sample + 1]
                own = slice(sample, sample + 1)
                one.grad = case.grad[:, own]
                alone, alone_x, found = trained(forward, model, one, case.x[:, own])
                assert relative(made[:, own], alone) < 1e-6 and relative(x_grad[:, own], alone_x) < 1e-6
                total = found if total is None else {name: total[name] + one for name, one in found.items()}
            for name, grad in grads.items():
                assert relative(grad, total[name]) < 2e-6, name


@on_ranks(2, init=True)
def test_16_bits_are_as_exact_as_one_process(rank, world):
    for seed in range(3):
        case = Case(seed, world, params_dtype=torch.bfloat16, fp32_residual_connection=seed == 0)
        case.grad = case.grad.bfloat16() if case.post_layer_norm or seed else case.grad
        case.x = case.x if seed == 0 else case.x.bfloat16()
        several, alone, gaps = case.model(mpu_of_all()), case.model(None), []
        exact = plain(case, {name: value.double() for name, value in whole_of(several).items()}, case.x.double())
        gaps = [relative(trained(one, one, case, case.x)[0], exact) for one in (several, alone)]
        assert gaps[0] < max(2 * gaps[1], 1e-3) and gaps[1] < 0.1, (seed, gaps)


@on_ranks(2, init=True)
def test_a_transformer_that_is_computed_again_in_backward(rank, world):
    mpu, case = mpu_of_all(), Case(3, 2)
    model = case.model(mpu)
    case.config.hidden_dropout = 0.0
    deepspeed.checkpointing.configure(mpu)
    again = lambda x, *more: deepspeed.checkpointing.checkpoint(model, x, *more)
    for one, other in zip(trained(again, model, case, case.x), trained(model, model, case, case.x)):
        if torch.is_tensor(one):
            assert torch.equal(one, other)
        else:
            assert all(torch.equal(one[name], other[name]) for name in one)
    expected = trained(model, model, case, case.x)[0]
    with torch.no_grad():
        assert torch.equal(model(case.x, case.mask, case.angles), expected)


def test_attention_that_only_hides_later_tokens_is_torchs_own(monkeypatch):
    functional, calls = torch.nn.functional, []

    def by_hand(query, key, value, dropout_p, is_causal):
        assert is_causal and dropout_p == 0
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:]).triu(1).bool()
        return scores.masked_fill(later, float("-inf")).softmax(-1) @ value

    here = hasattr(torch.nn.functional, "scaled_dot_product_attention")  # torch 2
    own = functional.scaled_dot_product_attention if here else by_hand
    counted = lambda *given, **more: [calls.append(1), own(*given, **more)][1]
    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted, raising=False)
    model, x = make(config=config_of(num_query_groups=3)), torch.randn(TOKENS, 3, 20)
    made, mask = model(x, None), torch.zeros(1, 1, TOKENS, TOKENS).bool()
    assert len(calls) == 4
    assert relative(model(x, mask), made.detach()) < 1e-6 and len(calls) == 4


def test_stages_of_a_pipeline_are_runs_of_layers():
    case = Case(0, num_layers=4, fp32_residual_connection=False)
    case.post_layer_norm = case.rotary = True
    case.angles = torch.randn(TOKENS, 1, 1, 4)
    calls = []

    def turn(t, freqs, config):
        calls.append(config)
        return t * freqs

    def made(stage, stages, **more):
        torch.manual_seed(5)
        mpu = pipeline_of(stage, stages)
        return DominoTransformer(case.config, mpu, turn, ModelType.encoder_or_decoder, **more)

    whole = made(0, 1, drop_path_rate=0.3).eval()
    first = made(0, 2, drop_path_rate=0.3, post_process=False).eval()
    last = made(1, 2, drop_path_rate=0.3, pre_process=False).eval()
    assert not hasattr(first, "final_layernorm") and hasattr(last, "final_layernorm")
    assert [one.layer_number for one in last.layers] == [3, 4] and last.layers[1].drop_path_rate == pytest.approx(0.3)
    state = whole.state_dict_for_save_checkpoint(prefix="encoder.")
    for stage, first_layer in ((first, 0), (last, 2)):
        own = {}
        for name in stage.state_dict():
            number = re.search(r"layers\.(\d)", name)
            own[name] = state[
                "encoder." + (name if number is None else name.replace(number[1], str(int(number[1]) + first_layer), 1))
            ]
        stage.load_state_dict(own)
    last.set_input_tensor(first(case.x, None, case.angles))
    assert torch.equal(last(None, None, (case.angles, case.angles)), whole(case.x, None, case.angles))
    assert calls and all(one is case.config for one in calls)


def pipeline_of(stage, stages):
    return ranks_of(
        1, get_pipeline_model_parallel_world_size=lambda: stages, get_pipeline_model_parallel_rank=lambda: stage
    )


class Recorder:
    """Stands before an exchange and writes down when sums begin and end; ``half``: whose turn it is."""

    def __init__(self, exchange, model):
        self.exchange, self.place_now, self.events, self.name = exchange, exchange.place_now, [], None
        for number, layer in enumerate(model.layers):
            for kind, module in (("attention", layer.self_attention), ("unit", layer.mlp)):
                module.register_forward_pre_hook(lambda _, given, name=f"{kind} {number}": self.compute(name))
        self.turns, self.places = {}, []

    def compute(self, name):
        self.name = f"{name} of half {self.turns.setdefault(name, 0)}"
        self.turns[name] += 1
        self.events.append(f"compute {self.name}")

    def copy_in_beside(self, tensor, place):
        made = self.exchange.copy_in_beside(tensor, place)
        self.places.append(place)
        names = self.names = []
        tensor.register_hook(lambda grad: self.events.append(f"end {names[0]}"))
        made.register_hook(lambda grad: self.events.append(f"begin {names[0]}"))
        return made

    def start_sum(self, part):
        name = self.name
        self.names.append(name)
        part.register_hook(lambda grad: self.events.append(f"compute {name}"))
        self.events.append(f"begin {name}")
        pending = self.exchange.start_sum(part)
        return types.SimpleNamespace(wait=lambda: [self.events.append(f"end {name}"), pending.wait()][1])


def behind(events):
    """name of a sum -> what is computed between its begin and its end."""
    found = {}
    for at, event in enumerate(events):
        kind, name = event.split(" ", 1)
        if kind == "begin":
            until = events.index(f"end {name}")
            found[name] = [one.split(" ", 1)[1] for one in events[at:until] if one.startswith("compute")]
    return found


HIDDEN = {  # sum -> what it runs beside, in forward and in backward
    "inter_layer_overlap_forward": [
        ("attention 0 of half 0", ["attention 0 of half 1"], []),
        ("attention 0 of half 1", ["unit 0 of half 0"], ["attention 0 of half 0"]),
        ("unit 0 of half 0", ["unit 0 of half 1"], ["attention 0 of half 1"]),
        ("unit 0 of half 1", ["attention 1 of half 0"], ["unit 0 of half 0"]),
        ("attention 1 of half 0", ["attention 1 of half 1"], ["unit 0 of half 1"]),
        ("attention 1 of half 1", ["unit 1 of half 0"], ["attention 1 of half 0"]),
        ("unit 1 of half 0", ["unit 1 of half 1"], ["attention 1 of half 1"]),
        ("unit 1 of half 1", [], ["unit 1 of half 0"]),
    ],
    "intra_layer_overlap_forward": [
        ("attention 0 of half 0", ["attention 0 of half 1"], []),
        ("unit 0 of half 0", ["unit 0 of half 1"], ["attention 0 of half 1"]),
        ("unit 0 of half 1", [], ["unit 0 of half 0"]),
        ("attention 1 of half 0", ["attention 1 of half 1"], []),
        ("unit 1 of half 1", [], ["unit 1 of half 0"]),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, init=True)
def test_each_sum_runs_beside_the_computation_of_the_other_half(rank, world, kind):
    model = DominoTransformer(config_of(), mpu_of_all(), None, ModelType.encoder_or_decoder)
    model.exchange = recorder = Recorder(model.exchange, model)
    made = getattr(model, kind)(torch.randn(TOKENS, 3, 20, requires_grad=True), None)
    assert recorder.places == sorted(set(recorder.places)), "a sum that starts earlier is waited for earlier"
    forward = behind(recorder.events)
    recorder.events.clear()
    made.sum().backward()
    backward = behind(recorder.events)
    assert len(forward) == len(backward) == 8
    for name, there, back in HIDDEN[kind]:
        assert (forward[name], backward[name]) == (there, back), name


# ---- random numbers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seeded", [False, True])
@on_ranks(2, init=True)
def test_dropout_is_equal_outside_of_heads_and_differs_inside(rank, world, seeded):
    mpu = mpu_of_all()
    config = config_of(hidden_dropout=0.3, attention_dropout=0.4)
    torch.manual_seed(3)
    if seeded:
        deepspeed.checkpointing.configure(mpu)
        deepspeed.checkpointing.model_parallel_cuda_manual_seed(5)
    model = DominoTransformer(config, mpu, None, ModelType.encoder_or_decoder, drop_path_rate=0.4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(TOKENS, 4, 20, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x, None).square().mean().backward()
        optimizer.step()
    whole = [param for param in model.parameters() if cut_of(param) is None]
    assert len(whole) == 14 and all(same_everywhere(param) for param in whole), "whole parameters drifted apart"
    attention = model.layers[0].self_attention
    with torch.no_grad():
        for param in attention.parameters():
            dist.broadcast(param, 0)  # both ranks have the same heads now
    assert same_everywhere(attention.eval()(x)) and not same_everywhere(attention.train()(x))
    assert same_everywhere(torch.rand(4)), "numbers behind an attention differ"
    get_cuda_rng_tracker().reset()


def same_everywhere(tensor):
    found = together(tensor.tolist())
    return all(one == found[0] for one in found)


@on_ranks(1, init=True)
def test_dropout_and_drop_path_keep_the_mean(rank, world):
    case = Case(1, gated_linear_unit=False, num_layers=3)
    case.config.hidden_dropout = 0.2
    torch.manual_seed(0)
    model = DominoTransformer(
        case.config, None, None, ModelType.encoder_or_decoder, post_layer_norm=False, drop_path_rate=0.5
    )
    assert [layer.drop_path_rate for layer in model.layers] == [0, 0.25, 0.5]
    layer, before = model.layers[2], torch.zeros(50, 400, 20)
    made = layer._add(before, None, torch.ones_like(before))
    assert abs(made.mean() - 1) < 0.05 and {0.0, 2.5} == {round(float(one), 3) for one in made.unique()}
    dropped = (made == 0).all(2).all(0)
    assert 120 < int(dropped.sum()) < 280, "whole samples are left out"
    assert torch.equal(layer.eval()._add(before, None, torch.ones_like(before)), torch.ones_like(before))


# ---- engines --------------------------------------------------------------------------------------------------------
class Model(torch.nn.Module):
    """A transformer with whole layers around it."""

    def __init__(self, case, mpu):
        super().__init__()
        torch.manual_seed(1)
        self.before, self.behind = torch.nn.Linear(20, 20), torch.nn.Linear(20, 3)
        self.transformer, self.case = case.model(mpu), case

    def forward(self, x, y):
        made = self.transformer(self.before(x), self.case.mask, self.case.angles)
        return torch.nn.functional.mse_loss(self.behind(made), y)


def case_of_training(rough=True):
    case = Case(0, 2, num_layers=2, fp32_residual_connection=False, num_query_groups=2, gated_linear_unit=True)
    case.mask, case.mask_type, case.rotary = None, AttnMaskType.causal, True  # else keys' biases have no gradient
    case.angles, case.rough = torch.arange(TOKENS * 4.0).view(TOKENS, 1, 1, 4), rough
    return case


def data_of(step, copies=1, copy=0):
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(TOKENS, 4, width, generator=generator) for width in (20, 3))
    return x.chunk(copies, 1)[copy], y.chunk(copies, 1)[copy]


def plain_losses(steps, rough=True):
    """The losses of one process in fp64, and its whole parameters afterwards."""
    case = case_of_training(rough)
    model = Model(case, None).double()
    case.angles = None if case.angles is None else case.angles.double()
    whole, optimizer = dict(model.named_parameters()), torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    inside, losses = {name[12:]: one for name, one in whole.items() if name.startswith("transformer.")}, []
    for step in range(steps):
        x, y = (one.double() for one in data_of(step))
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model.behind(plain(case, inside, model.before(x))), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, whole


def engine_with(tp, world, rank, stage, in_init=False, **more):
    mpu = two_by_two(rank) if (tp, world) == (2, 4) else mpu_of_all() if tp == world else Mpu(dist.get_world_group())
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    config = settings(stage, 4 * tp // world, optimizer=optimizer, gradient_clipping=0.5, **more)
    init = deepspeed.zero.Init(config_dict_or_path=config, mpu=mpu) if in_init else contextlib.nullcontext()
    with init:
        model = Model(case_of_training(not in_init), mpu)
    return engine_of(model, config, mpu=mpu)


def losses_of(engine, steps):
    losses = []
    for step in steps:
        loss = engine(*data_of(step, engine.parallel.dp_world_size, engine.parallel.dp_rank))
        losses.append(take_step(engine, loss))
    return [sum(one) / len(one) for one in zip(*together(losses))]


def states(engine):
    """name -> master and moments, whole."""
    cuts = {name: cut_of(param) for name, param in engine.module.named_parameters()}
    join = lambda name, one: one if cuts[name] is None else cuts[name].join(one.contiguous())
    return {name: [join(name, one).clone() for one in kinds] for name, kinds in moments(engine).items()}


@pytest.mark.parametrize(
    "world, stage, in_init", [(2, 0, False), (2, 1, False), (4, 1, False), (4, 3, False), (4, 3, True)]
)
@on_ranks(init=True)
def test_engines_train_as_one_plain_process(rank, world, stage, in_init):
    engine = engine_with(2, world, rank, stage, in_init)
    losses, (expected, whole) = losses_of(engine, range(5)), plain_losses(5, not in_init)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, kinds in states(engine).items():
        assert relative(kinds[0], whole[name]) < 1e-5, name
    shapes = {name: tuple(param.shape) for name, param in Model(case_of_training(), None).named_parameters()}
    assert {name: tuple(one[0].shape) for name, one in states(engine).items()} == shapes


def save(rank, world, tp, stage, folder):
    engine = engine_with(tp, world, rank, stage)
    losses_of(engine, range(2))
    engine.save_checkpoint(folder, tag="t")
    return states(engine), losses_of(engine, (2, 3))


def load(rank, world, tp, stage, folder, tag="t"):
    more = {"checkpoint": {"load_universal": True}} if tag != "t" else {}
    engine = engine_with(tp, world, rank, stage, **more)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.add_(1)
    assert engine.load_checkpoint(folder, tag=tag)[0] is not None
    return states(engine), losses_of(engine, (2, 3))


def test_checkpoints_load_at_another_number_of_ranks(tmp_path):
    saved, losses = run_ranks(2, save, 2, 1, str(tmp_path), init=True)[0]
    ds_to_universal.main(
        ds_to_universal.parse_arguments(
            ["--input_folder", str(tmp_path / "t"), "--output_folder", str(tmp_path / "universal")]
        )
    )
    for world, tp, stage, tag in ((2, 2, 0, "t"), (1, 1, 1, "t"), (2, 1, 0, "universal")):
        for found, after in run_ranks(world, load, tp, stage, str(tmp_path), tag, init=True):
            for name, kinds in saved.items():
                assert all(torch.equal(a, b) for a, b in zip(found[name], kinds, strict=True)), (name, tp, tag)
            assert after == pytest.approx(losses, rel=1e-5)


# ---- bad input ------------------------------------------------------------------------------------------------------
def make(mpu=None, model_type=ModelType.encoder_or_decoder, config=None, **more):
    return DominoTransformer(config or config_of(), mpu, None, model_type, **more)


def ranks_of(size, **more):
    """An mpu that says ``size``."""
    return types.SimpleNamespace(get_model_parallel_world_size=lambda: size, get_model_parallel_rank=lambda: 0, **more)


def test_what_is_not_supported_is_named_with_its_fix():
    group = {"get_model_parallel_group": lambda: "of four"}
    for words, given in {
        "4 tensor-parallel ranks do not divide config.num_attention_heads = 6": {"mpu": ranks_of(4, **group)},
        "3 tensor-parallel ranks do not divide config.num_query_groups = 2": {
            "mpu": ranks_of(3, **group), "config": config_of(num_query_groups=2)},
        "2 tensor-parallel ranks do not divide config.ffn_hidden_size = 13": {
            "mpu": ranks_of(2, **group), "config": config_of(ffn_hidden_size=13)},
        r"2 tensor-parallel ranks and no group.*get_model_parallel_group\(\)": {"mpu": ranks_of(2)},
        "layer_type LayerType.decoder is not supported.*no cross attention": {"layer_type": LayerType.decoder},
        "layer_type lstm is not supported": {"layer_type": "lstm"},
        "model_type ModelType.retro_decoder is not supported": {"model_type": ModelType.retro_decoder},
        "self_attn_mask_type prefix is not.*AttnMaskType.causal": {"self_attn_mask_type": "prefix"},
        "drop_path_rate is 1.0": {"drop_path_rate": 1.0},
        "config.sequence_parallel = True: leave out --sequence-parallel": {"config": config_of(sequence_parallel=True)},
        "config.recompute_granularity = 'full'.*deepspeed.checkpointing": {
            "config": config_of(recompute_granularity="full")},
        "config.hidden_size is None, and it must be": {"config": config_of(hidden_size=None)},
        "config.num_layers is 0": {"config": config_of(num_layers=0)},
        "6 attention heads do not divide config.hidden_size = 20": {"config": config_of(kv_channels=None)},
        "num_query_groups = 4 does not divide 6": {"config": config_of(num_query_groups=4)},
        "config.hidden_dropout is 1": {"config": config_of(hidden_dropout=1)},
        "config.normalization is 'batch'": {"config": config_of(normalization="batch")},
        "3 pipeline stages do not divide config.num_layers = 2": {
            "mpu": pipeline_of(0, 3)},
        "2 pipeline stages of an encoder and a decoder": {
            "mpu": pipeline_of(0, 2), "model_type": ModelType.encoder_and_decoder},
    }.items():  # fmt: skip
        refused(ValueError, words, make, **given)
    model, x = make(), torch.zeros(TOKENS, 2, 20)
    refused(ValueError, r"shape \[5, 2, 19\], and \[tokens, samples, 20\]", model, x[..., 1:], None)
    refused(ValueError, "attention_mask has the type torch.float32", model, x, torch.zeros(2, 1, TOKENS, TOKENS))
    refused(ValueError, r"shape \[3, 1, 5, 5\].*\[2 or 1, 1, ", model, x, torch.zeros(3, 1, TOKENS, TOKENS).bool())
    refused(ValueError, "rotary_pos_emb needs apply_rotary_pos_emb", model, x, None, torch.zeros(TOKENS, 1, 1, 4))


def planned_model():
    return DominoTransformer(config_of(), mpu_of_all(), None, ModelType.encoder_or_decoder), mpu_of_all()


@on_ranks(2, init=True)
def test_a_plan_has_the_calls_of_a_run(rank, world):
    sample = (torch.ones(TOKENS, 4, 20), None)
    model, mpu = planned_model()
    engine = engine_of(model, settings(1, 4), mpu=mpu)
    step = lambda: take_step(engine, engine(*sample).sum())
    step()
    ran = calls_of(calls_while(step))
    assert ran["all_reduce"][0] >= 16, "two sums of each half, layer and direction"
    engine.destroy()
    assert planned_calls(deepspeed.plan(planned_model, settings(1, 4), world, sample=sample, ranks=[rank])) == ran
