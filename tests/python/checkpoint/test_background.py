"""The thread of an engine: order, failures told once and at one step, waiting."""

import textwrap
import threading
import time

from deepspeed.checkpoint.write import background
from deepspeed.checkpoint.write.background import Background
from processes import run_after_torch
from refusals import refused
from threads import started


def test_jobs_keep_their_order_and_the_thread_goes():
    behind, done, gate = Background(), [], threading.Event()
    behind.start(gate.wait)
    for i in range(20):
        behind.start(lambda i=i: done.append(i))
    assert done == []
    gate.set()
    behind.wait()
    assert done == list(range(20))
    assert behind.idle and behind not in background._unsettled
    while any(thread.name.startswith("deepspeed-checkpoint") for thread in threading.enumerate()):
        time.sleep(0.01)
    behind.start(lambda: done.append("again"))
    behind.wait()
    assert done[-1] == "again"


def test_a_save_that_begins_while_the_program_ends_is_done():
    code = """
        import atexit
        from deepspeed.checkpoint.write.background import Background
        behind = Background()
        behind.start(lambda: print("first"))

        @atexit.register
        def last():
            behind.start(lambda: print("last"))
            behind.wait()
        """
    run = run_after_torch(textwrap.dedent(code))
    assert (run.stdout, run.stderr) == ("first\nlast\n", "")


def test_a_failure_is_told_once_at_the_next_step():
    behind = Background()
    behind.step_done()
    behind.start(lambda: behind.fail(OSError(5, "broken"), lambda steps: [steps]))
    behind.drain()
    assert behind in background._unsettled
    refused(OSError, "broken", behind.step_done)
    assert behind not in background._unsettled
    behind.step_done()
    behind.wait()


def test_a_job_that_raises_does_not_end_the_thread():
    behind, done = Background(), []
    behind.start(lambda: 1 / 0)
    behind.start(lambda: done.append(1))
    behind.drain()
    assert done == [1]
    refused(ZeroDivisionError, "", behind.wait)


def test_two_failures_are_told_one_after_the_other():
    behind = Background()
    for text in ("first", "second"):
        behind.start(lambda text=text: behind.fail(RuntimeError(text), lambda steps: [steps]))
    refused(RuntimeError, "first", behind.wait)
    refused(RuntimeError, "second", behind.wait)
    behind.wait()


def test_all_ranks_tell_at_the_same_step():
    """Loops at different speeds that do not even meet: each raises after the step behind the farthest of them."""
    for trial in range(20):
        ranks, meeting, posted = [Background() for _ in range(3)], threading.Barrier(3), [None] * 3

        def settle(rank, steps, posted=posted, meeting=meeting):
            posted[rank] = steps
            meeting.wait()
            return list(posted)

        def train(rank, ranks=ranks):
            for step in range(1, 2000):
                time.sleep(0.0002 * (rank + 1))
                try:
                    ranks[rank].step_done()
                except OSError:
                    return step

        def break_down(rank, ranks=ranks, settle=settle, trial=trial):
            time.sleep(0.004 * (2 - rank) + 0.001 * (trial % 5))
            ranks[rank].fail(OSError(28, "full"), lambda steps: settle(rank, steps))

        loops = [started(train, rank) for rank in range(3)]
        for rank in range(3):
            ranks[rank].start(lambda rank=rank: break_down(rank))
        assert [loop.result() for loop in loops] == [max(posted) + 1] * 3


def test_a_folder_is_written_by_one_save_at_a_time(tmp_path):
    background.enter(str(tmp_path / "tag"))
    other = started(background.wait_for, str(tmp_path) + "/./tag")
    background.wait_for(str(tmp_path / "another"))
    time.sleep(0.05)
    assert not other.done()
    background.leave(str(tmp_path / "tag"))
    assert other.result(5) is None


def test_the_end_of_the_program_waits_and_tells(tmp_path):
    script = textwrap.dedent(
        f"""
        import time
        from deepspeed.checkpoint.write.background import Background
        behind = Background()
        def slow():
            time.sleep(0.5)
            open({str(tmp_path / "done")!r}, "w").close()
            behind.fail(OSError(28, "rank 1: disk full"), lambda steps: [steps])
        behind.start(slow)
        """
    )
    out = run_after_torch(script)
    assert (tmp_path / "done").exists()
    assert "at the end of the program: [Errno 28] rank 1: disk full" in out.stderr


def test_a_forked_child_does_not_wait_for_a_thread_that_is_not_there():
    script = textwrap.dedent(
        """
        import os, sys, threading
        from deepspeed.checkpoint.write.background import Background
        behind, gate = Background(), threading.Event()
        behind.start(gate.wait)
        if os.fork() == 0:
            behind.wait()
            sys.exit(0)
        os.wait()
        gate.set()
        """
    )
    assert run_after_torch(script).returncode == 0
