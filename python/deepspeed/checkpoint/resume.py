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
        # Model files of stage 0 do not say which parameters the optimizer's groups have.
        "group_names": names_of_groups(engine),
    }


def names_of_groups(engine):
    """Names of the parameters of each group of the engine's optimizer; [] without one."""
    if engine.stepping is None:
        return []
    called = iter(engine.stepping.names)
    return [[next(called) for _ in group] for group in engine.trained_groups]


def resume_run(engine, folder, saved):
    """Goes on where ``run_states`` stood. Another number of ranks goes on with the next samples that none has seen;
    ranks that did not exist keep their random numbers."""
    path = names.run_states_path(folder, engine.global_rank)
    first = names.run_states_path(folder, 0)
    if not os.path.exists(first):
        logger.warning(
            f"{first} does not exist (the checkpoint is of another implementation): random numbers and the position in "
            "the data are not resumed"
        )
        return
    own = os.path.exists(path)
    run = storage.read(path if own else first)
    same = run.get("world_size") == engine.world_size
    if hasattr(engine.training_dataloader, "load_state_dict") and run["dataloader"] is not None:
        engine.training_dataloader.load_state_dict(run["dataloader"])
    accumulation = run.get("gradient_accumulation_steps", engine.gradient_accumulation_steps())
    if same and accumulation == engine.gradient_accumulation_steps():
        engine.micro_steps = run["micro_steps"]
    if own:
        rng.restore(run["rng"])
    else:
        logger.warning(
            f"[Rank {engine.global_rank}] keeps its random numbers: {run.get('world_size')} ranks have saved, and this "
            "one was not among them"
        )
