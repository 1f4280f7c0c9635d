"""Between the blocks of a model each rank has a part of every sequence (``tensor_parallel.split_sequence``).

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), call it sequence
parallelism. Norms, dropout and sums of a block then run on 1/ranks of the tokens. Where a block's cut layers begin, the
tokens of all ranks are gathered; where they end, each rank gets the sums of its tokens. These two send as many bytes as
the all-reduce that they replace. Parameters of the block that the ranks have alike see the gradients of a rank's
tokens, which are summed.
"""

import torch

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.config.errors import config_error
from deepspeed.module_inject.layers import LinearAllreduce, TensorParallel_Layer, cut_of, cut_param, exchange_of
from deepspeed.utils.random_state import OwnRandomNumbers

KEY = "tensor_parallel.split_sequence"


class SequenceSplit:
    """The tokens of each rank of torch's ``group`` in a list of blocks. ``widths``: how many each has, from the last
    call of the first block; None: every rank has all of them."""

    def __init__(self, group):
        self.exchange, self.ranks, self.rank = exchange_of(group), dist.get_world_size(group), dist.get_rank(group)
        self.widths, self.open, self.own = None, False, OwnRandomNumbers(self.rank)

    def begin(self, hidden):
        """This rank's tokens of ``hidden``, (..., tokens, features). Without gradients every rank keeps a sequence that
        has fewer tokens than there are ranks."""
        tokens, self.open = hidden.shape[-2], True
        self.widths = None
        if torch.is_grad_enabled() or tokens >= self.ranks:
            self.widths = [stop - start for start, stop in _C.unit_runs(tokens, self.ranks)]
        return self.part(hidden)

    def end(self, hidden):
        """The tokens of all ranks, which treat them alike from now on."""
        self.open = False
        return self.join(hidden)

    def part(self, hidden):
        """This rank's tokens of ``hidden``, which all ranks have alike."""
        if self.widths is None:
            return hidden
        return _C.split_widths(self.exchange.ranks, hidden, hidden.dim() - 2, self.widths)

    def join(self, hidden):
        """The tokens of all ranks, which treat them alike."""
        if self.widths is None:
            return hidden
        return _C.gather_widths(self.exchange.ranks, hidden, hidden.dim() - 2, self.widths)

    def check(self, hidden, name):
        """RuntimeError where ``hidden``, which a block got, has other tokens than this rank."""
        if self.widths is not None and hidden.shape[-2] != self.widths[self.rank]:
            raise RuntimeError(
                f"{KEY}: block '{name}' got a tensor of shape {list(hidden.shape)}, and this rank has "
                f"{self.widths[self.rank]} of {sum(self.widths)} tokens of each sequence: the model changes the "
                "sequence between its blocks, so leave the key out"
            )

    def gather(self, part):
        """The tokens of all ranks, for layers that are cut along their outputs. ``part``: this rank's tokens."""
        if self.widths is None:
            return self.exchange.copy_in(part)
        return self.exchange.gather_in(part, part.dim() - 2, self._widths_of(part.shape[-2], self.widths[self.rank]))

    def scatter(self, part):
        """This rank's tokens of the sum over the ranks of ``part``."""
        if self.widths is None:
            return self.exchange.sum_out(part)
        return self.exchange.scatter_out(part, part.dim() - 2, self._widths_of(part.shape[-2], sum(self.widths)))

    def _widths_of(self, found, tokens):
        """The rows of each rank of a tensor with ``found`` rows: some sequences of ``tokens`` tokens."""
        return [width * (found // max(tokens, 1) or 1) for width in self.widths]


class _Block:
    """``forward`` of a block that runs on a rank's tokens. ``first``, ``last``: it is the one in its list."""

    def __init__(self, block, name, split, first, last):
        self.forward, self.name, self.split, self.first, self.last = block.forward, name, split, first, last
        self.block = block

    def __call__(self, *args, **kwargs):
        split = self.split
        args, kwargs = _with_stream(args, kwargs, self._enter)
        if split.widths is not None:
            split.own.begin(self.block, None, None)  # the ranks have other tokens
        try:
            made = self.forward(*args, **kwargs)
        finally:
            split.own.end(self.block, None)
        return _with_first(made, split.end) if self.last else made

    def _enter(self, hidden):
        if self.first:
            return self.split.begin(hidden)
        self.split.check(hidden, self.name)
        return hidden


class _Scope:
    """``forward`` of a module with cut layers inside that reads the tokens of all ranks."""

    def __init__(self, module, split):
        self.forward, self.module, self.split = module.forward, module, split

    def __call__(self, *args, **kwargs):
        args, kwargs = _with_stream(args, kwargs, self._whole)
        return self.forward(*args, **kwargs)

    def _whole(self, hidden):
        return hidden if self.split.widths is None else self.split.gather(hidden)


class _Whole(_Scope):
    """``forward`` of a module whose layers are whole: every rank runs it on the tokens of all."""

    def __call__(self, *args, **kwargs):
        split, module = self.split, self.module
        if split.widths is None:
            return self.forward(*args, **kwargs)
        split.own.end(module, None)
        args, kwargs = _with_stream(args, kwargs, split.join)
        made = _with_first(self.forward(*args, **kwargs), split.part)
        split.own.begin(module, None, None)
        return made


def _is_stream(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1


def _with_stream(args, kwargs, change):
    """Arguments with ``change(tensor)`` in place of the hidden states: the first positional tensor of floating-point
    numbers, else the argument ``hidden_states``, else the first other one."""
    for index, value in enumerate(args):
        if _is_stream(value):
            return (*args[:index], change(value), *args[index + 1 :]), kwargs
    names = sorted(kwargs, key=lambda name: name != "hidden_states")  # a stable sort
    name = next((name for name in names if _is_stream(kwargs[name])), None)
    return args, kwargs if name is None else {**kwargs, name: change(kwargs[name])}


def _with_first(made, change):
    """The result of a block with ``change(tensor)`` in place of its hidden states, which are the first of its parts."""
    if _is_stream(made):
        return change(made)
    if isinstance(made, (tuple, list)) and made and _is_stream(made[0]):
        parts = (change(made[0]), *made[1:])
        return type(made)(*parts) if hasattr(made, "_fields") else type(made)(parts)
    raise RuntimeError(f"{KEY}: a block returned {type(made).__name__} without hidden states: leave the key out")


# ---- what is changed of a model -------------------------------------------------------------------------------------
def splits_of(model, blocks, group):
    """``{name of a block: (SequenceSplit, whether it is the first of its list, whether it is the last)}``. ValueError
    for a model without lists of blocks, and for a list of which not all blocks are cut."""
    found = {}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
        modules = model.get_submodule(parent)
        names = [f"{parent}.{index}".lstrip(".") for index, _ in modules.named_children()]
        others = [name for name in names if name not in blocks]
        if "" in blocks or others:
            told = "a list of blocks was not found" if "" in blocks else f"'{others[0]}' is not cut"
            raise config_error(f"{KEY} is true, and {told} in {type(model).__name__}: leave the key out", [KEY])
        split = SequenceSplit(group)
        found.update({name: (split, name == names[0], name == names[-1]) for name in names})
    return found


def split_block(block, name, plan, group, split, first=True, last=True):
    """Makes a block whose layers are cut already run on this rank's tokens. ``plan``: its ``BlockPlan``."""
    scopes = {}
    for columns, _ in _joint(plan):
        scope = _scope_of(columns)
        for one in columns:
            if not scope and isinstance(block.get_submodule(one), TensorParallel_Layer):
                block.get_submodule(one).split = split
        if scope:
            scopes[scope] = block.get_submodule(scope)
    for module in scopes.values():
        module.forward = _Scope(module, split)
    for name in _whole_scopes(plan, scopes):
        scopes[name] = block.get_submodule(name)
        scopes[name].forward = _Whole(scopes[name], split)
    inside = {id(param) for module in scopes.values() for param in module.parameters()}
    for layer in block.modules():
        if isinstance(layer, LinearAllreduce):
            layer.split = split
            inside -= {id(layer.bias)}
    for param in block.parameters():
        if id(param) not in inside and cut_of(param) is None:
            cut_param(param, None, None, group, split.rank, partial=True)
    block.forward = _Block(block, name, split, first, last)


def check_closed(model, splits):
    """Lets ``model`` raise RuntimeError where its last block did not run, so that a rank would go on with its
    tokens."""
    lists = {id(split): (name, split) for name, (split, _, last) in splits.items() if last}

    def check(module, args, made):
        for name, split in lists.values():
            if split.open:
                split.open = False
                raise RuntimeError(f"{KEY}: block '{name}', the last of its list, did not run: leave the key out")

    if lists:
        model.register_forward_hook(check)


def _joint(plan):
    """``(layers that are cut along their outputs, along their inputs)`` of each group, and of rules by module."""
    for group in plan.groups:
        yield list(group.columns), group.rows
    owners = {}
    for name, spec in plan.ruled.items():
        kind = int(spec.partition_type.value == "row")
        owners.setdefault(name.rpartition(".")[0], ([], []))[kind].append(name)
    yield from owners.values()


def _whole_scopes(plan, scopes):
    """Modules with several whole layers, such as attentions: their layers need the tokens of all ranks. One layer alone
    treats each token alone."""
    owners = [name.rpartition(".")[0] for name in plan.whole]
    others = tuple(f"{scope}." for scope in scopes)
    return [one for one in dict.fromkeys(owners) if one and owners.count(one) > 1 and not f"{one}.".startswith(others)]


def _scope_of(columns):
    """The innermost module around all ``columns``, and around one of them; empty: the block."""
    owners = [name.split(".")[:-1] for name in columns]
    shared = []
    for parts in zip(*owners):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
