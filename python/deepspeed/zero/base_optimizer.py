"""What every optimizer that an engine wraps has in common. Lightning looks for these classes with isinstance."""


class DeepSpeedOptimizer:
    """Base of all wrapped optimizers. Not a ``torch.optim.Optimizer``: it has one inside, ``optimizer``."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """Base of the wrapped optimizers that shard their states."""
