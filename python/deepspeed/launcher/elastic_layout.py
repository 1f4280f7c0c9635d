"""Chooses the hosts of an elastic job that get ranks, and the number of ranks of each."""


def layout(hosts, worlds, least, most=None):
    """``[(host, its slots in use), ...]``, empty where the job cannot run.

    Args:
        hosts: ``[(host, slots), ...]`` that are here, in the order in which they are filled.
        worlds: numbers of ranks that can share the batch; None: any.
        least, most: hosts that must be there, and that may be used (None: all).
    """
    used = hosts[:most]
    if len(used) < least:
        return []
    slots = sum(len(own) for _, own in used)
    left = max((world for world in worlds if world <= slots), default=0) if worlds is not None else slots
    found = []
    for host, own in used:
        if left > 0 and own:
            found.append((host, own[:left]))
            left -= len(found[-1][1])
    return found
