"""Engines in scripts that watch torch's operations with a TorchDispatchMode, as FlopCounterMode does."""

from torch.utils._python_dispatch import TorchDispatchMode

from engine_models import net_engine, train_engine
from harness import on_ranks


class _Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@on_ranks(2, init=True)
def test_reports_while_tensors_that_the_mode_has_seen_are_freed(rank, world, folder):
    """Threads that write states to files free such tensors with the interpreter's lock, which the report may hold."""
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    expected = train_engine(net_engine(world, 2), 100, rank, world)
    engine = net_engine(world, 2, zero=nvme)
    losses, norms, seen = [], [], _Counted()
    for step in range(100):
        with seen:
            loss, norm = train_engine(engine, 1, rank, world, start=step)
        losses += loss
        norms += norm
        for _ in range(200):
            report = engine.core.storage.report()
    assert seen.calls > 0 and report["media"]["file"]["written_bytes"] > 0
    assert (losses, norms) == expected
