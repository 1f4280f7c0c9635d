"""What a run needs besides its weights and states to go on: random numbers, the position in the data, micro steps."""

import os

from deepspeed.checkpoint import names, rng, storage
from deepspeed.log import logger


def run_states(engine):
    """What this rank saves of it."""
    loader = engine.training_dataloader
    return {
        "rng": rng.capture(),
        "dataloader": loader.state_dict() if hasattr(loader, "state_dict") else None,
        "micro_steps": engine.micro_steps,
        "world_size": engine.world_size,
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "zero_stage": engine.zero_optimization_stage(),
        "learned_fires": engine.core.learned_fires() if engine.core is not None else [],
        # Model files of stage 0 do not say which parameters the optimizer's groups have.
        "group_names": names_of_groups(engine),
    }


def names_of_groups(engine):
    """Names of the parameters of each group of the engine's optimizer; [] without one."""
    if engine.stepping is None:
        return []
    called = iter(engine.stepping.names)
    return [[next(called) for _ in group] for group in engine.trained_groups]


def _pickled(folder, rank):
    """What rank ``rank`` saved, else what rank 0 did, and whether it was the first; (None, False) where none has."""
    path = names.run_states_path(folder, rank)
    own = os.path.exists(path)
    path = path if own else names.run_states_path(folder, 0)
    return (storage.read(path) if os.path.exists(path) else None), own


def resume_run(engine, folder, saved):
    """Goes on where ``run_states`` stood. Another number of ranks goes on with the next samples that none has seen;
    ranks that did not exist keep their random numbers."""
    run, own = saved.run_states(engine.global_rank) or _pickled(folder, engine.global_rank)
    if run is None:
        logger.warning(
            f"{folder} has no run states (the checkpoint is of another implementation): random numbers and the "
            "position in the data are not resumed"
        )
        return
    same = run.get("world_size") == engine.world_size
    if hasattr(engine.training_dataloader, "load_state_dict") and run["dataloader"] is not None:
        engine.training_dataloader.load_state_dict(run["dataloader"])
    accumulation = run.get("gradient_accumulation_steps", engine.gradient_accumulation_steps())
    if same and accumulation == engine.gradient_accumulation_steps():
        engine.micro_steps = run["micro_steps"]
    learned = run.get("learned_fires") or []
    alike = same and run.get("zero_stage") == engine.zero_optimization_stage()
    if own and alike and len(learned) == len(engine.stepping.names):
        engine.core.set_learned_fires(learned)
    if own:
        rng.restore(run["rng"])
    else:
        logger.warning(
            f"[Rank {engine.global_rank}] keeps its random numbers: {run.get('world_size')} ranks have saved, and this "
            "one was not among them"
        )
