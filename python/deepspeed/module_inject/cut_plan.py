"""The plan of a cut: which layers of a model are cut how, and its execution.

``CutPlan.source`` says who decided: the section ``tensor_parallel`` of the configuration, the model's own plan, a
policy of the script, or the analysis of what the model computes (``tensor_analysis``). Where a rule and the analysis
agree, the analysis adds what rules do not say: the heads, the integers of modules that change, parameters in between.
"""

import dataclasses
import functools

from torch import nn

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.comm import mesh_views
from deepspeed.log import log_dist
from deepspeed.module_inject import probe, tensor_analysis, tp_shard
from deepspeed.module_inject.autotp_config import PartitionType
from deepspeed.module_inject.block_twin import NotAnalysed, features, is_linear, with_tensors
from deepspeed.module_inject.cut_group import Part, change_counts, grained_runs, own_units
from deepspeed.module_inject.cut_sources import ANALYSIS, Source, roles_in, source_of
from deepspeed.module_inject.layers import (
    HiddenParallelEmbedding,
    LinearAllreduce,
    LinearLayer,
    OwnWords,
    SubParamLinearAllreduce,
    SubParamLinearLayer,
    VocabParallelEmbedding,
    VocabParallelLinear,
    cut_embedding,
    cut_param,
    exchange_of,
    set_autotp_mode,
)
from deepspeed.module_inject.split_sequence import check_closed, split_block, splits_of
from deepspeed.module_inject.unsharded import unshard
from deepspeed.module_inject.vocabulary import Vocabulary, vocabulary_of
from deepspeed.utils.random_state import OwnRandomNumbers

# Integers of modules that a rule without an analysis shares, by their published names.
_COUNTS = (
    "n_heads", "inner_dim", "num_heads", "num_kv", "num_attention_heads", "num_attn_heads", "all_head_size",
    "embed_dim", "hidden_size", "num_key_value_heads", "num_kv_heads", "kv_n_heads", "d_model",
    "num_attention_heads_per_partition", "num_multi_query_groups_per_partition", "hidden_size_per_partition",
)  # fmt: skip


@dataclasses.dataclass
class BlockPlan:
    """``groups``: of layers that are cut together, by names in the block. ``ruled``: ``{layer: TPLayerSpec}`` of layers
    that a rule cuts by itself. ``whole``: ``{layer: reason}``. ``given``: what the block is called with on the probe;
    None: it was not called."""

    groups: list
    whole: dict
    given: tuple = None
    ruled: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class CutPlan:
    """The cut of a model. ``blocks``: name of a block -> its ``BlockPlan``; blocks of one kind share it.
    ``outside``: ``{layer: TPLayerSpec}`` of layers outside of blocks. ``summed``: modules whose parameters every rank
    has whole and sees a part of the gradient of, as rules say. ``kept``: ``{layer: reason}`` of layers outside of
    blocks that stay whole against a rule. ``vocabulary``: the head and the embeddings that are cut over the words.
    ``split``: between blocks each rank has a part of every sequence."""

    ranks: int
    blocks: dict
    source: Source
    outside: dict = dataclasses.field(default_factory=dict)
    summed: list = dataclasses.field(default_factory=list)
    kept: dict = dataclasses.field(default_factory=dict)
    vocabulary: Vocabulary = None
    split: bool = False

    def reasons(self):
        """``{layer: reason}`` of layers that stay whole, one block of each kind."""
        found = {f"{name}.{one}": text for name, block in self.kinds().items() for one, text in block.whole.items()}
        return {**found, **self.kept}

    def among(self, names):
        """The plan of a model that has only the modules ``names`` and what is inside of them."""
        names = set(names)

        def own(found):
            return {name: one for name, one in found.items() if name.partition(".")[0] in names}

        summed = [name for name in self.summed if name.partition(".")[0] in names]
        more = {"blocks": own(self.blocks), "outside": own(self.outside), "kept": own(self.kept), "summed": summed}
        return dataclasses.replace(self, **more)

    def kinds(self):
        """``{name of the first block: BlockPlan}`` of each kind of block."""
        first = {}
        for name, one in self.blocks.items():
            first.setdefault(id(one), (name, one))
        return dict(first.values())


def plan_of(model, ranks, settings=None, policy=None, training=True):
    """The ``CutPlan`` of a model for ``ranks`` ranks. ``settings``: the section ``tensor_parallel``, ``policy``: the
    ``injection_policy`` of ``init_inference``. NotAnalysed where nobody says how to cut, and the model does not run on
    a probe."""
    source, blocks = source_of(model, settings, policy), probe.blocks_of(model)
    roles = {} if source.name == ANALYSIS else roles_in(source, model, blocks)
    try:
        calls = probe.calls_of(model, blocks)
    except NotAnalysed:
        if source.name == ANALYSIS:
            raise
        calls = {}
    plans, found = {}, {}
    for name, block in blocks.items():
        kind = probe.kind_of(block)
        if kind not in plans and (kind in calls or roles):
            plans[kind] = _plan_block(name, block, calls.get(kind), ranks, source, roles, training)
        if kind in plans:
            found[name] = plans[kind]
    made = CutPlan(ranks, found, source)
    if training:
        made.vocabulary = vocabulary_of(model, found, ranks, settings)
        made.split = bool(getattr(settings, "split_sequence", False))
    _plan_outside(model, made, roles)
    return made


def _plan_block(name, block, given, ranks, source, roles, training):
    analysed, problem = None, "the model did not run on a probe"
    if given is not None:
        try:
            analysed = tensor_analysis.analyse(block, given, ranks, training)
        except NotAnalysed as error:
            problem = str(error)
    if source.name == ANALYSIS:
        if analysed is None:
            layers = [one for one, module in block.named_modules() if is_linear(module)]
            return BlockPlan([], dict.fromkeys(layers, problem), given)
        return BlockPlan(analysed.groups, analysed.whole, given)
    prefix = f"{name}." if name else ""
    own = {one[len(prefix) :]: spec for one, spec in roles.items() if one.startswith(prefix)}
    layers = {one for one, module in block.named_modules() if is_linear(module)}
    groups = [one for one in analysed.groups if _agree(one, own, layers)] if analysed is not None else []
    taken = {one for group in groups for one in (*group.rows, *group.columns)}
    ruled = {one: spec for one, spec in own.items() if one not in taken and one in layers and _cuts(spec)}
    whole = dict.fromkeys(sorted(layers - taken - set(ruled)), f"{source.name} leaves it whole")
    return BlockPlan(groups, whole, given, ruled)


def _cuts(spec):
    return spec.partition_type is not PartitionType.SKIP


def _agree(group, roles, layers):
    """Whether rules say of all linear layers of a group what the analysis says, which then knows the heads."""
    wanted = {**dict.fromkeys(group.rows, PartitionType.ROW), **dict.fromkeys(group.columns, PartitionType.COLUMN)}
    wanted = {one: kind for one, kind in wanted.items() if one in layers}
    return all(one in roles and roles[one].partition_type is kind for one, kind in wanted.items())


def _plan_outside(model, plan, roles):
    """Fills in what rules say of layers outside of blocks, and of gradients that are summed. A weight that several
    modules have stays whole."""
    owners, inside = {}, tuple(f"{name}." for name in plan.blocks if name)
    for _, module in model.named_modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), set()).add(id(module))
    partial = {
        f"{name}.{one}" for name, block in plan.blocks.items() for group in block.groups for one in group.partial
    }
    for name, spec in roles.items():
        module = model.get_submodule(name)
        if spec.grad_allreduce and not any(f"{name}.{last}" in partial for last in module._parameters):
            plan.summed.append(name)
        worded = plan.vocabulary is not None and name in plan.vocabulary.layers
        if not _cuts(spec) or name.startswith(inside) or "" in plan.blocks or worded:
            continue
        if not is_linear(module) and not isinstance(module, nn.Embedding):
            plan.kept[name] = f"a {type(module).__name__} cannot be cut"
        elif len(owners[id(module.weight)]) > 1:
            plan.kept[name] = "another module has the same weight"
        else:
            plan.outside[name] = spec


def cuts_of(block, plan, ranks):
    """``{parameter: (dimension, TensorCut)}`` of what the analysis cuts of a block."""
    found = {}
    for group in plan.groups:
        for name in group.rows:
            layer = block.get_submodule(name)
            found[f"{name}.weight"] = _inputs(layer), group.cut([Part(features(layer)[0])], ranks)
        for name, parts in group.columns.items():
            layer, cut = block.get_submodule(name), group.cut(parts, ranks)
            found[f"{name}.weight"] = 1 if isinstance(layer, nn.Embedding) else 1 - _inputs(layer), cut
            if getattr(layer, "bias", None) is not None:
                found[f"{name}.bias"] = 0, cut
        found.update({name: (dim, group.cut([part], ranks)) for name, (dim, part) in group.params.items()})
    return found


def _inputs(layer):
    """The dimension of a linear layer's weight that counts its inputs."""
    return int(isinstance(layer, nn.Linear))


# ---- execution ------------------------------------------------------------------------------------------------------
def cut_model(model, plan, group, overlap=False, training=True):
    """Cuts a model in place for this rank of torch's ``group``. Every rank of the group calls it."""
    rank = dist.get_rank(group)
    set_autotp_mode(training)
    splits = splits_of(model, plan.blocks, group) if plan.split else {}
    for name, one in plan.blocks.items():
        block = model.get_submodule(name)
        unshard(block)
        cut_block(block, one, plan.ranks, group, rank, overlap)
        if name in splits:
            split_block(block, name, one, group, *splits[name])
    check_closed(model, splits)
    unshard(model)
    for name, spec in plan.outside.items():
        _cut_by_rule(model, name, spec, group, overlap)
    if plan.vocabulary is not None:
        _cut_vocabulary(model, plan, group, overlap)
    for name in plan.summed:
        for param in model.get_submodule(name).parameters(recurse=False):
            cut_param(param, None, None, group, rank, partial=True)
    cut = sum(len(one.rows) + len(one.columns) for block in plan.blocks.values() for one in block.groups)
    cut += sum(len(block.ruled) for block in plan.blocks.values()) + len(plan.outside)
    log_dist(
        f"Tensor parallelism: {cut} layers of {len(plan.blocks)} blocks are cut over {plan.ranks} ranks, as "
        f"{plan.source.name} says",
        ranks=[0],
    )


def cut_block(block, plan, ranks, group, rank, overlap=False):
    """Cuts one block in place, as its ``BlockPlan`` says."""
    cuts = cuts_of(block, plan, ranks)
    for one in plan.groups:
        for name in (*one.rows, *one.columns):
            layer, cut = block.get_submodule(name), cuts[f"{name}.weight"][1]
            if isinstance(layer, nn.Embedding):
                cut_embedding(layer, cut, group, rank)
            else:
                kind = LinearAllreduce if name in one.rows else LinearLayer
                replace_module(block, name, kind(layer, group, name=name, cut=cut, overlap=overlap))
        for name in one.params:
            cut_param(_param(block, name), *cuts[name], group, rank)
        for name in one.partial:
            cut_param(_param(block, name), None, None, group, rank, partial=True)
        change_counts(block, one, ranks, rank)
        if one.draws:
            own = OwnRandomNumbers(rank)
            block.get_submodule(one.draws[0]).register_forward_hook(own.begin)
            block.get_submodule(one.draws[1]).register_forward_pre_hook(own.end)
    for name, spec in plan.ruled.items():
        _cut_by_rule(block, name, spec, group, overlap)
    _share_counts(block, plan.ruled, ranks, rank)
    places = {place: (None, one) for one in plan.groups for place in one.shared}
    places.update({place: (dim, one) for one in plan.groups for place, dim in one.arguments})
    results = {place: (dim, one) for one in plan.groups for place, dim in one.results}
    if results:
        block.forward = functools.partial(_with_whole_results, block.forward, results, ranks, group)
    if places:
        exchange = exchange_of(group, overlap)
        block.forward = functools.partial(_with_own_arguments, block.forward, places, ranks, rank, exchange)


def _cut_vocabulary(model, plan, group, overlap):
    """Cuts the head and the embeddings that read its words. A weight that they share is cut once."""
    vocabulary, made = plan.vocabulary, {}
    cut = _C.TensorCut([vocabulary.words], [grained_runs(vocabulary.words, plan.ranks, 1)])
    for name in vocabulary.embeddings:
        layer = model.get_submodule(name)
        if layer not in made and type(layer) is nn.Embedding:  # models name one embedding several times
            made[layer] = VocabParallelEmbedding(layer, group, name=name, cut=cut)
        elif layer not in made:
            made[layer], layer.forward = layer, OwnWords(layer, cut, group, name).forward_of(layer)
        replace_module(model, name, made[layer])
    head, more = model.get_submodule(vocabulary.head), {"name": vocabulary.head, "overlap": overlap, "cut": cut}
    made = VocabParallelLinear(head, group, overwrite=vocabulary.overwrite, **more)
    replace_module(model, vocabulary.head, made)


def _cut_by_rule(model, name, spec, group, overlap):
    """Replaces a layer as a rule says, by sizes alone."""
    layer, more = model.get_submodule(name), {"name": name, "overlap": overlap}
    dim, shape = spec.get_partition_dim(), spec.shape
    if isinstance(layer, nn.Embedding):
        made = HiddenParallelEmbedding(layer, group, name=name)
    elif spec.partition_type is PartitionType.ROW:
        made = (
            LinearAllreduce(layer, group, **more)
            if shape is None
            else SubParamLinearAllreduce(layer, group, shape, dim, **more)
        )
    elif shape is None:
        made = LinearLayer(layer, group, gather_output=spec.gather_output, **more)
    else:
        made = SubParamLinearLayer(layer, group, shape, dim, gather_output=spec.gather_output, **more)
    replace_module(model, name, made)


def _share_counts(block, ruled, ranks, rank):
    """Gives modules with layers that a rule has cut this rank's share of the integers with published names."""
    owners = {name.rpartition(".")[0] for name, spec in ruled.items() if not spec.gather_output}
    for owner in owners:
        share_counts(block.get_submodule(owner), ranks, rank, owner)


def share_counts(module, ranks, rank, name=None):
    """Gives a module a rank's share of the integers with published names. ``name``: the module's, for the rules of
    sizes (``tp_shard``)."""
    for attribute in _COUNTS:
        value = vars(module).get(attribute)
        if type(value) is int and value >= ranks:
            setattr(module, attribute, tp_shard.get_shard_size(value, ranks, name, rank))


def replace_module(model, name, made):
    """Puts ``made`` in place of the submodule called ``name``."""
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, made)


def _param(block, name):
    owner, _, last = name.rpartition(".")
    return block.get_submodule(owner)._parameters[last]


def _with_whole_results(forward, places, ranks, group, *args, **kwargs):
    """Calls a block, and makes those of its results whole that have something for each head."""

    def whole(place, tensor):
        if place not in places:
            return tensor
        dim, units = places[place]
        sizes = [stop - start for start, stop in units.runs(ranks)]
        if dim >= tensor.dim() or tensor.shape[dim] != sizes[dist.get_rank(group)]:
            return tensor  # the block returns other things than on the probe
        return _C.gather_widths(mesh_views.tensor_ranks(group), tensor.contiguous(), dim, sizes)

    return with_tensors(forward(*args, **kwargs), whole)


def _with_own_arguments(forward, places, ranks, rank, exchange, *args, **kwargs):
    """Calls a block with this rank's part of the arguments that have something for each head. The gradients of these
    and of other arguments that only heads see are summed over the ranks. An argument that the block returns as it is
    comes back whole."""
    whole = {}  # of this rank's part -> both, which stay alive meanwhile

    def own(place, tensor):
        if place not in places:
            return tensor
        dim, group = places[place]
        if dim is not None and tensor.shape[dim] % group.units:
            return tensor  # another cut block gave it: it has this rank's heads
        made = exchange.copy_in(tensor)
        made = made if dim is None else own_units(made, dim, group, ranks, rank)
        whole[id(made)] = made, tensor
        return made

    args, kwargs = with_tensors((args, kwargs), own)
    made = forward(*args, **kwargs)
    return with_tensors(made, lambda _, tensor: whole.get(id(tensor), (tensor, tensor))[1])
