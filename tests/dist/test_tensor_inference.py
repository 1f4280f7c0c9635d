"""``init_inference`` of models whose layers are cut over ranks: logits and texts are those of one process."""

import contextlib
import copy
import io
import os
import runpy
import sys

import pytest
import torch
from torch import nn

import deepspeed
import tensor_models as look_alikes
from deepspeed.comm import mesh
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, LmHeadLinearAllreduce, cut_of
from deepspeed.module_inject.tp_model import proven_plan
from harness import on_ranks, run_ranks
from logs import logged
from refusals import refused

T5_POLICY = {look_alikes.T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}


def close(found, expected, most=1e-5):
    """Whether the largest difference is within ``most`` of the largest value."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= most * float(expected.abs().max())


def served(model, **given):
    return deepspeed.init_inference(copy.deepcopy(model), **{"dtype": torch.float32, **given})


def cut_bytes(model):
    """``(elements of this rank's slices, elements of these parameters when they are whole)``."""
    cuts = [(param, cut_of(param)) for param in model.parameters()]
    found = [
        (p.numel(), cut.whole_shape(p.shape).numel()) for p, cut in cuts if cut is not None and cut.dim is not None
    ]
    return [sum(column) for column in zip(*found)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", list(look_alikes.MODELS))
def test_answers_are_those_of_one_process(name, world, tied):
    run_ranks(world, body_of_answers, name, tied, init=True)


def body_of_answers(rank, world, name, tied):
    model, tokens = look_alikes.model_of(name, tied).eval(), look_alikes.tokens_of()
    embedding = model.get_input_embeddings().weight.clone()
    with logged() as lines:
        engine = served(model, tensor_parallel={"tp_size": world})
    with torch.no_grad():
        expected = look_alikes.logits_of(model, tokens, name)
        close(look_alikes.logits_of(engine, tokens, name), expected)
    text = model.generate(tokens, 10)
    assert torch.equal(engine.generate(tokens, 10), text)
    assert torch.equal(engine.generate(tokens, 10, use_cache=False), text)
    assert type(engine.module.lm_head) is LmHeadLinearAllreduce
    assert engine.module.lm_head.in_features < embedding.shape[1]
    assert torch.equal(engine.module.get_input_embeddings().weight, embedding)
    assert any("'lm_head' is cut and no longer has its weight in common" in line for line in lines) == (
        tied and rank == 0
    )
    whole = [one for one in engine.module.modules() if type(one) is nn.Linear or type(one).__name__ == "Conv1D"]
    assert whole == []
    own, all_elements = cut_bytes(engine.module)
    assert own <= 1.35 * all_elements / world  # heads and channels that the ranks do not divide, and shared heads


@pytest.mark.parametrize("world", [2, 3])
def test_a_policy_by_hand_equals_the_analysis(world):
    run_ranks(world, body_of_policies, init=True)


def body_of_policies(rank, world):
    model, tokens = look_alikes.model_of("t5").eval(), look_alikes.tokens_of()
    automatic = served(model, mp_size=world)
    names = [name for names in T5_POLICY.values() for name in names]
    for given in ({"injection_policy": T5_POLICY}, {"injection_policy_tuple": names}):
        engine = served(model, mp_size=world, **given)
        assert torch.equal(look_alikes.logits_of(engine, tokens, "t5"), look_alikes.logits_of(automatic, tokens, "t5"))
        for (name, own), (_, other) in zip(engine.module.named_parameters(), automatic.module.named_parameters()):
            assert torch.equal(own, other), name
    with logged() as lines:
        served(model, mp_size=world, injection_policy={look_alikes.T5Block: ("DenseReluDense.wo",)})
    assert any("injection_policy: tensor parallelism: block 'encoder.0' (T5Block) computes" in line for line in lines)


@on_ranks(2, init=True)
def test_ranks_share_keys_and_values_of_earlier_tokens(rank, world):
    model, tokens = look_alikes.model_of("llama").eval(), look_alikes.tokens_of(length=9)
    engine, cache = served(model, mp_size=2), look_alikes.Cache()
    with torch.no_grad():
        expected = model(tokens)
        for start, stop in ((0, 4), (4, 5), (5, 9)):
            close(engine(tokens[:, start:stop], cache=cache), expected[:, start:stop])
    assert {one.shape[1] for pair in cache.kept.values() for one in pair} == {1}  # of two key/value heads


@on_ranks(4, init=True)
def test_two_groups_of_neighbours_answer_each_for_itself(rank, world):
    model, group = look_alikes.model_of("gpt2").eval(), mesh.group_over([rank // 2 * 2, rank // 2 * 2 + 1])
    tokens, strided = look_alikes.tokens_of(seed=rank // 2), mesh.group_over([rank % 2, rank % 2 + 2])
    engines = [served(model, tensor_parallel=given) for given in ({"tp_size": 2}, {"tp_group": group})]
    for engine in engines:
        assert torch.equal(engine.generate(tokens), model.generate(tokens))
    assert torch.equal(engines[0].module.lm_head.weight, engines[1].module.lm_head.weight)
    engine, tokens = served(model, tp={"tp_size": 2, "tp_group": strided}), look_alikes.tokens_of(seed=rank % 2)
    assert torch.equal(engine.generate(tokens), model.generate(tokens))
    assert torch.distributed.get_world_size(engine.inference_mp_group) == 2


@on_ranks(2, init=True)
def test_slices_are_multiples_of_the_grain_where_it_divides(rank, world):
    model = look_alikes.model_of("gpt2")
    for grain, widths in ((64, (128, 64)), (5, (96, 96)), (1, (96, 96))):
        engine = served(model, tensor_parallel={"tp_size": 2, "tp_grain_size": grain})
        assert engine.module.blocks[0].c_out.in_features == widths[rank]
    for grain, widths in ((16, (32, 16)), (64, (24, 24))):
        engine = served(model, tensor_parallel={"tp_size": 2, "tp_grain_size": grain})
        assert engine.module.lm_head.in_features == widths[rank]
        assert engine.module.blocks[0].num_heads == 3


@pytest.mark.parametrize("world", [2, 3])
def test_what_serves_only_stays_whole_in_training(world):
    run_ranks(world, body_of_training_plans, init=True)


def body_of_training_plans(rank, world):
    def planned(name, training):
        plan = proven_plan(look_alikes.model_of(name), torch.distributed.group.WORLD, training=training)
        return list(plan.kinds().values())

    for name in ("llama", "falcon", "t5"):
        assert not any(one.whole for one in planned(name, training=False))
    (llama,), (falcon,) = planned("llama", training=True), planned("falcon", training=True)
    assert "only inference can cut it" in falcon.whole["dense"]
    assert ("self_attn.o_proj" in llama.whole) == (world == 3)  # two key/value heads, one and a half for each rank
    first, other, *_ = planned("t5", training=True)
    assert [(one.results, one.arguments) for one in first.groups[:1]] == [([((1,), 1)], [])]
    assert [(one.results, one.arguments) for one in other.groups[:1]] == [([], [((0, 1), 1)])]


class Mpu:
    """An mpu whose ranks all share the model."""

    def __init__(self, group):
        self.group = group

    def get_tensor_model_parallel_group(self):
        return self.group


@on_ranks(2, init=True)
def test_an_mpu_brings_the_group(rank, world):
    model, tokens = look_alikes.model_of("llama").eval(), look_alikes.tokens_of()
    for given in ({"mpu": Mpu(mesh.group_over([0, 1]))}, {"tp": {"mpu": Mpu(mesh.group_over([0, 1])), "tp_size": 2}}):
        engine = served(model, **given)
        assert type(engine.module.blocks[0].self_attn.o_proj) is LinearAllreduce
        assert type(engine.module.blocks[0].self_attn.q_proj) is LinearLayer
        assert torch.equal(engine.generate(tokens), model.generate(tokens))
    refused(ValueError, "mpu has no get_tensor_model_parallel_group", served, model, tp={"mpu": object(), "tp_size": 2})


@on_ranks(2, init=True)
def test_samples_are_those_of_the_first_rank(rank, world):
    model, tokens = look_alikes.model_of("llama").eval(), look_alikes.tokens_of()
    torch.manual_seed(100 + rank)
    engine = served(model, mp_size=2)
    texts = [None, None]
    torch.distributed.all_gather_object(texts, engine.generate(tokens, 12, do_sample=True).tolist())
    assert texts[0] == texts[1]
    torch.manual_seed(100)
    assert texts[0] == model.generate(tokens, 12, do_sample=True).tolist()


@on_ranks(2, init=True)
def test_weights_are_those_of_the_first_rank_or_of_a_checkpoint(rank, world, folder):
    tokens, first = look_alikes.tokens_of(), look_alikes.model_of("llama").eval()
    engine = served(look_alikes.model_of("llama", seed=rank), mp_size=2)
    assert torch.equal(engine.generate(tokens), first.generate(tokens))
    other = look_alikes.model_of("llama", seed=5).eval()
    if rank == 0:
        torch.save(other.state_dict(), f"{folder}/whole.pt")
    torch.distributed.barrier()
    engine.load_module_state_dict({"module": other.state_dict()})
    assert torch.equal(engine.generate(tokens), other.generate(tokens))
    engine = served(first, mp_size=2, checkpoint=f"{folder}/whole.pt")
    assert torch.equal(engine.generate(tokens), other.generate(tokens))


@on_ranks(2, init=True)
def test_other_dtypes_and_kernels_that_are_asked_for(rank, world):
    model, tokens = look_alikes.model_of("bloom").eval(), look_alikes.tokens_of()
    with logged() as lines:
        engine = served(model, mp_size=2, replace_with_kernel_inject=True)
    assert sum("replace_with_kernel_inject has no effect yet" in line for line in lines) == 1
    assert torch.equal(engine.generate(tokens), model.generate(tokens))
    assert type(engine.module.blocks[0].dense) is LinearAllreduce
    half = served(look_alikes.model_of("bloom").half(), mp_size=2)
    close(half(tokens), model(tokens), most=1e-2)
    narrow, alone = served(model, mp_size=2, dtype=torch.bfloat16), served(model, dtype=torch.bfloat16)
    assert {param.dtype for param in narrow.module.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        expected = model(tokens)
        error = float((alone(tokens) - expected).abs().max())
        assert float((narrow(tokens) - expected).abs().max()) <= 2 * error


SCRIPT = os.path.join(os.path.dirname(__file__), *[os.pardir] * 2, "benchmarks", "python", "inference_test.py")


def said_by_script(rank, world, *flags):
    """The lines that the benchmark prints on a rank."""
    before, sys.argv = sys.argv, [SCRIPT, "--name", "tiny", "--batch_size", "2", "--max_new_tokens", "4", *flags]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            runpy.run_path(SCRIPT, run_name="__main__")
    finally:
        sys.argv = before
    return said.getvalue().splitlines()


def test_the_script_of_the_tutorial_prints_times_and_texts():
    env = {"DS_ACCELERATOR": "cpu"}
    flags = "--test_performance", "--rounds", "1", "--ds_inference", "--local_rank", "0"
    shared, other = run_ranks(2, said_by_script, *flags, env=env)
    (alone,) = run_ranks(1, said_by_script, "--dtype", "float32", env=env)
    assert other == [] and len(alone) == 2 and [line for line in shared if line in alone] == alone
    assert "2 ranks share it, batch 2" in shared[-5]
    for line, name, unit in zip(
        shared[-4:],
        ("Avg Per Token Latency", "Avg BW", "Avg Throughput", "Peak Memory"),
        ("ms", "GB/s", "tokens/s", "GB"),
    ):
        label, _, value = line.partition(":")
        assert label == name and float(value.split()[0]) > 0 and value.split()[1] == unit


class WithExperts(look_alikes.LlamaBlock):
    """A block whose unit is a layer of experts."""

    def __init__(self):
        super().__init__()
        self.mlp = deepspeed.moe.layer.MoE(48, look_alikes.LlamaMLP(48, 40), 2, k=1, drop_tokens=False)

    def forward(self, x, angles, cache=None):
        x = x + self.self_attn(self.input_layernorm(x), angles, cache)
        return x + self.mlp(self.post_attention_layernorm(x))[0]


@on_ranks(2, init=True)
def test_experts_are_shared_and_attention_is_cut(rank, world):
    torch.manual_seed(0)
    model, tokens = (
        look_alikes.Decoder([WithExperts(), look_alikes.LlamaBlock()], "rotary", 48),
        look_alikes.tokens_of(),
    )
    alone = served(model)
    engine = served(model, mp_size=2)
    close(engine(tokens), alone(tokens))
    assert torch.equal(engine.generate(tokens), alone.generate(tokens))
    first, second = engine.module.blocks
    assert type(first.self_attn.o_proj) is LinearAllreduce and type(second.mlp.down_proj) is LinearAllreduce
    assert len([name for name, _ in first.mlp.named_modules() if name.endswith("down_proj")]) == 1


class Undecided(nn.Module):
    """A model that does not run without being told its lengths."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([look_alikes.LlamaMLP(8, 8) for _ in range(2)])

    def forward(self, x, lengths):
        for block in self.blocks:
            x = block(x)
        return x[:, : int(lengths)]


@on_ranks(3, init=True)
def test_what_cannot_be_cut_is_refused_before_a_weight_moves(rank, world):
    model = look_alikes.model_of("llama")
    before = copy.deepcopy(model.state_dict())
    pair = mesh.group_over([0, 1]) if rank < 2 else None

    def refuse(words, error=ValueError, model=model, **given):
        return refused(error, words, deepspeed.init_inference, model, **{"dtype": torch.float32, **given})

    refuse("tensor_parallel.tp_size = 2 does not divide the 3 ranks", mp_size=2)
    refuse("dtype=torch.int8 is not built", NotImplementedError, mp_size=3, dtype=torch.int8)
    if rank < 2:
        refuse(r"tp_size \(mp_size\) is 3, and the group .* has 2 ranks", tp={"tp_size": 3, "tp_group": pair})
    refuse("does not run on a probe.*injection_policy=", model=Undecided(), mp_size=3)
    refuse("no layer of Linear can be cut.*injection_policy=", model=nn.Linear(3, 2), mp_size=3)
    refuse(r"injection_policy\[LlamaBlock\] is 7", mp_size=3, injection_policy={look_alikes.LlamaBlock: 7})
    refuse("no block of the model has a layer of", mp_size=3, injection_policy={look_alikes.LlamaBlock: ("none",)})
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    engine = deepspeed.init_inference(model, dtype=torch.float32, mp_size=3)
    assert deepspeed.init_inference(model, dtype=torch.float32, mp_size=3).module is engine.module
