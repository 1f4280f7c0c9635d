"""A grid of pipeline and tensor-parallel ranks, and the same data on a smaller grid."""


class meg_2d_parallel_map:
    """For each cell (pipeline rank, tensor-parallel rank) of a grid a list of data: numbers of old ranks or files."""

    def __init__(self, pp_degree, tp_degree):
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.map = {}

    def simple_init(self):
        """Rank r of ``pp_degree * tp_degree`` lies in cell ``(r // tp_degree, r % tp_degree)``."""
        self.map = {
            (pp, tp): [pp * self.tp_degree + tp] for pp in range(self.pp_degree) for tp in range(self.tp_degree)
        }

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
        print(tag)
        for (pp, tp), data in sorted(self.map.items()):
            print(f"({pp}, {tp}) = {data}")


def _check_smaller(what, old, new):
    if new < 1 or new > old or old % new:
        raise ValueError(f"a grid with {what} degree {old} becomes one with a divisor of that, not {new}")


def reshape_meg_2d_parallel(old_pp_degree, old_tp_degree, new_pp_degree, new_tp_degree, verbose=False):
    """The ``meg_2d_parallel_map`` of the new grid: each cell lists the ranks of the old grid whose data it takes.

    Neighbouring cells are put together, first along the tensor-parallel ranks of a pipeline stage, then along the
    stages. Raises ValueError when a degree grows or does not divide the old one.
    """
    _check_smaller("pipeline", old_pp_degree, new_pp_degree)
    _check_smaller("tensor-parallel", old_tp_degree, new_tp_degree)
    old = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    old.simple_init()
    new = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    stages, slices = old_pp_degree // new_pp_degree, old_tp_degree // new_tp_degree
    for pp in range(old_pp_degree):
        for tp in range(old_tp_degree):
            new.add_data(pp // stages, tp // slices, old.get_data(pp, tp))
    if verbose:
        old.print_data("old grid")
        new.print_data("new grid")
    return new
