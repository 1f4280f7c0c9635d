"""The op ``cpu_lion``: Lion on one tensor at a time, by number of the optimizer."""

from deepspeed.ops.op_builder.prebuilt.stepper import Handles

_handles = Handles("lion", "CPU Lion", "create_lion")


def create_lion(optimizer_id, lr=1e-3, betas0=0.9, betas1=0.999, weight_decay=0.0, should_log=False):
    """Makes the optimizer ``optimizer_id``."""
    return _handles.create(optimizer_id)


def lion_update(optimizer_id, step, lr, beta1, beta2, weight_decay, params, grads, exp_avg):
    """Update number ``step`` (from 1) of the tensor ``params`` and its momentum, in place."""
    stepper, _ = _handles.get(optimizer_id)
    hyper = dict(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    stepper.step([params], [grads], [[exp_avg]], hyper, step)
    return 0


destroy_lion = _handles.destroy
