"""The heads of an attention layer that each rank has while ranks exchange parts of a sequence for heads. This module
computes with integers only."""

from deepspeed import _native


def shares(count, ranks):
    """``count`` things in runs, one run a rank, the first runs longer by one: ``[(start, stop)]``."""
    return _native._C.unit_runs(count, ranks)


class HeadPlan:
    """``query`` heads over ``ranks``, whole ones, and for each rank the key/value heads that its query heads read.

    Query head ``i`` reads key/value head ``i // (query // kv)``, as usual. A key/value head that several
    ranks read is copied to each of them (its gradient is the sum over them), and to no other rank.
    With fewer query heads than ranks some ranks have none.
    """

    def __init__(self, query, kv, ranks):
        if query < 1 or kv < 1 or query % kv:
            raise ValueError(
                f"an attention of {query} query heads and {kv} key/value heads: the first must be a "
                "multiple of the second"
            )
        self.query, self.kv, self.ranks, self.readers = query, kv, ranks, query // kv
        self.query_ranges = shares(query, ranks)
        self.kv_ranges = _native._C.shared_runs(self.query_ranges, self.readers, kv)

    def ranges(self):
        """Ranges of query, key and value."""
        return [self.query_ranges, self.kv_ranges, self.kv_ranges]

    def kv_of_queries(self, rank):
        """For each query head of ``rank`` the key/value head that it reads, counted from the rank's first one."""
        first = self.kv_ranges[rank][0]
        return [head // self.readers - first for head in range(*self.query_ranges[rank])]

    def repeats(self, rank):
        """The number of query heads of ``rank`` that read each of its key/value heads, if it is the same for all, else
        None: an attention that repeats key/value heads evenly would pair wrong ones."""
        read = self.kv_of_queries(rank)
        counts = {read.count(head) for head in set(read)}
        return counts.pop() if len(counts) == 1 else None if counts else 0
