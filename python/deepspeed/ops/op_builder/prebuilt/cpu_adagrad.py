"""The op ``cpu_adagrad``: Adagrad on one tensor at a time, by number of the optimizer."""

from deepspeed.ops.op_builder.prebuilt.stepper import Handles

_handles = Handles("adagrad", "CPU Adagrad", "create_adagrad")


def create_adagrad(optimizer_id, lr=1e-2, eps=1e-10, weight_decay=0.0, should_log=False):
    """Makes the optimizer ``optimizer_id``."""
    return _handles.create(optimizer_id)


def adagrad_update(optimizer_id, step, lr, epsilon, weight_decay, params, grads, exp_avg_sq):
    """Update number ``step`` (from 1) of the tensor ``params`` and its sum of squares, in place."""
    stepper, _ = _handles.get(optimizer_id)
    stepper.step([params], [grads], [[exp_avg_sq]], dict(lr=lr, eps=epsilon, weight_decay=weight_decay), step)
    return 0


destroy_adagrad = _handles.destroy
