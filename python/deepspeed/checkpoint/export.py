"""Weights of a running engine for others to read."""

import os

from deepspeed import comm as dist
from deepspeed.checkpoint import storage, zero_states
from deepspeed.log import logger


def save_16bit_model(engine, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
    """Rank 0 writes the module's state dict to ``save_dir/save_filename``; every rank calls it.

    Returns True; at ZeRO stage 3 False, with nothing written, unless
    ``zero_optimization.stage3_gather_16bit_weights_on_model_save`` is on.
    """
    sharded = engine.zero_optimization_stage() == 3
    if sharded and not engine.zero_gather_16bit_weights_on_model_save():
        logger.warning(
            f"nothing is saved to {save_dir}: set zero_optimization.stage3_gather_16bit_weights_on_model_save to true "
            "to gather the weights of ZeRO stage 3 for it"
        )
        return False
    gathered = zero_states.whole_state_dict(engine, exclude_frozen_parameters) if sharded else None
    if engine.global_rank == 0:
        os.makedirs(save_dir, exist_ok=True)
        state = gathered or storage.compact(
            engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        )
        storage.write(state, os.path.join(os.fspath(save_dir), save_filename))
    if engine.world_size > 1:
        dist.barrier()
    return True
