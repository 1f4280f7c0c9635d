"""Fragments: the part of a 16-bit parameter whose fp32 values lie in one partition of a flat fp32 tensor.

For callers that keep a flat fp32 partition themselves (Megatron-LM forks do). The engine's own parameters are reached
with the ``safe_*`` functions, which are importable from here as well; see utils.param_access.
"""

import dataclasses
from typing import Dict

import torch

from deepspeed import comm as dist
from deepspeed.utils.param_access import (  # noqa: F401
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)


@dataclasses.dataclass
class fragment_address:
    """``numel`` elements from ``start`` on, both counted in elements."""

    numel: int
    start: int


@dataclasses.dataclass
class tensor_fragment:
    """One fragment. Tensors are views: flat pieces of the 16-bit parameter and of the fp32 partition.

    ``gradient_dict`` (``offload_gradient_dict`` with ``use_offload``): parameter group -> list of the flat gradients of
    the fragments in this partition. ``optim_fragment``: name of a state -> its flat piece.
    """

    lp_fragment: torch.Tensor
    lp_fragment_address: fragment_address
    hp_fragment: torch.Tensor
    hp_fragment_address: fragment_address
    gradient_dict: Dict
    offload_gradient_dict: Dict
    use_offload: bool
    param_group_index: int
    optim_fragment: Dict = None

    def update_hp(self):
        """The fp32 piece takes the 16-bit values."""
        self.put_hp_fragment(self.lp_fragment.data)

    def put_hp_fragment(self, value):
        """The fp32 piece takes ``value``."""
        self.hp_fragment.data.copy_(value.reshape(self.hp_fragment.shape))

    def update_lp(self):
        """The 16-bit piece takes the fp32 values."""
        self.lp_fragment.data.copy_(self.hp_fragment.data)

    def get_optim_state_fragment(self, key):
        """Raises ValueError for a state that is not there (yet: many optimizers make theirs in the first step)."""
        value = self._state(key)
        if value is None:
            raise ValueError(f"there is no optimizer state {key!r}; there are {self.get_optim_state_keys()}")
        return value

    def _state(self, key):
        return (self.optim_fragment or {}).get(key)

    def set_optim_state_fragment(self, flat_hp_partition, optim_fragment):
        """``optim_fragment``: the states of the flat fp32 partition. Those with a value for each element are cut."""
        self.optim_fragment = {
            key: value.reshape(-1).narrow(0, self.hp_fragment_address.start, self.hp_fragment_address.numel)
            for key, value in optim_fragment.items()
            if torch.is_tensor(value) and value.dim() and value.numel() == flat_hp_partition.numel()
        }

    def put_optim_state_fragment(self, key, value):
        """The fragment of state ``key`` takes ``value``, flat; a state that is not there is made."""
        own = self._state(key)
        if own is not None:
            own.data.copy_(value.reshape(own.shape))
            return
        self.optim_fragment = {**(self.optim_fragment or {}), key: value.detach().clone().to(self.hp_fragment.device)}

    def get_hp_fragment_address(self):
        return self.hp_fragment_address

    def get_optim_state_keys(self):
        return list(self.optim_fragment or {})

    def get_hp_fragment(self, optim_state_key=None):
        """The fp32 piece, or that of a state."""
        return self.hp_fragment if optim_state_key is None else self.get_optim_state_fragment(optim_state_key)

    def get_lp_grad_fragment(self, index_in_param_group):
        """The gradient of the fragment with this number in the partition, or None."""
        gradients = self.offload_gradient_dict if self.use_offload else self.gradient_dict
        found = (gradients or {}).get(self.param_group_index)
        return found[index_in_param_group] if found else None


def get_hp_fragment_mapping(
    lp_param,
    lp_start,
    flat_hp_partition,
    gradient_dict,
    offload_gradient_dict,
    use_offload,
    param_group_index,
    partition_start,
    partition_size,
):
    """The fragment of ``lp_param`` in a partition.

    ``lp_start``, ``partition_start``: elements before the parameter, and before the partition, in the flat group.
    Raises ValueError when they do not overlap.
    """
    begin = max(lp_start, partition_start)
    end = min(lp_start + lp_param.numel(), partition_start + partition_size)
    if begin >= end:
        raise ValueError(
            f"a parameter of {lp_param.numel()} elements from {lp_start} on has none in the partition of "
            f"{partition_size} from {partition_start} on"
        )
    lp = fragment_address(numel=end - begin, start=begin - lp_start)
    hp = fragment_address(numel=end - begin, start=begin - partition_start)
    return tensor_fragment(
        lp_fragment=lp_param.data.view(-1).narrow(0, lp.start, lp.numel),
        lp_fragment_address=lp,
        hp_fragment=flat_hp_partition.narrow(0, hp.start, hp.numel),
        hp_fragment_address=hp,
        gradient_dict=gradient_dict,
        offload_gradient_dict=offload_gradient_dict,
        use_offload=use_offload,
        param_group_index=param_group_index,
    )


def _collected(param, piece):
    """The whole tensor, fp32, of which this rank has ``piece`` (None: nothing). Every rank of the group calls it."""
    flat = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
    if piece is not None:
        address = param._hp_mapping.lp_fragment_address
        flat.narrow(0, address.start, address.numel).copy_(piece.reshape(-1))
    if param._dp_group is not None and dist.is_initialized():
        dist.all_reduce(flat, group=param._dp_group)
    return flat.view(param.shape)


def _owned(param, value):
    address = param._hp_mapping.lp_fragment_address
    return value.detach().reshape(-1).narrow(0, address.start, address.numel)


def get_full_hp_param(self, optim_state_key=None):
    """Method of linked parameters: the whole fp32 value, or state, collected from all ranks of the group."""
    mapping = self._hp_mapping
    return _collected(self, None if mapping is None else mapping.get_hp_fragment(optim_state_key))


def set_full_hp_param(self, value, optim_state_key=None):
    """Method of linked parameters: this rank's fragment takes its part of ``value``, and so does the weight."""
    if self._hp_mapping is not None:
        self._hp_mapping.get_hp_fragment(optim_state_key).data.copy_(_owned(self, value))
    if optim_state_key is None:
        self.data.copy_(value)


def get_full_hp_grad(self):
    """Method of linked parameters: the whole gradient, collected from all ranks of the group."""
    mapping = self._hp_mapping
    return _collected(self, None if mapping is None else mapping.get_lp_grad_fragment(self._index_in_param_group))


def set_full_hp_grad(self, value):
    """Method of linked parameters: this rank's gradient fragment takes its part of ``value``."""
    if self._hp_mapping is not None:
        fragment = self._hp_mapping.get_lp_grad_fragment(self._index_in_param_group)
        if fragment is None:
            raise ValueError(f"a parameter {tuple(self.shape)} has no gradient to set before its backward has run")
        fragment.data.copy_(_owned(self, value).reshape(fragment.shape))


def map_to_flat_opt_states(flat_hp_tensor, lp_tensors, optim_state, opt_keys):
    """Puts the states of the fragments of ``lp_tensors`` end to end into ``optim_state[flat_hp_tensor][key]``.

    Elements that no fragment covers are zero. The fragments are views of the flat states afterwards.
    """
    for key in opt_keys:
        flat = torch.zeros_like(flat_hp_tensor)
        for lp in lp_tensors:
            if lp._hp_mapping is not None:
                address = lp._hp_mapping.get_hp_fragment_address()
                piece = flat.narrow(0, address.start, address.numel)
                piece.data.copy_(lp._hp_mapping.get_hp_fragment(optim_state_key=key).data.reshape(-1))
                lp._hp_mapping.optim_fragment[key] = piece
        optim_state.setdefault(flat_hp_tensor, {})[key] = flat
