"""Pipelines whose layers are cut automatically (``tensor_parallel.autotp_size``): pp x tp x dp against one process."""

import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deepspeed
import pipe_models as models
import tensor_models as look_alikes
from deepspeed import comm as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils.param_cut import cut_of
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import on_ranks, run_ranks
from models import seeded
from plan_calls import calls_of, calls_while, planned_calls
from refusals import refused
from runs import engine_of, together

WIDTH, WORDS, BLOCKS, MICROS = 48, look_alikes.WORDS, 2, 2


class Words(nn.Embedding):
    """The features of tokens; ``logits``: of the next ones, by the same weight."""

    def __init__(self):
        super().__init__(WORDS, WIDTH)

    def logits(self, x):
        return F.linear(x, self.weight)


class Block(look_alikes.GPT2Block):
    """Biases of keys have no gradients but rounding, by which Adam would divide."""

    def __init__(self):
        super().__init__()
        self.c_attn.bias.requires_grad_(False)


class Head(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WORDS, bias=False)


def specs(tied):
    blocks = [LayerSpec(Block) for _ in range(BLOCKS)]
    if tied:
        return [TiedLayerSpec("words", Words), *blocks, LayerSpec(nn.LayerNorm, WIDTH),
                TiedLayerSpec("words", Words, forward_fn=Words.logits)]  # fmt: skip
    return [LayerSpec(Words), *blocks, LayerSpec(nn.LayerNorm, WIDTH), LayerSpec(Head)]


def loss_of(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(number, copy):
    made = [look_alikes.tokens_of(seed=100 * number + 10 * micro + copy) for micro in range(MICROS)]
    return [(tokens, tokens) for tokens in made]


class Plain(nn.Module):
    """All layers in one process."""

    def __init__(self, tied):
        super().__init__()
        self.layers, self.tied = nn.ModuleList(), tied
        for number, spec in enumerate(specs(tied)[: -1 if tied else None]):
            self.layers.append(seeded(spec.build, seed=models.SEED + number))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.layers[0].logits(x) if self.tied else x


def reference(tied, copies, steps):
    data = [[one for copy in range(copies) for one in batch(number, copy)] for number in range(steps)]
    return models.plain_run(Plain(tied), data, loss_of, 0.5)


def make(stage, tied, pp, tp, dp, more=None, **section):
    module = PipelineModule(
        specs(tied), topology=PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp), loss_fn=loss_of,
        seed_layers=True, base_seed=models.SEED, partition_method="type:Block",
    )  # fmt: skip
    more = {**(more or {}), "tensor_parallel": {"autotp_size": tp, **section}}
    return engine_of(module, models.config_of(MICROS, stage, gradient_clipping=0.5, **more))


def trained(engine, steps, first=0):
    copy = engine.grid.get_data_parallel_rank()
    return [engine.train_batch(iter(batch(number, copy))).item() for number in range(first, first + steps)]


def whole_of(engine):
    """``{layer.parameter: whole values}`` of all stages."""
    module, own = engine.module, {}
    for number, layer in zip(module.local_layers, module._modules_by_position):
        for name, param in layer.named_parameters():
            cut = cut_of(param)
            own[f"{number}.{name}"] = (param if cut is None else cut.join(param.detach())).detach().clone()
    return {name: value for theirs in together(own) for name, value in theirs.items()}


def same(found, wanted, bound=2e-5):
    for name, value in wanted.model.layers.state_dict().items():
        assert torch.allclose(found[name], value, atol=bound), name


@pytest.mark.parametrize("stage, tied, pp, tp, dp", [(0, False, 2, 2, 1), (1, True, 2, 2, 1), (1, False, 1, 2, 2)])
@on_ranks(4, init=True)
def test_equals_one_process(rank, world, stage, tied, pp, tp, dp):
    engine = make(stage, tied, pp, tp, dp)
    losses, wanted = trained(engine, 3), reference(tied, dp, 3)
    assert losses == pytest.approx(wanted.means, rel=1e-4)
    same(whole_of(engine), wanted)
    kinds = together({type(one) for one in engine.module.modules()})
    assert all({LinearLayer, LinearAllreduce} <= one for one in kinds), "a block of each stage is cut"


@on_ranks(2, init=True)
def test_what_does_not_fit_is_named(rank, world):
    words = r"the topology of the PipelineModule has 1 ranks along its axis model: .*num_mp=2"
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1)
    module = PipelineModule(specs(False), topology=topology, loss_fn=loss_of)
    config = models.config_of(MICROS, 0, tensor_parallel={"autotp_size": 2})
    refused(ValueError, words, engine_of, module, config)
    engine, other = make(0, False, 1, 2, 1), [(tokens, tokens) for tokens in (look_alikes.tokens_of(seed=rank),)] * 2
    refused(RuntimeError, "Data inconsistency within the TP group", engine.train_batch, iter(other))
    refused(ValueError, "split_sequence is true", make, 0, False, 1, 2, 1, split_sequence=True)
    refused(ValueError, "vocab_parallel_lm_head is true", make, 0, False, 1, 2, 1, vocab_parallel_lm_head=True)
    assert dist.get_world_size() == world


class Packed(Block):
    """Takes and gives a pair of tensors."""

    def forward(self, packed):
        x, places = packed
        return super().forward(x + places), places


@on_ranks(2, init=True)
def test_layers_that_take_tuples_need_a_sample(rank, world):
    cut = []
    for sample in (None, (torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH))):
        topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
        module = PipelineModule([LayerSpec(Packed), LayerSpec(Packed)], topology=topology, profile_input=sample)
        engine_of(module, models.config_of(MICROS, 0, tensor_parallel={"autotp_size": 2}))
        cut.append(sum(isinstance(one, LinearAllreduce) for one in module.modules()))
    assert cut == [0, 4]


# ---- checkpoints ----------------------------------------------------------------------------------------------------
def save(rank, world, folder, stage, shape):
    engine = make(stage, True, *shape)
    trained(engine, 2)
    engine.save_checkpoint(folder, tag="t")
    return trained(engine, 1, first=2)[0]


def load(rank, world, folder, stage, shape, tag="t"):
    more = {"checkpoint": {"load_universal": True}} if tag == "universal" else {}
    engine = make(stage, True, *shape, more=more)
    engine.load_checkpoint(folder, tag=tag)
    return trained(engine, 1, first=2)[0]


@pytest.mark.parametrize("stage", [0, 1])
def test_any_shape_reads_it(stage, tmp_path):
    expected = run_ranks(4, save, str(tmp_path), stage, (2, 2, 1), init=True)[0]
    for shape in ((2, 2, 1), (1, 2, 1), (2, 1, 1), (1, 1, 1)):
        found = run_ranks(shape[0] * shape[1], load, str(tmp_path), 1, shape, init=True)
        assert found[0] == pytest.approx(expected, rel=1e-4), shape
    if stage == 0:
        return
    whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="t")
    shapes = {name: tuple(value.shape) for name, value in whole.items()}
    assert shapes["2.c_attn.weight"] == (WIDTH, 3 * WIDTH) and shapes["1.c_out.weight"] == (4 * WIDTH, WIDTH)
    folders = {"input_folder": str(tmp_path / "t"), "output_folder": str(tmp_path / "universal")}
    ds_to_universal.main(types.SimpleNamespace(**folders))
    for shape in ((2, 2, 1), (1, 1, 1)):
        found = run_ranks(shape[0] * shape[1], load, str(tmp_path), 1, shape, "universal", init=True)
        assert found[0] == pytest.approx(expected, rel=1e-4), shape


# ---- the plan -------------------------------------------------------------------------------------------------------
def module_of(pp, tp):
    return PipelineModule(
        specs(False), topology=PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=1), loss_fn=loss_of,
        partition_method="type:Block",
    )  # fmt: skip


@on_ranks(4, init=True)
def test_a_plan_has_the_calls_of_a_run(rank, world):
    engine = make(0, False, 2, 2, 1)
    trained(engine, 1)
    ran = calls_of(calls_while(lambda: trained(engine, 1)))
    engine.destroy()
    config = models.config_of(MICROS, 0, gradient_clipping=0.5, tensor_parallel={"autotp_size": 2})
    tokens = look_alikes.tokens_of()
    plan = deepspeed.plan(functools.partial(module_of, 2, 2), config, world, sample=(tokens, tokens), ranks=[rank])
    planned = {verb: figures for verb, figures in planned_calls(plan, rank).items() if verb not in ("send", "recv")}
    assert planned["all_reduce"][0] >= 4 * MICROS and planned == {verb: ran[verb] for verb in planned}
