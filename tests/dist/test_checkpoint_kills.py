"""Saves that are killed at random moments. One of the saves loads afterwards, whole, and none that ended is lost."""

import random
import signal

import pytest

from engine_models import saving_engine
from harness import run_ranks
from runs import raised
from test_checkpoint_crash import mark, marks


def body(rank, world, folder, stage, value, seconds, background):
    """Loads what is there, and says what; then saves ``value``. Rank 0 dies ``seconds`` after the save began."""
    engine = saving_engine(world, stage, **{"async": background})
    path, _ = engine.load_checkpoint(folder)
    loaded = engine.global_steps if path else 0
    assert not path or marks(engine) == [float(loaded)]
    with open(f"{folder}.loaded", "w", encoding="utf-8") as file:
        file.write(str(loaded))
    mark(engine, value)
    if rank == 0 and seconds:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the process ends at once, with whatever its threads do
        signal.setitimer(signal.ITIMER_REAL, seconds)
    engine.save_checkpoint(folder)
    engine.destroy()
    signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=pytest.mark.every("more of the same"))])
def test_killed_at_random_moments(kills, tmp_path):
    draws, folder, died = random.Random(7), str(tmp_path / "saves"), 0
    newest, ended = 0, 0  # the save that was loaded last, and the last one that nobody killed
    for value in range(1, kills + 2):
        world, stage = draws.choice([1, 1, 1, 2]), draws.randrange(4)
        seconds = 10 ** draws.uniform(-3.5, -0.8) if value <= kills else 0
        error = raised(run_ranks, world, body, folder, stage, value, seconds, draws.random() < 0.3)
        killed = ("SIGALRM", "closed by peer", "ended")  # what one of the ranks says first
        assert error is None or any(word in error[1] for word in killed), error
        with open(f"{folder}.loaded", encoding="utf-8") as file:
            loaded = int(file.read())
        assert max(newest, ended) <= loaded < value
        newest, ended, died = loaded, value if error is None else ended, died + (error is not None)
    assert died > kills / 4 and ended > 0
