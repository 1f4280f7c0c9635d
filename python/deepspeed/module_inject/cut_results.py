"""Results of a block that have something for each head, of which a cut block makes those of this rank's heads. An
example is the position bias that the first block of T5 looks up for all blocks."""


def results_of(reach, group, made, chosen):
    """``[(place, dimension)]`` of those of ``made``, ``(place, tensor)`` of a block's results, that the layers
    ``chosen`` of the ``Group`` reach. Along the dimension each unit reads its own outputs only. None: one result does
    not."""
    found = []
    for place, one in made:
        if not one.is_floating_point() or not {("layer", name) for name in chosen} & reach.of(one).keys():
            continue
        dims = [dim for dim, size in enumerate(one.shape) if size == group.units]
        dim = next((dim for dim in dims if _is_by_unit(reach, group, one.movedim(dim, -1), chosen)), None)
        if dim is None:
            return None
        found.append((place, dim))
    return found


def _is_by_unit(reach, group, made, chosen):
    for unit in range(group.units):
        for (kind, name), grad in reach.of(made, slice(unit, unit + 1)).items():
            if kind == "layer" and name not in chosen:
                return False
            if kind == "layer" and not _inside(grad, group, group.columns[name], unit):
                return False
    return True


def _inside(grad, group, parts, unit):
    """Whether only outputs of one unit have a gradient."""
    left, first = grad != 0, 0
    for part in parts:
        start, stop = group.run(part, unit, unit + 1)
        left[..., first + start : first + stop] = False
        first += part.size
    return not bool(left.any())
