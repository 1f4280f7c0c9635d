"""DeepSpeedCPULion: Lion (Chen et al. 2023) for parameters in host memory."""

from deepspeed.ops.cpu_optimizer import CPUOptimizer


class DeepSpeedCPULion(CPUOptimizer):
    """Lion for parameters in host memory; the formula is in ``csrc/kernels/lion.h``.

    Args:
        model_params: iterable of parameters (fp32, bf16 or fp16) or of parameter groups.
        lr, betas: step size; the weights of the old momentum in the direction and in the new momentum.
        weight_decay: decoupled, ``lr * weight_decay * p`` is taken off.
        fp32_optimizer_states: keep the states of 16-bit parameters in fp32; False keeps them in the parameter's dtype.

    Raises:
        ValueError: a hyperparameter is out of range.
        RuntimeError: a sparse gradient.
        AssertionError: at a step, where a parameter is not in host memory.
    """

    rule = "lion"
    optimizer_id = 0  # of the next object; an object's own is opt_id

    def __init__(self, model_params, lr=0.001, betas=(0.9, 0.999), weight_decay=0, fp32_optimizer_states=True):
        super().__init__(model_params, dict(lr=lr, betas=betas, weight_decay=weight_decay), fp32_optimizer_states)
