"""What a checkpoint of an engine holds: the files this rank writes, and the value of each."""

import torch

from deepspeed.checkpoint import names, native_contents, zero_states
from deepspeed.checkpoint.counters import counters_of
from deepspeed.checkpoint.resume import run_states
from deepspeed.version import __version__


def common_names(engine):
    """Names of files of which every data-parallel rank has the same, in the layout of the ``.pt`` files."""
    return () if engine._stage_policy.saved.model_by_rank else (names.model_states(engine.mp_rank_for_files()),)


def files_of(engine, client_state, exclude_frozen_parameters=False, with_common=False):
    """dict: name of a file below the tag's folder -> function that gives its value, for the files of this rank.
    ``with_common``: also those of which rank 0 of the data-parallel group has the same (``common_names``).

    Every rank calls all of them in this order: some run collectives. Tensors of the values may be views of what is
    trained: write them, or copy them, before the next step. A ``TensorOfPieces`` may stand for a tensor.
    """
    if native_contents.is_wanted(engine):
        return native_contents.files_of(engine, client_state, exclude_frozen_parameters)
    saved = engine._stage_policy.saved
    dp_rank, mp_rank = engine.parallel.dp_rank, engine.mp_rank_for_files()
    found = {}
    if saved.model_by_rank or dp_rank == 0 or with_common:
        by_rank = saved.model_by_rank
        name = names.sharded_model_states(dp_rank, mp_rank) if by_rank else names.model_states(mp_rank)
        found[name] = lambda: _model_states(engine, client_state, exclude_frozen_parameters)
    if saved.optimizer_by_rank and engine.core is not None and engine.basic_optimizer is not None:
        name = names.optim_states(dp_rank, mp_rank, engine.bfloat16_enabled())
        found[name] = lambda: _optim_states(engine)
    found[names.run_states(engine.global_rank)] = lambda: run_states(engine)
    return found


def expected_bytes(engine):
    """About so many bytes of tensors each larger file of this rank will hold, rather too many than too few."""
    saved, core = engine._stage_policy.saved, engine.core
    tensors = [*engine.module.parameters(), *engine.module.buffers()]
    module = sum(t.numel() * t.element_size() for t in tensors) if not saved.model_by_rank else 0
    states = 0
    if core is not None and engine.basic_optimizer is not None:
        owned = sum(numel for _, _, numel in core.pieces())
        states = 4 * owned * (1 + max(len(core.slot_names()), 2 if engine.stepping.fused is None else 0))
    leads = engine.parallel.dp_rank == 0
    if saved.optimizer_by_rank:
        files = [states, module if leads else 0]
    else:
        files = [module + states] if leads else []
    return [size + size // 50 + (1 << 20) for size in files if size > 0]


def _model_states(engine, client_state, exclude_frozen_parameters):
    optimizer = engine.optimizer
    scheduler = engine.lr_scheduler
    saved = engine._stage_policy.saved
    frozen = saved.frozen_listed and not exclude_frozen_parameters
    state = {
        "module": _module_states(engine, exclude_frozen_parameters),
        "buffer_names": [name for name, _ in engine.module.named_buffers()],
        "optimizer": optimizer.state_dict() if optimizer is not None and not saved.optimizer_by_rank else None,
        "param_shapes": zero_states.param_shapes(engine) if saved.optimizer_by_rank else None,
        "frozen_param_shapes": zero_states.frozen_shapes(engine) if frozen else None,
        "shared_params": zero_states.shared_params(engine.module) if saved.optimizer_by_rank else None,
        "frozen_param_fragments": zero_states.frozen_fragments(engine) if frozen else None,
        "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        **counters_of(engine),
        "ds_config": engine.config,
        "ds_version": __version__,
    }
    state.update(client_state)
    return state


def _module_states(engine, exclude_frozen_parameters):
    state = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
    if not engine._stage_policy.saved.model_by_rank:
        return state
    sharded = zero_states.sharded_names(engine.module)
    for name in state.keys() & sharded:
        state[name] = torch.empty(0, dtype=state[name].dtype)
    return state


def _optim_states(engine):
    state = getattr(engine.optimizer, "state_dict_in_pieces", engine.optimizer.state_dict)
    return {
        "optimizer_state_dict": state(),
        "ds_config": engine.config,
        "ds_version": __version__,
    }
