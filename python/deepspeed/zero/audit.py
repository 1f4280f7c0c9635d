"""The error and the tolerance of the audit (``zero_optimization.audit_steps``), which engine/parts/auditing.py runs."""

import torch

_NARROW = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


class AuditError(RuntimeError):
    """The engine's gradients, norm, update or weights are not those of a plain process."""


def tolerance(dtypes):
    """The relative difference that is allowed between tensors that were computed in ``dtypes`` in another order."""
    return max([1e-5, *(8 * _NARROW[kind] for kind in dtypes if kind in _NARROW)])
