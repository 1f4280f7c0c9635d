"""Names of snapshots in the memory of hosts (``deepspeed.checkpoint.save.memory``)."""

from deepspeed.checkpoint.layouts.names import FileName

SNAPSHOT = FileName("step{step}.{began}.{world}")
# The file in which a rank says that all of its files are there: facts of the run, and the files' records.
SAID_BY = FileName("rank_{rank:05d}.whole", r"rank_(?P<rank>\d{5,})\.whole")


def parsed(name):
    """``(step, began, world)`` of the folder of a snapshot, None for another one. ``began``: when its run was loaded or
    saved last, a number of nanoseconds."""
    found = SNAPSHOT.find(name)
    return found and tuple(found.values())


def ranks_in(folder):
    """The ranks whose files are all in the folder of a snapshot."""
    return [found["rank"] for found in SAID_BY.found_in(folder).values()]
