"""How far a run has come and how many ranks it has: what every layout says of the engine under the same keys."""

from deepspeed.checkpoint import names
from deepspeed.checkpoint.parallel_metadata import parallel_metadata


def counters_of(engine):
    """dict with the published keys, in the order of the model file."""
    return {
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": engine.sparse_tensor_module_names,
        "skipped_steps": engine.skipped_steps,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "dp_world_size": engine.dp_world_size,
        "mp_world_size": engine.mp_world_size,
        names.RESERVED_KEY: parallel_metadata(engine.parallel.mpu),
    }
