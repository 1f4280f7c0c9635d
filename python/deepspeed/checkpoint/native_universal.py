"""The files beside the parameters of a universal checkpoint, made of one in the native format."""

import torch

from deepspeed.checkpoint import names
from deepspeed.checkpoint.weights import eager, plain


def torch_files(saved, mp_rank):
    """``(name, value)`` of the model file of a model-parallel rank and of what its runs need to go on; ``saved`` is its
    ``NativeState``. Trained weights are placeholders in the model file, as at ZeRO stage 3."""
    whole = saved.module()
    module = {key: eager(whole[key]) if key in whole else torch.empty(0) for key in saved.model["module"]}
    state = {key: value for key, value in saved.model.items() if key != "module"}
    yield names.model_states(mp_rank), {"module": module, **plain(state)}
    groups = [group["names"] for group in saved.param_groups()]
    for rank in saved.ranks:
        yield names.run_states(rank), {**saved.run_states(rank)[0], "group_names": groups}
