"""The error of the audit (``zero_optimization.audit_steps``), which ``engine/parts/auditing.py`` runs."""


class AuditError(RuntimeError):
    """The engine's gradients, norm, update or weights are not those of a plain process."""
