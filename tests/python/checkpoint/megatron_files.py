"""Writes folders as Megatron-style runs save them: a grid of pipeline stages, tensor-parallel and data-parallel ranks.

Two pipeline stages have one layer each, and the tied word embeddings; every rule of universal_checkpoint_info has a
parameter.
"""

import collections
import os

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.utils.tensor_fragment import fragment_address
from zero_folders import slices

HIDDEN, WORDS, PADDED = 4, 10, 12
SIZES = (4, 2, 2)  # of a fused query, key and value
INFO = {
    keys.UNIVERSAL_CHECKPOINT_VERSION_KEY: keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
    keys.ORIGINAL_VOCAB_SIZE: WORDS,
    keys.PADDED_VOCAB_SIZE: PADDED,
    keys.VOCABULARY_PARAMETER_PATTERNS: [r"words\.weight"],
    keys.PIPELINE_REPLICATED_PARAMETER_PATTERNS: [r"words\.weight"],
    keys.TP_REPLICATED_PARAMETER_PATTERNS: [r"layers\.\d+\.norm\.weight"],
    keys.PARAMETER_TO_AVERAGE_PATTERNS: [r"layers\.\d+\.scale"],
    keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: [r"layers\.\d+\.dense\.weight"],
    keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: [r"layers\.\d+\.gate_up\.weight"],
    keys.PARAMETER_WITH_SUB_PARAMS: [
        {"patterns": [r"layers\.\d+\.qkv\.weight"], "shape": (SIZES, HIDDEN), "partition_dim": 0}
    ],
}


def whole_parameters(stage):
    """name -> whole tensor of a pipeline stage."""
    generator = torch.Generator().manual_seed(stage)

    def value(*shape):
        return torch.randn(*shape, generator=generator)

    layer = f"layers.{stage}"
    words = torch.randn(PADDED, HIDDEN, generator=torch.Generator().manual_seed(99))
    words[WORDS:] = 0
    return {
        "words.weight": words,
        f"{layer}.norm.weight": value(HIDDEN),
        f"{layer}.qkv.weight": value(sum(SIZES), HIDDEN),
        f"{layer}.qkv.bias": value(sum(SIZES)),
        f"{layer}.dense.weight": value(HIDDEN, 2 * HIDDEN),
        f"{layer}.gate_up.weight": value(4 * HIDDEN, HIDDEN),
        f"{layer}.scale": value(HIDDEN),
    }


def slice_of(name, whole, tp, tp_degree):
    """The part of a parameter that a tensor-parallel rank has; written plainly, rule by rule."""
    if "norm" in name:
        return whole
    if "scale" in name:  # differs from rank to rank around the mean
        return whole + (tp - (tp_degree - 1) / 2)
    if "dense" in name:
        return whole.chunk(tp_degree, dim=1)[tp]
    if "gate_up" in name:
        return torch.cat([half.chunk(tp_degree)[tp] for half in whole.chunk(2)])
    if name.endswith("qkv.weight"):
        return torch.cat([part.chunk(tp_degree)[tp] for part in whole.split(list(SIZES))])
    return whole.chunk(tp_degree)[tp]


def state_of(name, value, kind):
    """Values of the moments that follow from the weight, slice by slice as for the whole."""
    if kind == "fp32":
        return value
    return value * 0.5 if kind == "exp_avg" else value * 0.25 + 1


def cut_flat(params, dp_degree, kind):
    """The parameters end to end, cut for ZeRO 1 and 2: one piece without padding for each data-parallel rank."""
    flat = torch.cat([state_of(name, value, kind).reshape(-1) for name, value in params.items()])
    size = -(-flat.numel() // dp_degree)
    return [flat[rank * size : (rank + 1) * size] for rank in range(dp_degree)], size


def mappings(params, dp, size):
    found, offset = collections.OrderedDict(), 0
    for name, value in params.items():
        low, high = max(dp * size, offset), min((dp + 1) * size, offset + value.numel())
        if low < high:
            found[name] = fragment_address(numel=high - low, start=low - dp * size)
        offset += value.numel()
    return found


def write(folder, pp_degree=2, tp_degree=2, dp_degree=2, info=INFO, stage=1, layers=True):
    """The files of all ranks. With ``stage`` 3 every rank has a slice of each parameter instead."""
    os.makedirs(folder, exist_ok=True)
    for pp in range(pp_degree):
        for tp in range(tp_degree):
            mp = pp * tp_degree + tp
            params = {}
            for part in range(pp, 2, pp_degree) if pp_degree == 2 else range(2):
                params.update({n: slice_of(n, v, tp, tp_degree) for n, v in whole_parameters(part).items()})
            model = {
                "module": {name: value.to(torch.bfloat16) for name, value in params.items()} if stage < 3 else {},
                "buffer_names": [],
                "optimizer": None,
                "param_shapes": [{name: value.shape for name, value in params.items()}],
                "dp_world_size": dp_degree,
                "mp_world_size": tp_degree,
                "global_steps": 7,
                "iteration": 7,
                "args": {"hidden_size": HIDDEN},
                "checkpoint_info": {"name": "small"},
                keys.CHECKPOINT_PARALLEL_DIMS: {"pp_degree": pp_degree, "tp_degree": tp_degree},
            }
            if info is not None:
                model[keys.UNIVERSAL_CHECKPOINT_INFO] = info
            for rank in [f"zero_pp_rank_{dp}_" for dp in range(dp_degree)] if stage == 3 else [""]:
                torch.save(model, os.path.join(folder, f"{rank}mp_rank_{mp:02d}_model_states.pt"))
            for dp in range(dp_degree):
                inner = sliced(params, dp, dp_degree) if stage == 3 else flat(params, dp, dp_degree, stage)
                path = os.path.join(folder, f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt")
                torch.save({"optimizer_state_dict": inner}, path)
    if layers:
        write_layers(folder, tp_degree)


def flat(params, dp, dp_degree, stage):
    masters, size = cut_flat(params, dp_degree, "fp32")
    padding = size - masters[dp].numel()
    states = {kind: cut_flat(params, dp_degree, kind)[0][dp] for kind in ("exp_avg", "exp_avg_sq")}
    return {
        "zero_stage": stage,
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": {
            # States keep the padding on disk.
            "state": {0: {"step": 7, **{k: torch.cat([v, torch.zeros(padding)]) for k, v in states.items()}}},
            "param_groups": [{"lr": 0.01, "params": [0]}],
        },
        "single_partition_of_fp32_groups": [masters[dp].clone()],
        "group_paddings": [padding],
        "partition_count": [dp_degree],
        "param_slice_mappings": [mappings(params, dp, size)],
    }


def sliced(params, dp, dp_degree):
    def of(kind):
        return torch.cat([slices(state_of(name, value, kind), dp_degree)[dp] for name, value in params.items()])

    return {
        "zero_stage": 3,
        "partition_count": dp_degree,
        "optimizer_state_dict": {
            "state": {0: {"step": 7, "exp_avg": of("exp_avg"), "exp_avg_sq": of("exp_avg_sq")}},
            "param_groups": [{"lr": 0.01, "params": [0]}],
        },
        "fp32_flat_groups": [of("fp32")],
    }


def layer_slice(layer, tp):
    """A layer file: 01 the embedding, 02 to 05 transformer layers, 06 the final norm."""
    base = 100.0 * layer + 10.0 * tp
    if layer == 1:
        return {"word_embeddings.weight": torch.full((3, 2), base), "position_embeddings.weight": torch.ones(2, 2)}
    if layer == 6:
        return {"weight": torch.full((2,), 600.0)}
    return {
        "input_layernorm.weight": torch.full((2,), 100.0 * layer),
        "self_attention.query_key_value.weight": torch.full((2, 2), base),
        "self_attention.dense.weight": torch.full((2, 2), base),
    }


def write_layers(folder, tp_degree):
    for layer in range(1, 7):
        for tp in range(tp_degree):
            torch.save(
                layer_slice(layer, tp), os.path.join(folder, f"layer_{layer:02d}-model_{tp:02d}-model_states.pt")
            )
