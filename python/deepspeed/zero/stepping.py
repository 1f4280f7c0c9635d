"""One optimizer step: reduce what is left, norm, clip, update, loss scale. The same for every precision."""

from deepspeed.log import log_dist, logger


class Stepping:
    """Runs the step of ``optimizer`` on the gradients in ``core``.

    ``masters`` are the tensors the optimizer updates, one for each piece that this rank owns and in the core's order:
    the parameters themselves in fp32 where nothing is sharded, fp32 views of the core's buffers otherwise. ``scaler``
    is the loss scaler or None. ``check``: gradients that are not finite skip the step. ``clip`` is the maximum
    2-norm, 0 for none.
    """

    def __init__(self, core, optimizer, masters, names, scaler=None, check=False, clip=0.0, rank=0):
        self.core = core
        self.optimizer = optimizer
        self.masters = masters
        self.names = names
        self.scaler = scaler
        self.check = check
        self.clip = clip
        self.rank = rank
        self.fused = None
        self.need_all = False  # a parameter without a gradient is an error
        self.overflow = False
        self.norm = None
        self._warned_not_finite = False

    @property
    def loss_scale(self):
        return float(self.scaler.loss_scale) if self.scaler is not None else 1.0

    def step(self, move=None):
        """Returns True when the weights were updated, False when the step was skipped.

        ``move``, of the learning-rate schedule (``engine.scheduling.Move``), is made when it is known that the step is
        not skipped, before anything changes: what it raises leaves all as it was, and the gradients in place.
        """
        if self.need_all:
            self.core.finish_backward()
            self._refuse_unused()
        begin = (self.loss_scale, self.clip, self.check)
        if move is not None:
            self.core.begin_step(*begin)
            begin = ()
            if not (self.check and self.core.report().skipped):
                move.make()
        try:
            self._update(begin)
        except BaseException:
            if move is not None:
                move.undo()
            raise
        report = self.core.end_step()
        if move is not None:
            move.keep()
        self.norm = report.norm
        self.overflow = report.skipped
        if report.norm != report.norm or report.norm == float("inf"):
            self._explain_overflow()
            self.core.clear_grads()
        if self.scaler is not None:
            self.scaler.update_scale(self.overflow)
            if self.overflow:
                log_dist(f"The step is skipped; the loss scale is now {self.scaler.loss_scale:g}.", ranks=[0])
        return not self.overflow

    def _update(self, begin):
        """``begin``: the arguments of ``begin_step``; empty when it was called."""
        if self.fused is not None:
            self.fused.begin = begin
            try:
                self.optimizer.step()
            finally:
                self.fused.begin = None
            return
        if begin:
            self.core.begin_step(*begin)
        if not self.core.report().skipped:
            self.core.assign_optimizer_grads(self.masters)
            self.optimizer.step()
            self.core.take_back_grads(self.masters)
            self.core.publish()

    def _refuse_unused(self):
        unused = [name for name, used in zip(self.names, self.core.used()) if not used]
        if unused:
            raise RuntimeError(
                f"no rank has a gradient for {len(unused)} parameter(s): {', '.join(unused[:5])}"
                f"{', ...' if len(unused) > 5 else ''}. Freeze them (requires_grad_(False) before "
                "deepspeed.initialize), or set zero_optimization.ignore_unused_parameters to true"
            )

    def _explain_overflow(self):
        """Says which gradients were not finite, on the rank that produced them."""
        if not self.check:
            if not self._warned_not_finite:
                self._warned_not_finite = True
                logger.warning(
                    f"[Rank {self.rank}] the gradient norm is {self.norm}: {self._list_bad()}. fp32 steps are not "
                    "skipped, so the weights are affected. This is said once."
                )
            return
        bad = self._list_bad()
        if bad:
            logger.warning(f"[Rank {self.rank}] gradient overflow: {bad}.")
        else:
            log_dist("gradient overflow on another rank, which names the parameter.", ranks=[0])

    def _list_bad(self, most=3):
        found = self.core.nonfinite_grads()
        if not found:
            used = self.core.used()
            found = [
                (self.names[index], "nan" if grad.isnan().any() else "inf")
                for (index, _, _), grad in zip(self.core.pieces(), self.core.grads())
                if used[index] and not grad.isfinite().all()
            ]
        text = ", ".join(f"parameter '{name}' has {kind}" for name, kind in found[:most])
        return text + (f" and {len(found) - most} more" if len(found) > most else "")
