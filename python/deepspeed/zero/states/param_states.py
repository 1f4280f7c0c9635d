"""The states that training keeps of each parameter, whole or this rank's pieces: fp32 masters, gradients, optimizer
states.

A *kind* is "fp32", "grad" or the name of an optimizer state. States of a native optimizer are the core's; those of
another one are its own tensors, one for each piece, and the core collects and spreads them in the same way.
"""

from contextlib import nullcontext

import torch

from deepspeed.config.sections import OffloadStateTypeEnum
from deepspeed.zero.engine_links import EngineLink
from deepspeed.zero.optimizers.states_in_files import split_states
from deepspeed.zero.parameters import pickled_params  # noqa: F401  (registers how parameters are pickled)


class ParamStates:
    """A mixin of classes that own parameters which ``core`` trains; ``stepping`` is their ``Stepping``, ``_params`` are
    those of the optimizer's groups end to end, as the core was built from."""

    states = None  # OffloadedStates

    def _link(self, params):
        self._params = list(params)
        for index, param in enumerate(self._params):
            param._ds_link = ParamLink(self, index)

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

    def rests_in_files(self):
        """Whether masters or optimizer states rest in files (``offload_optimizer.device`` nvme)."""
        return self.core.rest_in_files()

    def _values(self, kind, masters):
        """A kind of these of this rank's pieces."""
        numbers = {id(master): number for number, master in enumerate(self.stepping.masters)}
        return self.stepping.own(kind, [numbers[id(master)] for master in masters])

    def _keep(self, kind, number, values):
        # A state in a file was read as a copy, which goes back.
        if self.stepping.in_files is not None:
            self.stepping.optimizer.state[self.stepping.masters[number]][kind] = values

    def _numbers_of(self, index, kind):
        """``[(number of the piece, offset, numel)]`` of what this rank has of parameter ``index``."""
        if kind == "grad" and not self.core.used()[index]:
            return []
        return [(n, offset, numel) for n, (of, offset, numel) in enumerate(self.core.pieces()) if of == index]

    def own_pieces(self, index, kind):
        """``[(offset, numel, tensor)]`` of what this rank has of parameter ``index``: views, of what lies in files
        copies, which ``set_own_pieces`` writes."""
        pieces = self._numbers_of(index, kind)
        own = self.stepping.own(kind, [number for number, _, _ in pieces])
        return [(offset, numel, one) for (_, offset, numel), one in zip(pieces, own) if one is not None]

    def set_own_pieces(self, index, kind, flat):
        """This rank's pieces of parameter ``index`` take the elements of ``flat``, one piece after the other."""
        begin, kept = 0, self.stepping.kept().get(kind)
        native = kept is not None
        for number, _, numel in self._numbers_of(index, kind):
            held = self.core.piece(*kept, number, "write") if native else self.stepping.own(kind, [number])[0]
            with held if native else nullcontext(held) as own:
                if own is None:
                    continue
                own.copy_(flat[begin : begin + numel].reshape(own.shape))
            if not native:
                self._keep(kind, number, own)
            begin += numel

    def full_tensor(self, index, kind):
        """A copy of the whole ``kind`` of parameter ``index`` in its shape, fp32 (fp64 for fp64 ones).

        Every rank calls it. None for a gradient that no rank has, and for a state that does not exist. Inside
        ``no_sync`` a gradient that has not been reduced is this rank's own.
        """
        kept = self.stepping.kept().get(kind)
        if kept is None:
            return self.core.full_of(self.own_tensors(kind), index)
        found = self.core.full(*kept, index)  # as it lies: reading does not wait for others who read
        if kind != "grad":
            return found
        if found is None and self.engine is not None and self.engine.inside_no_sync_ctxt:
            found = self.core.local_grad(index)
        return found if found is None or self.loss_scale == 1.0 else found / self.loss_scale

    def set_full_tensor(self, index, kind, value):
        """Every rank passes the same ``value``, in the parameter's shape; each takes what it owns of it."""
        value, kept = value.detach(), self.stepping.kept().get(kind)
        if kept is not None:
            self.core.set_full(*kept, index, value.float() * self.loss_scale if kind == "grad" else value)
            return
        own = self.own_tensors(kind)
        self.core.set_full_of(own, index, value)
        for number, _, _ in self._numbers_of(index, kind):
            if own[number] is not None:
                self._keep(kind, number, own[number])

    def make_state(self, index, name):
        """State ``name`` of this rank's piece of a parameter, zeros if a torch optimizer has not made it yet; None
        where this rank owns nothing of it, or a native optimizer has no such state."""
        if not self.stepping.fused:
            for master, (param, _, _) in zip(self.stepping.masters, self.core.pieces()):
                if param == index:
                    return self.stepping.optimizer.state[master].setdefault(name, torch.zeros_like(master))
        return None


class WholeParams(ParamStates):
    """The owner where every rank trains whole parameters and no sharded optimizer stands for them."""

    engine = None

    def __init__(self, core, stepping, params):
        self.core = core
        self.stepping = stepping
        self._link(params)

    @property
    def loss_scale(self):
        return self.stepping.loss_scale


class ParamLink(EngineLink):
    """From a parameter to the owner of its masters, gradients and states; see utils.tensor_fragment."""

    owner = EngineLink.target

    def __init__(self, owner, index):
        super().__init__(owner)
        self.index = index

    def _living(self, kind):
        owner = self.owner
        if owner.states is not None and owner.states.away:
            needed = {"fp32": OffloadStateTypeEnum.hp_params, "grad": OffloadStateTypeEnum.lp_grads}
            kinds = {needed.get(kind, OffloadStateTypeEnum.optim_states)}
            owner.states.need(kinds, f"access to the {kind} of a parameter")
        return owner

    def get(self, kind):
        return self._living(kind).full_tensor(self.index, kind)

    def set(self, kind, value):
        self._living(kind).set_full_tensor(self.index, kind, value)

    def pieces(self, kind):
        """``(offset, numel, tensor)`` of this rank's pieces, see ``ParamStates.own_pieces``."""
        return self._living(kind).own_pieces(self.index, kind)

    def set_pieces(self, kind, flat):
        self._living(kind).set_own_pieces(self.index, kind, flat)
