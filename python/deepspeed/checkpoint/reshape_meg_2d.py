"""A grid of pipeline and tensor-parallel ranks, and the same data on a smaller grid."""


class meg_2d_parallel_map:
    """For each cell (pipeline rank, tensor-parallel rank) of a grid a list of data: numbers of old ranks or files."""

    def __init__(self, pp_degree, tp_degree):
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.map = {}

    def _check(self, pp_index, tp_index):
        if not (0 <= pp_index < self.pp_degree and 0 <= tp_index < self.tp_degree):
            raise ValueError(
                f"there is no cell (pp {pp_index}, tp {tp_index}) in a grid of {self.pp_degree} x {self.tp_degree}"
            )

    def add_data(self, pp_index, tp_index, data):
        """Appends the list ``data`` to a cell."""
        self._check(pp_index, tp_index)
        if not isinstance(data, list):
            raise ValueError(f"data of a cell is a list, got {type(data).__name__}")
        self.map.setdefault((pp_index, tp_index), []).extend(data)

    def get_data(self, pp_index=None, tp_index=None):
        """The data of a cell; of a row, a column or the whole grid, end to end, where an index is None."""
        found = []
        for pp in range(self.pp_degree) if pp_index is None else [pp_index]:
            for tp in range(self.tp_degree) if tp_index is None else [tp_index]:
                self._check(pp, tp)
                found += self.map.get((pp, tp), [])
        return found

    def print_data(self, tag):
        """Prints every cell under the heading ``tag``."""
        print_map(tag, self.map)


def print_map(tag, found):
    """Prints the items of a dict under the heading ``tag``."""
    print(tag)
    for key, value in sorted(found.items()):
        print(f"{key} = {value}")


def reshape_meg_2d_parallel(old_pp_degree, old_tp_degree, new_pp_degree, new_tp_degree, verbose=False):
    """The ``meg_2d_parallel_map`` of the new grid: each cell lists the ranks of the old grid whose data it takes.

    Rank r of the old grid is its cell ``(r // old_tp_degree, r % old_tp_degree)``. Neighbouring cells are put together,
    first along the tensor-parallel ranks of a pipeline stage, then along the stages. Raises ValueError when a degree
    grows or does not divide the old one.
    """
    degrees = ("pipeline", old_pp_degree, new_pp_degree), ("tensor-parallel", old_tp_degree, new_tp_degree)
    for what, old, new in degrees:
        if new < 1 or new > old or old % new:
            raise ValueError(f"a grid with {what} degree {old} becomes one with a divisor of that, not {new}")
    made = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    stages, slices = old_pp_degree // new_pp_degree, old_tp_degree // new_tp_degree
    for rank in range(old_pp_degree * old_tp_degree):
        pp, tp = divmod(rank, old_tp_degree)
        made.add_data(pp // stages, tp // slices, [rank])
    if verbose:
        reshape_meg_2d_parallel(old_pp_degree, old_tp_degree, old_pp_degree, old_tp_degree).print_data("old grid")
        made.print_data("new grid")
    return made
