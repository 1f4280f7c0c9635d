"""``DeepSpeedCPUAdam`` whose update may go on beside what the caller does next."""

import concurrent.futures
import functools

from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.native_optimizer import loss_of


def _after_wait(method):
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        self.wait()
        return method(self, *args, **kwargs)

    return call


class ZenFlowCPUAdam(DeepSpeedCPUAdam):
    """``overlap_step``: ``step`` starts the update on a thread and returns. Parameters have their new values after
    ``wait()``; the next step, ``zero_grad``, ``state_dict`` and other methods that use states wait by themselves. Until
    then parameters and gradients must not be written to.

    For loops of your own: with ``zero_optimization.zenflow`` the engine does all of it.
    """

    def __init__(self, *args, overlap_step=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.overlap_step = bool(overlap_step)
        self._worker = self._running = None

    def step(self, closure=None):
        """One update. Raises what the update before it has raised."""
        self.wait()
        if not self.overlap_step:
            return super().step(closure)
        loss = loss_of(closure)
        if self._worker is None:
            self._worker = concurrent.futures.ThreadPoolExecutor(1, "deepspeed-zenflow-adam")
        self._running = self._worker.submit(super().step)
        return loss

    def wait(self):
        """Until the update of the last ``step`` has been made; raises what it raised."""
        running, self._running = getattr(self, "_running", None), None
        if running is not None:
            running.result()

    zero_grad = _after_wait(DeepSpeedCPUAdam.zero_grad)
    state_dict = _after_wait(DeepSpeedCPUAdam.state_dict)
    load_state_dict = _after_wait(DeepSpeedCPUAdam.load_state_dict)
    step_subgroup = _after_wait(DeepSpeedCPUAdam.step_subgroup)
    rollback_subgroup = _after_wait(DeepSpeedCPUAdam.rollback_subgroup)
