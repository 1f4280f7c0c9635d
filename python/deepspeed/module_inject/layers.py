"""Linear layers of which each rank of a group has a slice (tensor parallelism), under their published names.

A layer that is cut along its outputs (``LinearLayer``) reads a tensor that all ranks have alike and gives this rank's
channels; a layer that is cut along its inputs (``LinearAllreduce``) reads this rank's channels and gives the sum over
the ranks: Shoeybi et al., "Megatron-LM" (2019). A parameter stays the same object while its values become this rank's
slice; ``cut_param`` writes on it which slice that is (``ParamCut``).
"""

import functools

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.comm import mesh, mesh_views
from deepspeed.module_inject import tp_shard, universal_info
from deepspeed.module_inject.universal_info import (  # noqa: F401 (published here)
    _build_param_uc_restore_meta,
    _get_param_uc_conversion_meta,
    _subparam_shard_widths,
    collect_autotp_universal_checkpoint_info,
)
from deepspeed.module_inject.vocab_logits import VocabLogits
from deepspeed.sequence.vocab_slice import VocabSlice
from deepspeed.utils import tensor_slices
from deepspeed.utils.param_cut import ParamCut, cut_of, join_over

_mode = {"training": False}


def set_autotp_mode(training=False):
    """Says whether layers that are made from now on are made for training; ``tp_model_init`` and ``initialize`` do."""
    _mode["training"] = training


def is_autotp_training_mode():
    """The last value that ``set_autotp_mode`` got."""
    return _mode["training"]


def exchange_of(group, overlap=False):
    """The native ``TensorExchange`` over torch's ``group``; layers that read one tensor have to share it."""
    ranks = mesh_views.tensor_ranks(group)
    made = mesh.made_here().tensor_exchanges.setdefault(ranks, {})
    return made.setdefault(overlap, _C.TensorExchange(ranks, overlap))


# ---- parameters -----------------------------------------------------------------------------------------------------
def cut_param(param, dim, cut, group, rank, partial=False, kind="column"):
    """Keeps this rank's slice of a parameter, in place, and notes which one that is. ``kind``: "column" or "row", how
    its layer is cut. In training mode the gradients of copies are summed."""
    made, earlier = ParamCut(dim, cut, group, rank, partial), cut_of(param)
    is_cut = earlier is not None and cut is not None and earlier.cut is cut and earlier.dim == dim
    if is_cut and param.data.shape[dim] != cut.size():
        return  # another layer has the same parameter
    with torch.no_grad():
        param.data = made.own(param.data).clone()
    param.ds_param_cut = made
    if dim is not None:
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1
        param.ds_tensor_copies = not cut.owned(rank) and cut.width(rank) > 0
        universal_info.note(param, made, kind)
    if is_autotp_training_mode() and earlier is None:  # a parameter that was cut before has its sum
        sum_over_holders(param)


def sum_over_holders(param):
    """Lets the gradient of a parameter be the sum over the ranks that have the same elements of it and use them for
    different results."""
    made = cut_of(param)
    if made.partial:
        _C.sum_gradients(param, mesh_views.tensor_ranks(made.group))
    elif made.cut is not None and made.cut.copied():
        ranks = dist.get_all_ranks_from_group(made.group)
        sharing = mesh.group_over([ranks[one] for one in made.cut.holders(made.rank)])
        _C.sum_gradients(param, mesh_views.tensor_ranks(sharing))


# ---- layers ---------------------------------------------------------------------------------------------------------
def _is_transposed(module):
    """Whether the weight has the shape (inputs, outputs), as that of GPT-2's ``Conv1D``."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") or getattr(module, "transposed", False)


class TensorParallel_Layer(nn.Module):
    """A linear layer of which this rank has a slice. ``module``: the whole layer, whose parameters become this rank's.

    ``mp_group``: torch's group of the ranks that share it; None: this rank alone. Keywords: ``name``, for messages and
    for the published rules of sizes; ``cut``: the native ``TensorCut``, in place of these rules; ``overlap``: the
    all-reduce of the input's gradient runs while the weight's is computed; ``skip_partition``: the parameters are
    slices already.
    """

    along_outputs = True
    split = None  # a SequenceSplit: each rank has a part of every sequence outside of cut layers

    def __init__(self, module, mp_group=None, name=None, cut=None, overlap=False, skip_partition=False):
        super().__init__()
        self.mp_group, self.name = mp_group, name
        self.tp_world_size = 1 if mp_group is None else dist.get_world_size(mp_group)
        self.tp_index = 0 if mp_group is None else dist.get_rank(mp_group)
        self.transposed = _is_transposed(module)
        self.is_training_mode, self.overlap = is_autotp_training_mode(), overlap
        self.weight, self.bias = module.weight, getattr(module, "bias", None)
        self.exchange = exchange_of(mp_group, overlap)
        self.dim = int(self.along_outputs == self.transposed)  # the dimension of the weight that is cut
        size = getattr(self.weight, "ds_shape", self.weight.shape)[self.dim]
        self.cut = self._cut_of(size) if cut is None else cut
        if not skip_partition:
            self._tp_partition([self.weight, self.bias])
        self._set_features()
        self.train(module.training)

    def _cut_of(self, size):
        """The ``TensorCut`` of ``size`` elements by the published rules."""
        return even_cut([size], self.tp_world_size, self.name)

    def _set_features(self):
        inside, outside = self.weight.shape if self.transposed else reversed(self.weight.shape)
        self.in_features, self.out_features = inside, outside

    def _is_cut(self, param, index):
        return param is not None and (index == 0 or self.along_outputs)

    def _tp_partition(self, params_list):
        """Keeps this rank's slices of ``[weight, bias]``, which are whole."""
        for index, param in enumerate(params_list):
            if self._is_cut(param, index):
                dim, kind = self.dim if index == 0 else 0, "column" if self.along_outputs else "row"
                cut_param(param, dim, self.cut, self.mp_group, self.tp_index, kind=kind)

    @torch.no_grad()
    def gather_params(self, params_list):
        """Makes ``[weight, bias]`` whole on every rank; ``_tp_partition`` undoes it. Every rank calls it."""
        for index, param in enumerate(params_list):
            if self._is_cut(param, index):
                param.data_partition = param.data
                param.data = cut_of(param).join(param.data)

    def uneven_partition(self, params_list):
        """The published name of ``_tp_partition`` for sizes that the ranks do not divide."""
        self._tp_partition(params_list)

    def _own(self, x, bias):
        weight = self.weight.t() if self.transposed else self.weight
        return nn.functional.linear(x, weight, bias)

    def extra_repr(self):
        return f"in_features={self.in_features}, out_features={self.out_features}, ranks={self.tp_world_size}"


def even_cut(sizes, ranks, name=None, count=None):
    """The ``TensorCut`` of sub-parameters of ``sizes``, each cut by the published rules (``tp_shard``)."""
    runs = []
    for size in sizes:
        ends = [0]
        for width in tp_shard.get_shard_size_list(size, ranks, name, count):
            ends.append(ends[-1] + width)
        runs.append(list(zip(ends, ends[1:])))
    return _C.TensorCut(list(sizes), runs)


class LinearLayer(TensorParallel_Layer):
    """A linear layer that is cut along its outputs. ``gather_output``: it gives all channels, on every rank."""

    def __init__(self, module, mp_group=None, skip_partition=False, gather_output=False, **kwargs):
        super().__init__(module, mp_group, skip_partition=skip_partition, **kwargs)
        self.gather_output = gather_output

    def forward(self, input):
        """input: (..., inputs); result: (..., this rank's outputs), or all of them."""
        casts = torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()
        weight = self.weight.t() if self.transposed else self.weight
        if self.overlap and not casts:
            made = self.exchange.linear(input, weight, self.bias)
        else:
            copied = self.exchange.copy_in(input) if self.split is None else self.split.gather(input)
            made = nn.functional.linear(copied, weight, self.bias)
        if not self.gather_output or self.tp_world_size == 1:
            return made
        return join_over(self.mp_group, self.cut, made, -1)

    @classmethod
    def from_weights(cls, weight_shape=None, dtype=torch.half, weight=None, bias=None, gather_output=False):
        """A layer of one rank with these parameters, or with an empty weight of ``weight_shape``."""
        if weight is None:
            weight = torch.empty(weight_shape, dtype=dtype)
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        module.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
        module.bias = None if bias is None else nn.Parameter(bias)
        return cls(module, gather_output=gather_output)


class LinearAllreduce(TensorParallel_Layer):
    """A linear layer that is cut along its inputs. The bias, which every rank has whole, is added once, to the sum."""

    along_outputs = False

    def __init__(self, module, mp_group, **kwargs):
        super().__init__(module, mp_group, **kwargs)

    def forward(self, input):
        """input: (..., this rank's inputs); result: (..., outputs), on every rank."""
        part = self._own(input, None)
        made = self.exchange.sum_out(part) if self.split is None else self.split.scatter(part)
        return made if self.bias is None else made + self.bias.to(made.dtype)  # autocast computes in another type


class LinearAllreduceWithReplicatedInput(LinearAllreduce):
    """A linear layer that is cut along its inputs and reads all of them: each rank takes its own."""

    def forward(self, input):
        """input: (..., all inputs); result: (..., outputs), on every rank."""
        copied = self.exchange.copy_in(input)
        return super().forward(tensor_slices.narrow(copied, copied.dim() - 1, self.cut, self.tp_index))


class LmHeadLinearAllreduce(LinearAllreduceWithReplicatedInput):
    """A head, whose outputs are the words, that is cut along its inputs."""


class ScatterToTensorParallelRegion:
    """``ScatterToTensorParallelRegion.apply(mp_group, input)``: this rank's part of the last dimension of ``input``,
    which all ranks of torch's ``mp_group`` have alike. The gradient is gathered from the ranks."""

    @staticmethod
    def apply(mp_group, input):
        """input: (..., features); result: (..., this rank's features)."""
        cut = even_cut([input.shape[-1]], dist.get_world_size(mp_group))
        widths = [cut.width(rank) for rank in range(cut.ranks())]
        return _C.split_widths(mesh_views.tensor_ranks(mp_group), input, input.dim() - 1, widths)


class _SubParams(TensorParallel_Layer):
    """``shape``: of the whole weight, in which a tuple stands for the sizes of sub-parameters that lie end to end along
    ``partition_dim``, and a number smaller than that dimension for this many equal ones. Each is cut on its own."""

    def __init__(self, module, mp_group, shape, partition_dim, **kwargs):
        self.shape, self.partition_dim = shape, partition_dim
        super().__init__(module, mp_group, **kwargs)

    def _cut_of(self, size):
        return even_cut(sub_sizes(self.shape, self.partition_dim, size, self.name), self.tp_world_size, self.name)


def sub_sizes(shape, dim, size, name):
    """Sizes of the sub-parameters that ``shape`` gives dimension ``dim`` of a weight, ``size`` elements in all.
    ValueError where they do not fit."""
    told = shape[dim]
    if isinstance(told, (tuple, list)):
        sizes = [int(one) for one in told]
    elif told in (-1, size):
        sizes = [size]
    else:
        sizes = [size // told] * told
    if sum(sizes) != size:
        raise ValueError(
            f"shape {tuple(shape)} does not fit dimension {dim} of '{name}', which has {size} elements: correct the "
            "entry of tensor_parallel.partition_config.layer_specs that matches it"
        )
    return sizes


class SubParamLinearLayer(_SubParams, LinearLayer):
    """A layer of several sub-parameters side by side that is cut along its outputs."""

    def __init__(self, module, mp_group, shape, partition_dim=0, gather_output=False, **kwargs):
        self.gather_output = gather_output
        _SubParams.__init__(self, module, mp_group, shape, partition_dim, gather_output=gather_output, **kwargs)


class SubParamLinearAllreduce(_SubParams, LinearAllreduce):
    """A layer of several sub-parameters side by side that is cut along its inputs."""

    def __init__(self, module, mp_group, shape, partition_dim=1, **kwargs):
        _SubParams.__init__(self, module, mp_group, shape, partition_dim, **kwargs)


class SubParamColumnParallel(LinearLayer):
    """A layer of ``parts`` equal sub-parameters side by side, cut along its outputs."""

    parts = 1

    def _cut_of(self, size):
        return even_cut(sub_sizes((self.parts, -1), 0, size, self.name), self.tp_world_size, self.name)


class fused_LinearLayer(SubParamColumnParallel):
    """A layer that gives query, key and value, one behind the other."""

    parts = 3

    def __init__(self, module, mp_group, skip_partition=False, **kwargs):
        super().__init__(module, mp_group, skip_partition=skip_partition, **kwargs)


class GateUpPack_LinearLayer(SubParamColumnParallel):
    """A layer that gives the gate and the values of a gated unit, one behind the other."""

    parts = 2

    def __init__(self, module, mp_group=None, **kwargs):
        super().__init__(module, mp_group, **kwargs)


class conv_LinearLayer(fused_LinearLayer):
    """The ``Conv1D`` of GPT-2 that gives query, key and value."""


class Yuan_LinearLayer(SubParamColumnParallel):
    """A query or key of Yuan, of which two halves are cut on their own."""

    parts = 2


class Yuan_LinearAllreduce(LinearAllreduce):
    """A layer that reads values of Yuan, whose two halves are cut on their own."""

    def _cut_of(self, size):
        return even_cut([size // 2, size - size // 2], self.tp_world_size, self.name)


# ---- the vocabulary -------------------------------------------------------------------------------------------------
class VocabParallelLinear(LinearLayer):
    """A head of which each rank has some words. In training it gives ``VocabLogits``, of which
    ``torch.nn.functional.cross_entropy`` is computed without the logits of all words; in evaluation it gives all, which
    metrics and samplers read. ``overwrite``: backward writes the gradient over the logits."""

    def __init__(self, module, mp_group=None, overwrite=False, **kwargs):
        super().__init__(module, mp_group, **kwargs)
        self.words, self.overwrite = _words_of(self.cut, mp_group, self.tp_index), overwrite

    def forward(self, input):
        """input: (..., features); result: (..., this rank's words), in evaluation all of them."""
        made = super().forward(input)
        if self.gather_output:
            return made
        if not self.training:
            return join_over(self.mp_group, self.cut, made, -1)
        return VocabLogits.of(made, self.words, self.cut, self.overwrite)


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank has some words; all ranks get the features of all tokens. ``module``: the whole
    embedding; ``cut``: the native ``TensorCut`` of the words, in place of the published sizes."""

    def __init__(self, module, mp_group=None, name=None, cut=None):
        super().__init__()
        self.weight, self.mp_group = module.weight, mp_group
        self.embedding_dim, self.cut = module.embedding_dim, cut
        if cut is None:
            self.cut = even_cut([module.num_embeddings], 1 if mp_group is None else dist.get_world_size(mp_group), name)
        self.own_words = OwnWords(module, self.cut, mp_group, name)
        self.words, self.num_embeddings = self.own_words.words, self.cut.size()
        self.options = {key: getattr(module, key) for key in ("padding_idx", "scale_grad_by_freq", "sparse")}
        self.train(module.training)

    def forward(self, input):
        """input: (...), numbers of words; result: (..., features). IndexError for a word that there is not; on a GPU
        its features are zeros."""
        return self.own_words.read(input, self._look_up)

    def _look_up(self, places):
        return nn.functional.embedding(places, self.weight, **self.options)


class OwnWords:
    """The words of an embedding that this rank has. Its weight becomes the rank's rows, in place."""

    def __init__(self, module, cut, group, name=None):
        if module.max_norm is not None:
            raise ValueError(f"'{name}' has a max_norm, which changes words as they are read: leave it whole")
        if cut.size() < cut.ranks():
            raise ValueError(f"'{name}' has {cut.size()} words, too few for {cut.ranks()} ranks: leave it whole")
        rank = 0 if group is None else dist.get_rank(group)
        self.words, self.exchange = _words_of(cut, group, rank), exchange_of(group)
        padding = -1 if module.padding_idx is None else module.padding_idx
        is_here = self.words.start <= padding < self.words.stop
        module.padding_idx = padding - self.words.start if is_here else None
        cut_param(module.weight, 0, cut, group, rank)

    def read(self, input, look_up):
        """The features of all tokens. ``look_up``: gives those of some of this rank's words, counted from its first."""
        words = self.words
        if input.device.type == "cpu" and input.numel():
            least, most = (int(one) for one in input.aminmax())
            if least < 0 or most >= words.words:
                word = least if least < 0 else most
                raise IndexError(f"word {word} is not one of the {words.words} words of the embedding")
        elsewhere = (input < words.start) | (input >= words.stop)
        made = look_up((input - words.start).masked_fill(elsewhere, 0))
        return self.exchange.sum_out(made.masked_fill(elsewhere.unsqueeze(-1), 0.0))

    def forward_of(self, module):
        """A ``forward`` for an embedding of a class of its own, which treats each token alone."""
        return functools.partial(self.read, look_up=module.forward)


def _words_of(cut, group, rank):
    """The ``VocabSlice`` of a rank. ``cut``: of the words, which each rank has in a row."""
    ends = [0]
    for one in range(cut.ranks()):
        ends.append(ends[-1] + cut.width(one))
    return VocabSlice(group, ends[rank], ends[rank + 1], cut.size())


# ---- embeddings -----------------------------------------------------------------------------------------------------
def cut_embedding(module, cut, group, rank):
    """Keeps this rank's features of an embedding, in place."""
    cut_param(module.weight, 1, cut, group, rank)
    module.embedding_dim = cut.width(rank)


class HiddenParallelEmbedding(nn.Module):
    """An embedding of which each rank has some features; it gives all of them. ``module``: the whole embedding."""

    def __init__(self, module, mp_group=None, name=None):
        super().__init__()
        if module.max_norm is not None:
            raise ValueError(f"'{name}' has a max_norm, which needs all features of a word: leave it whole (skip)")
        self.weight, self.mp_group = module.weight, mp_group
        self.options = {key: getattr(module, key) for key in ("padding_idx", "scale_grad_by_freq", "sparse")}
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        ranks, rank = (1, 0) if mp_group is None else (dist.get_world_size(mp_group), dist.get_rank(mp_group))
        self.cut = even_cut([module.embedding_dim], ranks, name)
        cut_param(self.weight, 1, self.cut, mp_group, rank)

    def forward(self, input):
        """input: (...), whole numbers; result: (..., features)."""
        made = nn.functional.embedding(input, self.weight, **self.options)
        return join_over(self.mp_group, self.cut, made, -1)
