"""Random numbers that come out the same when a segment is computed again, and that differ where ranks split a layer."""

from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing.settings import current
from deepspeed.comm.mesh_views import ask_mpu
from deepspeed.log import log_dist
from deepspeed.utils import groups
from deepspeed.utils.random_state import MODEL_PARALLEL, get_cuda_rng_tracker

_MODEL_PARALLEL_SEED_OFFSET = 2718  # Megatron's: runs with its seeds repeat here


def _tensor_rank():
    rank = ask_mpu(current.mpu, "rank")
    return groups.get_tensor_model_parallel_rank() if rank is None else rank


def model_parallel_cuda_manual_seed(seed):
    """Seeds the accelerator with ``seed`` and the tracker's model-parallel generator differently on each rank of the
    model-parallel group. Called after ``configure``, which knows the group."""
    rank = _tensor_rank()
    split_seed = seed + _MODEL_PARALLEL_SEED_OFFSET + rank
    get_cuda_rng_tracker().reset()
    get_accelerator().manual_seed(seed)
    get_cuda_rng_tracker().add(MODEL_PARALLEL, split_seed)
    log_dist(f"model-parallel rank {rank}: seed {seed}, model-parallel seed {split_seed}", ranks=[0])


def model_parallel_reconfigure_tp_seed(seed):
    """Starts the tracker's model-parallel generator again from ``seed`` (and the rank)."""
    with get_cuda_rng_tracker().fork():
        get_accelerator().manual_seed(seed + _MODEL_PARALLEL_SEED_OFFSET + _tensor_rank())
