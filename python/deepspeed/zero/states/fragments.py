"""``param._hp_mapping`` of parameters that an engine trains at ZeRO stages 1 and 2: what this rank owns of them."""

import dataclasses

from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from deepspeed.zero.engine_links import NotCopied
from deepspeed.zero.states.named_states import groups_of_params


@dataclasses.dataclass
class EngineFragment(NotCopied, tensor_fragment):
    """A ``tensor_fragment`` whose fp32 piece, states and gradient are views of the native core's buffers, or copies of
    what lies in files, where ``get_hp_fragment`` and the like read and ``put_optim_state_fragment`` writes.

    ``link``: the parameter's ``ParamLink``. ``hp_fragment_address.start`` counts in the flat fp32 buffer in which the
    fragment lies.
    """

    link: object = None

    @property
    def lp_fragment(self):
        param = self.link.owner._params[self.link.index]
        flat = param.detach().as_strided((param.numel(),), (1,), param.storage_offset())
        start = self.lp_fragment_address.start
        return flat[start : start + self.lp_fragment_address.numel]

    @lp_fragment.setter
    def lp_fragment(self, value):
        pass  # the parameter's own memory, wherever that is

    @property
    def hp_fragment(self):
        return self._state("fp32").detach().reshape(-1) if self._hp.is_meta else self._hp

    @hp_fragment.setter
    def hp_fragment(self, value):
        self._hp = value

    def put_hp_fragment(self, value):
        self.link.set_pieces("fp32", value.reshape(-1))

    def _state(self, key):
        return next((view for _, _, view in self.link.pieces(key)), None)

    def get_optim_state_keys(self):
        return [key for key in self.link.owner.state_names() if self._state(key) is not None]

    def put_optim_state_fragment(self, key, value):
        """A state that the optimizer makes in its first step is made now."""
        self.link.make(key)
        if self._state(key) is None:
            known = self.link.owner.state_names()
            raise ValueError(f"the optimizer has no state {key!r}; it has {known}: another optimizer has saved")
        self.link.set_pieces(key, value.reshape(-1))

    def get_lp_grad_fragment(self, index_in_param_group):
        """The reduced gradient of the fragment, or None; times the loss scale."""
        return self._state("grad")


def put_fragments(optimizer):
    """Gives every parameter of a sharded optimizer ``_hp_mapping`` (None where this rank owns nothing of it) and
    ``_dp_group``."""
    groups = groups_of_params(optimizer.bit16_groups)
    for param in optimizer._params:
        param._hp_mapping = None
        param._dp_group = optimizer.dp_process_group
    for (index, offset, numel), master in zip(optimizer.core.pieces(), optimizer.core.masters(), strict=True):
        param = optimizer._params[index]
        param._hp_mapping = EngineFragment(
            lp_fragment=None,
            lp_fragment_address=fragment_address(numel=numel, start=offset),
            hp_fragment=master.detach().reshape(-1),
            hp_fragment_address=fragment_address(numel=numel, start=master.storage_offset()),
            gradient_dict={},
            offload_gradient_dict={},
            use_offload=False,
            param_group_index=groups[index],
            link=param._ds_link,
        )
