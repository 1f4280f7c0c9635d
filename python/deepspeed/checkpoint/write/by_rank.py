"""Checkpoints of models whose ranks do not all have the same parameters: experts, and others with ranks of their own.
Files of experts' weights; without ZeRO optimizer states by name; the table of the ranks that have each parameter."""

import collections
import itertools

from deepspeed import comm as dist
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.write.ranks import Ranks
from deepspeed.comm.agreement import attempt
from deepspeed.zero.gathers.gathered import GatheredParameters
from deepspeed.zero.parameters.param_ranks import join_rows, ranks_of
from deepspeed.zero.parameters.sharded_parameter import is_sharded
from deepspeed.zero.states.named_states import OWN_PARAMS, joined_tables, table_of


def saves(run, copies):
    """Whether this rank is the one that saves what the ranks of the group ``copies`` have alike (None: all)."""
    return run.ranks.dp_rank == 0 if copies is None else dist.get_rank(copies) == 0


def wide_names(run):
    """Names in checkpoints of the parameters that other model-parallel ranks hold parts of, too: the ranks that train
    one are not all of this rank's data-parallel group. None in a pipeline."""
    known = set(run.ranks.dp_ranks)
    return {
        run.weights.named(name)
        for name, param in (run.weights.params.items() if run.weights.layers is None else ())
        if ranks_of(param) is not None and not known.issuperset(itertools.chain(*ranks_of(param).lists().values()))
    }


# One rank's part of a save, as all ranks hear of it.
_Told = collections.namedtuple("_Told", "mp_rank dp_rank table files buffers wide")


class PartsByRank:
    """The parts of one save, by rank; every rank makes one.

    named:     the ``SavedNames``.
    described: value of the model file's key, None for a model of which all ranks have the same.
    buffers:   names of the buffers of all ranks.
    files:     name -> function that gives the value, of this rank's files beside the model's and the optimizer's.
    """

    def __init__(self, run, exclude_frozen_parameters=False):
        self.named, self.described, self.files = run.weights.named, None, {}
        self.buffers = [self.named(name) for name in run.weights.buffers]
        self._layers = run.weights.layers
        self._elsewhere = set()  # names of entries of the module that the model file leaves out
        if run.weights.differs:
            self._divide(run, exclude_frozen_parameters)

    def module_of(self, state):
        """The entries of a module's state dict that the model file has, by their names there."""
        if self.described is None:
            return state
        if self._layers is not None and self._elsewhere.issuperset(state):
            return None
        made = type(state)((self.named(name), value) for name, value in state.items() if name not in self._elsewhere)
        if hasattr(state, "_metadata"):
            made._metadata = state._metadata
        return made

    def _divide(self, run, exclude_frozen):
        ranks, before = Ranks(run.ranks, False), 0
        # A rank that raises still tells the others, which wait for it.
        layers, error = attempt(lambda: self._expert_layers(run))
        layers = layers or []
        if self._layers is not None:  # layers of experts are counted over all stages
            counts = dict(ranks.gather([self._layers.stage, len(layers)]))
            before = sum(counts[stage] for stage in range(self._layers.stage))
        self._numbers = {layer: before + number for number, layer in enumerate(layers)}
        made, failed = attempt(lambda: (self._of_modules(run, exclude_frozen), self._states(run)))
        (experts, states), error = made or ({}, None), error or failed
        mp_rank = run.ranks.mp_rank
        own = [mp_rank, run.ranks.dp_rank, table_of(states), list(experts), self.buffers, sorted(wide_names(run))]
        everyones = [_Told(*part) for part in ranks.agree(error, "nothing is saved", own, own=True)]
        with_zero, told, tables = run.policy.saved.optimizer_by_rank, {}, {}  # by model-parallel rank
        for part in sorted(everyones, key=lambda part: part.dp_rank):
            told.setdefault(part.mp_rank, []).append(part)
        for number, parts in told.items():
            tables[number] = {part.dp_rank: part.table for part in parts if part.table or with_zero}
        told, writers = told[mp_rank], tables.pop(mp_rank)
        wide = {name for part in everyones for name in part.wide}
        listed = {name for part in (everyones if wide else told) for name in part.files if "_expert_" in name}
        self.described = {"table": joined_tables(list(writers.values())), "experts": sorted(listed)}
        if any(names.FROZEN_ROWS(mp_rank=mp_rank) in part.files for part in told):
            self.described["frozen_rows"] = True
        if wide:
            self.described["beside"] = {
                number: {name: about for name, about in joined_tables(list(found.values())).items() if name in wide}
                for number, found in sorted(tables.items())
            }
        if self._layers is not None:
            paths, slices = self._layers.paths, self._layers.slices
            written = {name for part in told for name in part.files}
            layers = [layer for layer in sorted(self._layers.writes) if names.layer_states(layer, slices) in written]
            self.described["layers"] = {layer: paths.get(layer, str(layer)) for layer in layers}
            if not with_zero and not writers:
                groups = map(zip, run.group_names, run.trained_groups)
                self.described["groups"] = [[[name, list(param.shape)] for name, param in group] for group in groups]
        self.buffers = list(dict.fromkeys(name for part in told for name in part.buffers))
        self.files = {name: lambda value=value: value for name, value in experts.items()}
        if states is not None and not with_zero:
            number = list(writers).index(run.ranks.dp_rank)
            whole = {"optimizer": {"param_groups": run.options, "extra": run.optimizer_values, OWN_PARAMS: states}}
            self.files[names.EXPERT_OPTIM_STATES(expp_rank=number, mp_rank=mp_rank)] = lambda: whole

    def _expert_layers(self, run):
        """Numbers of the layers of experts that this stage writes."""
        written = (self.named.expert(name) for name in run.module_state() if self._is_written(name))
        return sorted({expert[0] for expert in written if expert is not None})

    def _is_written(self, name):
        """Whether it is for this stage to save what all stages with the same layer have."""
        layer = self._layers.find(name) if self._layers is not None else None
        return layer is None or layer[0] in self._layers.writes

    def _states(self, run):
        """The states that this rank saves by name: with ZeRO of what only some ranks train, else all that it saves."""
        if run.states is None:
            return None
        ranks = [ranks_of(param) for _, param in run.trained()]
        if run.policy.saved.optimizer_by_rank or not any(ranks):
            return run.states.by_name()
        takes = {index for index, own in enumerate(ranks) if saves(run, getattr(own, "copies", None))}
        return run.states.by_name(takes.__contains__)

    def _of_modules(self, run, exclude_frozen):
        """name of a file -> what this rank writes into it: weights and buffers of an expert, or of a layer of a
        pipeline; at stage 3, where masters stand for weights, its buffers."""
        params, trained, copies, found = run.weights.params, run.trained_ids(), run.weights.copies, {}
        frozen = self._frozen_experts(params, trained)
        for name, value in run.module_state(exclude_frozen_parameters=exclude_frozen).items():
            expert, param = self.named.expert(name), params.get(name)
            own = param is not None and name in copies
            if own and id(param) not in trained and expert is None and ranks_of(param).rows is not None:
                whole = self._whole_rows(run, param)
                if run.ranks.dp_rank == 0:
                    found.setdefault(names.FROZEN_ROWS(mp_rank=run.ranks.mp_rank), {})[self.named(name)] = whole
                self._elsewhere.add(name)
                continue
            value = frozen.get(id(param), value)
            cut = param is not None and run.policy.shards_params and id(param) not in frozen
            layer = self._layers.find(name) if self._layers is not None else None
            if own or ((expert is not None or layer is not None) and not cut):
                self._elsewhere.add(name)
            if expert is not None and not cut:
                if saves(run, copies.get(name)) and self._is_written(name):
                    numbers = {"layer": self._numbers[expert[0]], "expert": expert[1], "mp_rank": run.ranks.mp_rank}
                    found.setdefault(names.EXPERT_STATES(**numbers), {})[self.named(name)] = value
            elif own and id(param) not in trained:
                raise ValueError(
                    f"parameter '{name}' has ranks of its own (ds_ranks), and is neither trained nor an expert's "
                    "(ds_expert_numbers) nor some rows: files of torch.save cannot hold it. Set "
                    '"checkpoint": {"writer": {"format": "safetensors"}}'
                )
            elif layer is not None and not (cut or own) and self._is_written(name) and saves(run, None):
                found.setdefault(names.layer_states(layer[0], self._layers.slices), {})[layer[1]] = value
        return found

    @staticmethod
    def _whole_rows(run, param):
        """The rows of all ranks of a frozen weight that they share, on the host. All ranks call it."""
        with GatheredParameters([param] if is_sharded(param) else []):
            return join_rows(param.detach().to(run.device), ranks_of(param)).to("cpu")

    def _frozen_experts(self, params, trained):
        """id -> whole value of experts' parameters with ranks of their own that are in slices and are not trained: no
        master stands for them, so that their files have them. All ranks call it."""
        cut = {
            id(param): param
            for name, param in params.items()
            if is_sharded(param) and ranks_of(param) is not None and id(param) not in trained
            if self.named.expert(name) is not None
        }
        with GatheredParameters(list(cut.values())):
            return {key: param.detach().clone() for key, param in cut.items()}
