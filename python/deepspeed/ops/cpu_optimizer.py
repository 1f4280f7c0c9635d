"""The base of the ``DeepSpeedCPU...`` classes: parameters in host memory, and a number for each object."""

from deepspeed.ops.native_optimizer import NativeOptimizer


class CPUOptimizer(NativeOptimizer):
    """One native call per parameter group, on ``torch.get_num_threads()`` threads.

    A subclass has an ``optimizer_id`` of its own, 0 at first: that of its next object, whose own is ``opt_id``.
    """

    optimizer_id = 0

    def __init__(self, params, defaults, fp32_optimizer_states=True, **options):
        super().__init__(params, defaults, fp32_states=fp32_optimizer_states, **options)
        kind = type(self)
        self.opt_id = kind.optimizer_id
        kind.optimizer_id += 1
        self.fp32_optimizer_states = fp32_optimizer_states

    def _check_param(self, param):
        if param.device.type != "cpu":
            raise AssertionError(
                f"{type(self).__name__} updates parameters in host memory, but one of shape {tuple(param.shape)} is "
                f'on {param.device}. Enable "offload_optimizer": {{"device": "cpu"}} in the ZeRO section of the '
                f"config, or use the Fused class for parameters on an accelerator."
            )
