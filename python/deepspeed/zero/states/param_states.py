"""The states that training keeps of each parameter, whole or this rank's pieces: fp32 masters, gradients, optimizer
states.

A *kind* is "fp32", "grad" or the name of an optimizer state. States of a native optimizer are the core's; those of
another one are its own tensors, one for each piece, and the core collects and spreads them in the same way.
"""

from contextlib import nullcontext

import torch

from deepspeed.config.sections import OffloadStateTypeEnum
from deepspeed.utils.forwarding import forwarded
from deepspeed.zero.engine_links import EngineLink
from deepspeed.zero.parameters import pickled_params  # noqa: F401  (registers how parameters are pickled)
from deepspeed.zero.states.states_in_files import split_states


class ParamStates:
    """A mixin of classes that own parameters which ``core`` trains; ``stepping`` is their ``Stepping``, ``_params`` are
    those of the optimizer's groups end to end, as the core was built from."""

    states = None  # OffloadedStates

    def _link(self, params):
        self._params = list(params)
        for index, param in enumerate(self._params):
            param._ds_link = ParamLink(self, index)

    def get_param_id(self, param):
        """The number of ``param`` among the optimizer's parameters, end to end over its groups."""
        return self._linked(param).index

    def _linked(self, param):
        link = getattr(param, "_ds_link", None)
        if link is None or link.owner is not self:
            raise ValueError(f"a parameter of shape {tuple(param.shape)} is not trained by this optimizer")
        return link

    def unlink(self):
        for param in self._params:
            if getattr(getattr(param, "_ds_link", None), "owner", None) is self:
                del param._ds_link

    def state_names(self):
        """Names of the optimizer's states that have one value for each element of a parameter."""
        if self.stepping.fused:
            return list(self.core.slot_names())
        state = self.stepping.optimizer.state
        return sorted({name for master in state for name in split_states(state[master], master)[0]})

    def own_tensors(self, kind):
        """This rank's tensors of a kind, one for each of its pieces, None where there is none: views, of what lies in
        files copies."""
        return self.stepping.own(kind, range(len(self.stepping.masters)))


class WholeParams(ParamStates):
    """The owner where every rank trains whole parameters and no sharded optimizer stands for them."""

    engine = None
    loss_scale = forwarded("stepping.loss_scale", False)

    def __init__(self, core, stepping, params):
        self.core, self.stepping = core, stepping
        self._link(params)


class ParamLink(EngineLink):
    """From a parameter to the owner of its masters, gradients and states; see utils.param_access."""

    owner = EngineLink.target

    def _living(self, kind):
        owner = self.owner
        if owner.states is not None and owner.states.away:
            needed = {"fp32": OffloadStateTypeEnum.hp_params, "grad": OffloadStateTypeEnum.lp_grads}
            kinds = {needed.get(kind, OffloadStateTypeEnum.optim_states)}
            owner.states.need(kinds, f"access to the {kind} of a parameter")
        return owner

    def _numbers(self, core, kind):
        """``[(number of the piece, offset, numel)]`` of what this rank has of the parameter."""
        pieces = core.pieces() if kind != "grad" or core.used()[self.index] else ()
        return [(number, offset, numel) for number, (of, offset, numel) in enumerate(pieces) if of == self.index]

    def get(self, kind):
        """A copy of the whole ``kind`` of the parameter in its shape, fp32 (fp64 for fp64 ones).

        Every rank calls it. None for a gradient that no rank has, and for a state that does not exist. Inside
        ``no_sync`` a gradient that has not been reduced is this rank's own.
        """
        owner = self._living(kind)
        core, kept = owner.core, owner.stepping.kept().get(kind)
        if kept is None:
            return core.full_of(owner.own_tensors(kind), self.index)
        found = core.full(*kept, self.index)  # in its layout: a read does not wait for other readers
        if kind != "grad":
            return found
        if found is None and owner.engine is not None and owner.engine.inside_no_sync_ctxt:
            found = core.local_grad(self.index)
        return found if found is None or owner.loss_scale == 1.0 else found / owner.loss_scale

    def set(self, kind, value):
        """Every rank passes the same ``value``, in the parameter's shape; each takes what it owns of it."""
        owner, value = self._living(kind), value.detach()
        kept = owner.stepping.kept().get(kind)
        if kept is not None:
            owner.core.set_full(*kept, self.index, value.float() * owner.loss_scale if kind == "grad" else value)
            return
        own = owner.own_tensors(kind)
        owner.core.set_full_of(own, self.index, value)
        for number, _, _ in self._numbers(owner.core, kind):
            owner.stepping.keep(kind, number, own[number])

    def pieces(self, kind):
        """``[(offset, numel, tensor)]`` of what this rank has of the parameter: views, of what lies in files copies,
        which ``set_pieces`` writes."""
        owner = self._living(kind)
        pieces = self._numbers(owner.core, kind)
        own = owner.stepping.own(kind, [number for number, _, _ in pieces])
        return [(offset, numel, one) for (_, offset, numel), one in zip(pieces, own) if one is not None]

    def set_pieces(self, kind, flat):
        """This rank's pieces of the parameter take the elements of ``flat``, one piece after the other."""
        owner, begin = self._living(kind), 0
        core, stepping, kept = owner.core, owner.stepping, owner.stepping.kept().get(kind)
        for number, _, numel in self._numbers(core, kind):
            held = core.piece(*kept, number, "write") if kept else nullcontext(stepping.own(kind, [number])[0])
            with held as own:
                if own is not None:
                    own.copy_(flat[begin : begin + numel].reshape(own.shape))
                    begin += numel
            if not kept:
                stepping.keep(kind, number, own)

    def make(self, name):
        """A torch optimizer gets zeros for a state ``name`` of this rank's piece that it has not made yet."""
        stepping = self.owner.stepping
        for number, _, _ in self._numbers(self.owner.core, name)[:1] if not stepping.fused else ():
            master = stepping.masters[number]
            stepping.optimizer.state[master].setdefault(name, torch.zeros_like(master))
