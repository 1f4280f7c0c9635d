"""Assigns processor cores to ranks."""

import math


def split_cores(cores, pt_reserved_cores_perc):
    """``(torch's, the others)`` of ``cores``: that share of them, rounded up, from the first one on is torch's. Where
    one of the two would have none, both have all."""
    cores = list(cores)
    reserved = math.ceil(len(cores) * pt_reserved_cores_perc)
    return (cores[:reserved], cores[reserved:]) if 0 < reserved < len(cores) else (cores, list(cores))
