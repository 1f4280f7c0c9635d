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
        size, target = self.pp_degree * self.tp_degree, target_3d_desc
        cells = [meg_2d_parallel_map(target.pp_degree, target.tp_degree) for _ in range(target.dp_degree)]
        for coord, olds in grid.map.items():
            ranks = [old + dp * size for old in olds for dp in range(self.dp_degree)]
            for cell, part in zip(cells, partition_data(ranks, target.dp_degree), strict=True):
                cell.add_data(*coord, part)
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
                errors.append(f"{dim} degree {old} is not a multiple of {new}")
        return not errors, errors


def get_model_3d_descriptor(dir):
    """The ``model_3d_desc`` of the ranks that wrote the files of ``dir``.

    The tensor-parallel degree of a pipeline is read off its layer files; without layer files all model-parallel ranks
    are tensor-parallel ones. ZeRO stage 3 has one model file for each rank; there the optimizer files tell.
    """
    zero_files = get_zero_files(dir)
    layers = get_layer_files(dir)
    files = [*names.MODEL_STATES.found_in(dir).values(), *names.OPTIM_STATES.found_in(dir).values()]
    mp_degree = max(1, len({known["mp_rank"] for known in files}))
    tp_degree = len({tp for _, tp in layers}) if layers else mp_degree
    dp_degree = max(1, len(zero_files) // mp_degree)
    return model_3d_desc(max(1, mp_degree // tp_degree), tp_degree, dp_degree)
