"""Layers of a model that answers, cut over the ranks that bring the same tokens (``tensor_parallel.tp_size``)."""

import copy

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed._compat import TORCH2
from deepspeed._native import _C
from deepspeed.comm import mesh, mesh_views
from deepspeed.config.errors import config_error
from deepspeed.log import log_dist
from deepspeed.module_inject.block_twin import NotAnalysed, features
from deepspeed.module_inject.cut_group import grained_runs
from deepspeed.module_inject.cut_plan import replace_module
from deepspeed.module_inject.layers import LmHeadLinearAllreduce
from deepspeed.module_inject.tp_model import carry_out, earlier_plan, proven_plan, same_weights
from deepspeed.module_inject.vocabulary import head_of

KEY = "tensor_parallel.tp_size"
_ADVICE = (
    "pass injection_policy={Block: ('attention.output', 'mlp.output')}, which maps a class of blocks to the ends of "
    "names of the linear layers whose results are summed, or leave tp_size at 1"
)


def size_of(section):
    """The number of ranks that the section ``tensor_parallel`` asks for; ValueError where a group has another one."""
    group = group_in(section)
    if group is None or not section.enabled:
        return section.tp_size if section.enabled else 1
    ranks = dist.get_world_size(group)
    if section.tp_size not in (1, ranks):
        raise config_error(
            f"tensor_parallel.tp_size (mp_size) is {section.tp_size}, and the group of tensor_parallel.tp_group (or of "
            f"mpu) has {ranks} ranks: make them equal, or leave tp_size out",
            [KEY],
        )
    return ranks


def group_in(section):
    """torch's group that the script brings, by itself or with an mpu; None: neighbours are a group."""
    if section.tp_group is not None or section.mpu is None:
        return section.tp_group
    group = mesh_views.ask_mpu(section.mpu, "group")
    if group is None:
        raise config_error(
            "tensor_parallel.mpu has no get_tensor_model_parallel_group() or get_model_parallel_group(): add it, or "
            "pass the group as tensor_parallel.tp_group",
            ["tensor_parallel.mpu"],
        )
    return group


def group_of(section, size):
    """torch's group of the ranks that bring the same tokens as this one."""
    given = group_in(section)
    if given is not None:
        return given
    return mesh.group_over(mesh_views.of_job(tp=(size, KEY)).list(["tp"], dist.get_rank()))


# ---- the plan -------------------------------------------------------------------------------------------------------
class ServedCut:
    """The cut of ``model`` over torch's ``group``, planned and proven before anything is changed.

    ``config``: of ``init_inference``. ``experts``: ``{name: number of results}`` of layers with experts, which are
    shared by other means; ValueError where no layer can be cut and there are none of these.
    """

    def __init__(self, model, group, config, experts):
        self.model, self.group, self.head, self.plan = model, group, None, None
        self.grain = config.tensor_parallel.tp_grain_size
        ranks = dist.get_world_size(group)
        _check_policy(config)
        self.done = earlier_plan(model, ranks, KEY) is not None
        if self.done:
            return
        try:
            self.plan = proven_plan(
                _skeleton(model, experts), group, config, config.injection_dict, training=False, grain=self.grain
            )
        except NotAnalysed as error:
            if not experts:
                raise ValueError(f"init_inference: {KEY} = {ranks}: {error}; or {_ADVICE}") from error
            log_dist(f"init_inference: ranks share experts only, as the other layers cannot be cut: {error}", ranks=[0])
            return
        self.head = head_of(model, self.plan.blocks)
        if self.head in self.plan.outside:  # a rule cuts it
            self.head = None
        blocks = self.plan.kinds().values()
        is_cut = self.head or self.plan.outside or any(one.groups or one.ruled for one in blocks)
        if not is_cut and not experts:
            reasons = {layer: text for one in blocks for layer, text in one.whole.items()}
            told = "; ".join(f"'{layer}': {text}" for layer, text in reasons.items())
            raise ValueError(
                f"init_inference: {KEY} = {ranks}: no layer of {type(model).__name__} can be cut ({told}): {_ADVICE}"
            )

    def same_weights(self, experts):
        """Gives all ranks the weights of the first one, but for experts, which ranks may share already."""
        if not self.done:
            same_weights(self.model, self.group, [self.model.get_submodule(name) for name in experts])

    def carry_out(self):
        """Cuts the layers."""
        if self.plan is None:
            return
        carry_out(self.model, self.plan, self.group, training=False)
        if self.head is not None:
            _cut_head(self.model, self.head, self.group, self.grain)


def _check_policy(config):
    pairs = [*(config.injection_dict or {}).items(), (None, config.injection_policy_tuple or ())]
    for kind, ends in pairs:
        ends = (ends,) if isinstance(ends, str) else ends
        if not isinstance(ends, (tuple, list)) or not all(isinstance(end, str) for end in ends):
            name = getattr(kind, "__name__", kind)
            raise config_error(
                f"injection_policy[{name}] is {ends!r}: it has to be a tuple of ends of names of linear layers, such "
                "as ('attention.output', 'mlp.output')",
                ["injection_policy"],
            )


def _skeleton(model, experts):
    """A copy of a model with the same parameters, in which layers with experts are ``_Mixing``. What models do at their
    first forward, hooks of recorders for example, happens to the copy."""
    held = {id(one): _readable(one) for one in (*model.parameters(), *model.buffers())}
    held.update({id(model.get_submodule(name)): _Mixing(results) for name, results in experts.items()})
    try:
        return copy.deepcopy(model, held)
    except Exception as error:
        raise NotAnalysed(f"{type(model).__name__} cannot be copied: {error}") from error


def _readable(tensor):
    """The tensor, or its values in fp32 where they are fp16 on a CPU and torch cannot compute with these there."""
    if TORCH2 or tensor.dtype is not torch.float16 or tensor.device.type != "cpu":
        return tensor
    values = tensor.detach().float()
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


class _Mixing(nn.Module):
    """Stands for a layer with experts: gives sums over all channels, so that its inputs and results stay whole."""

    def __init__(self, results):
        super().__init__()
        self.results = results

    def forward(self, x, *args, **kwargs):
        made = x + x.sum(-1, keepdim=True)
        return made if self.results == 1 else (made, *(x.new_zeros(()) for _ in range(self.results - 1)))


# ---- the head -------------------------------------------------------------------------------------------------------
def _cut_head(model, name, group, grain):
    """Cuts the layer that gives the words along its inputs. A weight that an embedding has, too, is copied: that one
    stays whole."""
    head, ranks = model.get_submodule(name), dist.get_world_size(group)
    width = features(head)[0]
    cut = _C.TensorCut([width], [grained_runs(width, ranks, grain)])
    others = [one for one, module in model.named_modules() if module is not head and _has(module, head.weight)]
    if others:
        head.weight = nn.Parameter(head.weight.detach(), requires_grad=head.weight.requires_grad)
        log_dist(
            f"init_inference: '{name}' is cut and no longer has its weight in common with '{others[0]}', which stays "
            "whole; the values are the same",
            ranks=[0],
        )
    replace_module(model, name, LmHeadLinearAllreduce(head, group, name=name, cut=cut))


def _has(module, param):
    return any(one is param for one in module._parameters.values())
