"""Methods by which ranks share an attention: some exchange tokens for heads, others pass keys and values in a ring."""

from deepspeed.comm.hosts import runs_of_hosts

METHODS = ("auto", "ulysses", "ring", "both")


def _divisors(ranks):
    return [size for size in range(1, ranks + 1) if ranks % size == 0]


def exchanging(method, heads, hosts, name="the model"):
    """The number of neighbours that exchange tokens for heads; groups of this size form a ring. ``heads``: of queries.
    ``hosts``: of each rank. ``name``: of the model. ValueError, with methods that work, if this one is impossible."""
    ranks = len(hosts)
    if method not in METHODS:
        raise ValueError(f"sequence_parallel.method is {method!r}: it must be one of {', '.join(METHODS)}")
    fitting = [size for size in _divisors(ranks) if size <= heads]
    near = [size for size in fitting if runs_of_hosts(hosts) % size == 0]
    if method == "ring" or ranks == 1:
        return 1
    if method == "ulysses":
        if heads < ranks:
            raise ValueError(
                f'sequence_parallel.method "ulysses" needs a head for each rank: the attention of {name} has {heads} '
                f"heads for {ranks} ranks. Sizes up to {heads} work, and methods auto, ring and both"
            )
        return ranks
    if method == "both":
        inner = [size for size in near if 1 < size < ranks]
        if not inner:
            works = [size for size in range(4, 65) if any(1 < one < size and one <= heads for one in _divisors(size))]
            sizes = ", ".join(map(str, works[:4])) if works else "no sizes"
            raise ValueError(
                f'sequence_parallel.method "both" needs neighbours on one host that exchange heads, and a ring of '
                f"their groups: {ranks} ranks with {heads} heads in the attention of {name} make none. {sizes} ... "
                "ranks work, and method auto"
            )
        return max(inner)
    return max(near)


def said(method, size, ranks, heads):
    """A line for the log about the chosen method."""
    ways = {1: "a ring of all", ranks: "an exchange of tokens for heads among all"}
    how = ways.get(size, f"an exchange of tokens for heads among {size} neighbours, a ring of {ranks // size} groups")
    return f"sequence_parallel.method {method}: {ranks} ranks share attention of {heads} heads by {how}"
