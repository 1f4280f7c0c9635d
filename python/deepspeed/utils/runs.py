"""Lists cut into runs that are not too large."""


def runs_of(items, most, size_of):
    """``items`` in runs whose ``size_of`` are at most ``most`` together (None: no bound); an item is never cut."""
    run, held = [], 0
    for item in items:
        size = size_of(item)
        if run and most is not None and held + size > most:
            yield run
            run, held = [], 0
        run.append(item)
        held += size
    if run:
        yield run
