"""How fast an operation was: bytes over time, and what the wires carried. Both in Gbit/s (10^9 bit).

*Algorithm bandwidth* is the data that an operation is about over its time; for an all-reduce twice its tensor, which is
what any algorithm has to read and write. *Bus bandwidth* corrects it by the share that has to leave a rank, (n-1)/n
of n ranks, so that it can be compared with what the hardware is said to do, whatever n is. Source of the corrections:
the description of performance in NVIDIA's nccl-tests.
"""

# How many times the bytes that one rank passes make the data of the operation; "n": once for each rank. Operations
# that are not here move their tensor once, and all of it.
_DATA = {
    "all_reduce": 2,
    "inference_all_reduce": 2,
    "all_reduce_coalesced": 2,
    "all_gather": "n",
    "all_gather_into_tensor": "n",
    "all_gather_coalesced": "n",
    "allgather_fn": "n",
    "gather": "n",
    "scatter": "n",
    "reduce_scatter": 1,
    "reduce_scatter_tensor": 1,
    "reduce_scatter_fn": 1,
    "all_to_all": 1,
    "all_to_all_single": 1,
}


def bandwidths(name, size_bytes, ms, ranks):
    """``(algorithm bandwidth, bus bandwidth)`` in Gbit/s of the operation ``name`` among ``ranks``.

    ``size_bytes``: of the tensor (or list) that a rank passes in: its own part for gathers, what it gets for a scatter,
    the whole for the others. Zero for operations without data or without time.
    """
    if ms <= 0 or size_bytes <= 0:
        return 0.0, 0.0
    times = _DATA.get(name)
    data = size_bytes * (ranks if times == "n" else times or 1)
    algorithm = data * 8 / (ms * 1e-3) / 1e9
    return algorithm, algorithm if times is None else algorithm * (ranks - 1) / ranks


def readable_size(size_bytes):
    """``1.5 MB``; units of 1024."""
    units = ("B", "KB", "MB", "GB", "TB", "PB")
    value, unit = float(size_bytes), 0
    while value >= 1024 and unit < len(units) - 1:
        value, unit = value / 1024, unit + 1
    return f"{round(value, 2):g} {units[unit]}"
