"""Optimizers whose ranks exchange signs: masks, saves between two exchanges, and what a load forgets."""

import contextlib

from deepspeed.comm.mpi_exchange import mpi_communicator
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import log_dist, warning_once
from deepspeed.ops.onebit.sign_optimizer import ERRORS


@engine_parts.add("_compressed")
class CompressedCommunication(Part):
    """A part of the engine. It is idle where the optimizer exchanges no signs."""

    _exchanges, _told = None, False

    def start(self):
        stepping = self.engine.stepping
        if stepping is None or stepping.exchanges is None or not stepping.exchanges.active:
            return
        self._exchanges, self._optimizer, self._masks = stepping.exchanges, stepping.optimizer, {}
        if self._optimizer.one_scale and getattr(self.engine.module, "tied_comms", None):
            raise ValueError(
                f"{type(self._optimizer).__name__} sends the parameters of a stage with one scale, so tied layers of a "
                "pipeline would become different on their stages: use OneBitAdam, or tie no layers"
            )
        if self._optimizer.comm_backend_name == "mpi":
            if hasattr(self.engine, "train_batch"):
                raise ValueError(
                    'comm_backend_name "mpi" does not work with a pipeline: use "nccl" or "compressed", which send '
                    "over the transport that the engine has"
                )
            self._exchanges.use_ranks(mpi_communicator(self._optimizer.cuda_aware))
        self._take_masks()

    @property
    def active(self):
        """Whether the optimizer exchanges signs."""
        return self._exchanges is not None

    def _take_masks(self):
        for number, mask in self._optimizer.masks():
            if mask is not self._masks.get(number):
                self._exchanges.set_mask(number, mask)
                self._masks[number] = mask

    def before_step(self):
        if self._exchanges is not None:
            self._take_masks()

    def after_step(self):
        """The errors of the ranks are states that scripts can look at."""
        if self._exchanges is None or not self._exchanges.local:
            return
        if self._exchanges.frozen and not self._told:
            self._told = True
            self._tell_of_freeze()
        for number, param in enumerate(self.engine.stepping.masters):
            state = self._optimizer.state[param]
            if ERRORS[0] not in state and (errors := self._exchanges.errors(number)) is not None:
                state.update(zip(ERRORS, errors))

    def _tell_of_freeze(self):
        name, steps = type(self._optimizer).__name__, int(self.engine.core.steps().max())
        text = f"{name}: the variance is frozen after {steps} updates; the ranks exchange signs from now on."
        log_dist(text, ranks=[0])
        rows = self._exchanges.zero_variances()
        if rows:
            warning_once(
                f"{name}: the variance of some rows of {', '.join(rows[:3])}{' and others' if len(rows) > 3 else ''} "
                "is zero at the freeze, because their gradients were always zero. Signs cannot say zero and would move "
                "these rows: give them an exp_avg_mask (docs/tutorials/onebit.md)."
            )

    @contextlib.contextmanager
    def common_weights(self):
        """A context for a save: between two exchanges, the model and the masters have the weights of the last one,
        which all ranks have in common."""
        apart = self._exchanges is not None and self._exchanges.apart
        if apart:
            self._exchanges.show_common(True)
        try:
            yield
        finally:
            if apart:
                self._exchanges.show_common(False)

    def after_load(self):
        if self._exchanges is not None:
            log_dist(
                f"{type(self._optimizer).__name__}: the errors of exchanges and local steps start from zero after this "
                "load, as no checkpoint has them.",
                ranks=[0],
            )
