"""Memory in use, as a line in the log."""

import gc

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.host.cpu import memory_bytes, resident_bytes
from deepspeed.log import logger

GIB = 1024**3


def see_memory_usage(message, force=False):
    """Logs `message` and, after a garbage collection, the memory of rank 0: allocated and cached by the accelerator
    (now and at most since the last call), and this process's share of the host's.

    Does nothing without `force`, so that calls can stay where they once helped.
    """
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    device = get_accelerator()
    logger.info("%s", message)
    logger.info(
        "MA %.2f GB         Max_MA %.2f GB         CA %.2f GB         Max_CA %.2f GB",
        device.memory_allocated() / GIB,
        device.max_memory_allocated() / GIB,
        device.memory_cached() / GIB,
        device.max_memory_cached() / GIB,
    )
    used, total = resident_bytes() / GIB, memory_bytes()[0] / GIB
    logger.info("CPU Virtual Memory: used by this process = %.2f GB, total = %.2f GB", used, total)
    device.reset_peak_memory_stats()
