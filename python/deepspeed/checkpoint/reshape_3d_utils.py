"""Pipeline, tensor and data-parallel degrees of a checkpoint, and which old ranks each rank of a smaller grid reads."""

from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.reshape_meg_2d import meg_2d_parallel_map, reshape_meg_2d_parallel
from deepspeed.checkpoint.reshape_utils import get_layer_files, get_zero_files, partition_data

PP_DIM = "PP"
TP_DIM = "TP"
DP_DIM = "DP"


class model_3d_desc:
    """Degrees of the three kinds of parallelism. Rank of (pp, tp, dp): ``(dp * pp_degree + pp) * tp_degree + tp``."""

    def __init__(self, pp_degree=1, tp_degree=1, dp_degree=1):
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.dp_degree = dp_degree

    def reshape(self, target_3d_desc, verbose=False):
        """A ``meg_2d_parallel_map`` for each data-parallel rank of the target: the old ranks of each of its cells.

        Raises ValueError when a degree would grow or does not fit; see ``can_reshape``.
        """
        possible, errors = self.can_reshape(target_3d_desc)
        if not possible:
            raise ValueError("; ".join(errors))
        grid = reshape_meg_2d_parallel(
            self.pp_degree, self.tp_degree, target_3d_desc.pp_degree, target_3d_desc.tp_degree, verbose
        )
        # Every cell takes its old cells from all old data-parallel ranks, and shares them out among the new ones.
        cells = unflatten_dp_dimension(flatten_dp_dimension(grid, self.pp_degree * self.tp_degree, self.dp_degree),
                                       target_3d_desc.dp_degree)  # fmt: skip
        if verbose:
            for rank, cell in enumerate(cells):
                cell.print_data(f"data-parallel rank {rank}")
        return cells

    def get_desc(self):
        return f"{PP_DIM},{TP_DIM},{DP_DIM} = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self):
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index, tp_index, dp_index):
        """``(True, [])`` when such a rank exists, else ``(False, [why, ...])``."""
        errors = [
            f"{dim} index {index} is not below its degree {degree}"
            for dim, index, degree in (
                (PP_DIM, pp_index, self.pp_degree),
                (TP_DIM, tp_index, self.tp_degree),
                (DP_DIM, dp_index, self.dp_degree),
            )
            if not 0 <= index < degree
        ]
        return not errors, errors

    def can_reshape(self, target_3d_desc):
        """``(True, [])`` when no degree grows and each divides the old one, else ``(False, [why, ...])``."""
        errors = []
        for dim, old, new in (
            (PP_DIM, self.pp_degree, target_3d_desc.pp_degree),
            (TP_DIM, self.tp_degree, target_3d_desc.tp_degree),
            (DP_DIM, self.dp_degree, target_3d_desc.dp_degree),
        ):
            if new < 1 or new > old:
                errors.append(f"{dim} degree {old} cannot become {new}: only a smaller grid can be made")
            elif dim != DP_DIM and old % new:
                errors.append(f"{dim} degree {old} is no multiple of {new}")
        return not errors, errors


def flatten_dp_dimension(meg_2d_map, src_2d_size, dp_degree):
    """The grid with the old ranks of all data-parallel ranks in each cell; ``src_2d_size``: cells of the old grid."""
    flat = meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree)
    for pp in range(flat.pp_degree):
        for tp in range(flat.tp_degree):
            for cell in meg_2d_map.get_data(pp, tp):
                flat.add_data(pp, tp, [cell + dp * src_2d_size for dp in range(dp_degree)])
    return flat


def unflatten_dp_dimension(meg_2d_map, dp_degree):
    """A grid for each of ``dp_degree`` ranks with its equal part of each cell."""
    grids = [meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree) for _ in range(dp_degree)]
    for pp in range(meg_2d_map.pp_degree):
        for tp in range(meg_2d_map.tp_degree):
            for grid, part in zip(grids, partition_data(meg_2d_map.get_data(pp, tp), dp_degree), strict=True):
                grid.add_data(pp, tp, part)
    return grids


def get_model_3d_descriptor(dir):
    """The ``model_3d_desc`` of the ranks that wrote the files of ``dir``.

    The tensor-parallel degree of a pipeline is read off its layer files; without layer files all model-parallel ranks
    are tensor-parallel ones. ZeRO stage 3 has one model file for each rank; there the optimizer files tell.
    """
    zero_files = get_zero_files(dir)
    layers = get_layer_files(dir)
    files = [*names.MODEL_STATES.found_in(dir).values(), *names.OPTIM_STATES.found_in(dir).values()]
    ranks = {known["mp_rank"] for known in files}
    mp_degree = max(1, len(ranks))
    tp_degree = len({tp for _, tp in layers}) if layers else mp_degree
    dp_degree = max(1, len(zero_files) // mp_degree)
    return model_3d_desc(max(1, mp_degree // tp_degree), tp_degree, dp_degree)
