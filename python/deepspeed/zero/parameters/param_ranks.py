"""Parameters with ranks of their own: some ranks train one, others train another one instead (experts)."""

import functools
import itertools

import torch

from deepspeed import comm as dist
from deepspeed._compat import named_parameters
from deepspeed._native import _C
from deepspeed.comm import mesh, mesh_views
from deepspeed.utils.param_access import shape_of


class ParamRanks:
    """The ranks that train a parameter: its attribute ``ds_ranks``, set on every rank before ``deepspeed.initialize``.

    ``rule`` is the name of a rule of the core (csrc/plan/spaces/), ``groups`` maps the two axes of its fold ("edp" and
    "ep" for experts) to this rank's list along them: ranks of the job, or a group of torch's. A rule has the same ranks
    for all such parameters of a model. ``copies`` is torch's group of those that train the same
    parameter: its first rank's values are what all start from. ``rows``: ``(first, all)`` where the parameter is the
    rows from ``first`` on of a tensor of ``all`` rows, which is what checkpoints have.
    """

    def __init__(self, rule, groups, copies, rows=None):
        self.rule, self.groups, self.copies, self.rows = rule, groups, copies, rows

    def lists(self):
        """``{axis: ranks}``, this rank's list along each axis."""
        return {
            axis: group if isinstance(group, list) else dist.get_all_ranks_from_group(group)
            for axis, group in self.groups.items()
        }


def ranks_of(param):
    """The ``ParamRanks`` of a parameter; None for one that all data-parallel ranks train."""
    return getattr(param, "ds_ranks", None)


def folds_of(params):
    """``{rule: {axis: ranks}}`` of parameters with ranks of their own. ValueError where two mean different ranks by one
    rule."""
    found = {}
    for ranks in filter(None, map(ranks_of, params)):
        lists = ranks.lists()
        if found.setdefault(ranks.rule, lists) != lists:
            raise ValueError(f"two parameters mean different ranks by the rule {ranks.rule!r} in their ds_ranks")
    return found


def row_bounds(rows, ranks):
    """``ranks + 1`` numbers: where the rows of each of ``ranks`` ranks begin that share ``rows`` rows evenly."""
    return [rows * rank // ranks for rank in range(ranks + 1)]


def join_rows(own, ranks):
    """The whole tensor, on all ranks that have rows of it, of this rank's rows ``own``. ``ranks``: the ``ParamRanks`` of
    a parameter whose rows they share evenly. All of them call it."""
    sharers, bounds = ranks.lists()["ep"], row_bounds(ranks.rows[1], len(ranks.lists()["ep"]))
    widths = [end - begin for begin, end in itertools.pairwise(bounds)]
    return _C.gather_widths(mesh_views.tensor_ranks(mesh.group_over(sharers)), own.contiguous(), 0, widths)


def numel_of(param):
    """The elements of a parameter, also of a sharded one whose values are not here."""
    return getattr(param, "ds_numel", param.numel())


def lies_in_rows(param):
    """Whether the elements of a parameter are in memory in the order that they have in files."""
    return hasattr(param, "ds_handle") or param.is_contiguous()


def in_memory_order(value, param):
    """The elements of ``value``, which has the shape of ``param``, in the order in which ``param`` lies in memory: the
    order of pieces. Flat; a view where that is possible."""
    if lies_in_rows(param):
        return value.reshape(-1)
    ordered = torch.empty_strided(param.shape, param.stride(), dtype=value.dtype, device=value.device)
    return ordered.copy_(value).as_strided((value.numel(),), (1,))


# ---- in checkpoints ------------------------------------------------------------------------------------------------


def saved_part(param):
    """``(first element, torch.Size)``: where a parameter begins in the tensor that checkpoints have, and its shape."""
    shape, rows = shape_of(param), getattr(ranks_of(param), "rows", None)
    if rows is None:
        return 0, torch.Size(shape)
    row = torch.Size(shape[1:]).numel()
    return rows[0] * row, torch.Size((rows[1], *shape[1:]))


def own_extent(tensor):
    """``(first element, numel)`` of what this rank has of the tensor that checkpoints have."""
    begin = saved_part(tensor)[0]
    if hasattr(tensor, "ds_handle"):
        return begin + tensor.ds_handle.own_begin, max(0, tensor.ds_handle.own_numel)
    return begin, tensor.numel()


class SavedNames:
    """Names in checkpoints of a module's parameters and buffers: its own, but for experts.

    A module that has ``ds_expert_numbers``, a dict name of a child -> number among the experts of all ranks, is a layer
    of experts: in checkpoints those children are called by their numbers.
    """

    def __init__(self, module):
        self._experts, numbers = {}, {}  # path of an expert -> (number of its layer, its own number)
        for path, sub in module.named_modules(remove_duplicate=False):
            for child, number in (getattr(sub, "ds_expert_numbers", None) or {}).items():
                layer = numbers.setdefault(id(sub), len(numbers))
                self._experts[f"{path}.{child}".lstrip(".")] = layer, int(number)

    def _found(self, parts):
        for end in range(1, len(parts) if self._experts else 0):
            expert = self._experts.get(".".join(parts[:end]))
            if expert is not None:
                yield end, expert

    def __call__(self, name):
        local = name.split(".")
        saved = list(local)
        for end, (_, number) in self._found(local):
            saved[end - 1] = str(number)
        return ".".join(saved)

    def expert(self, name):
        """``(layer, number)`` of the expert that has the parameter or buffer ``name``, the outermost; None for none."""
        return next((expert for _, expert in self._found(name.split("."))), None)

    def numbers(self):
        """Numbers of all experts that this rank has."""
        return {number for _, number in self._experts.values()}


class SavedLayers:
    """Attribute ``ds_saved_layers`` of a module that is a stage of a pipeline: checkpoints have a file for each layer.

    stage, stages: this one's number, how many there are. layers: path of a child -> number of the layer in whose file
    it is. writes: numbers of the layers whose files this stage writes. paths: number -> path, of all layers of all
    stages that are called otherwise than their number. slices: which part of the layers this is, such as ``model_01``.
    """

    def __init__(self, stage, stages, layers, writes, paths, slices=""):
        self.stage, self.stages, self.layers = stage, stages, dict(layers)
        self.writes, self.paths, self.slices = set(writes), dict(paths), slices

    def find(self, name):
        """``(number of the layer, name in its file)`` of a parameter or buffer; None where it is in no layer."""
        parts = name.split(".")
        cuts = ((".".join(parts[:end]), ".".join(parts[end:])) for end in range(1, len(parts)))
        return next(((self.layers[path], rest) for path, rest in cuts if path in self.layers), None)


class ModuleTensors:
    """The tensors of a module by their names: all that checkpoints know of a module.

    params:  name -> parameter, tied ones under each of their names. At ZeRO stage 3 it lends this rank's slice.
    buffers: name -> buffer.
    named:   the ``SavedNames``. layers: the ``SavedLayers`` of a stage of a pipeline, or None.
    differs: whether ranks of one data-parallel group may have different parameters, or call them otherwise.
    """

    def __init__(self, module):
        self.params, self.buffers = dict(named_parameters(module)), dict(module.named_buffers())
        self.named, self.layers = SavedNames(module), getattr(module, "ds_saved_layers", None)
        self.differs = (
            self.layers is not None
            or any(ranks_of(param) is not None for param in self.params.values())
            or any(getattr(sub, "ds_expert_numbers", None) for sub in module.modules())
        )

    def unique(self):
        """``[(name, parameter)]``, tied ones under the first of their names."""
        first = {}
        for name, param in self.params.items():
            first.setdefault(id(param), (name, param))
        return list(first.values())

    def tied(self):
        """dict alias -> first name of the same parameter, as checkpoints call them."""
        first = {id(param): name for name, param in self.unique()}
        firsts = ((name, first[id(param)]) for name, param in self.params.items())
        return {self.named(name): self.named(known) for name, known in firsts if name != known}

    @functools.cached_property
    def copies(self):
        """name -> ranks that have the same: of parameters with ranks of their own, under each of their names, and of
        buffers of experts that have such parameters."""
        params = {name: ranks_of(param).copies for name, param in self.params.items() if ranks_of(param) is not None}
        of_expert = {self.named.expert(name): copies for name, copies in params.items()}
        of_expert.pop(None, None)
        buffers = {name: of_expert.get(self.named.expert(name)) for name in self.buffers}
        return {**params, **{name: copies for name, copies in buffers.items() if copies is not None}}


def broadcast_own_buffers(module):
    """Buffers of experts become those of the first rank that has the expert. Returns all others."""
    copies, rest = ModuleTensors(module).copies, []
    for name, buffer in module.named_buffers():
        if name in copies:
            dist.broadcast(buffer.data, dist.get_global_rank(copies[name], 0), group=copies[name])
        else:
            rest.append(buffer)
    return rest
