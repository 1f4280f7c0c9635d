"""An end that is announced: SIGTERM, which schedulers send some time before they take a host away."""

import os
import signal
import threading
import weakref

import torch

from deepspeed.comm import mesh_views
from deepspeed.comm import process_group as dist
from deepspeed.engine.members import Part, engine_parts, member
from deepspeed.host.launcher_messages import tell_launcher
from deepspeed.log import logger

EXIT_CODE = 128 + signal.SIGTERM


@engine_parts.add("_announced_end", order=1)
class AnnouncedEnd(Part):
    """A part of the engine. With ``elasticity.save_on_signal`` the step after SIGTERM ends with a checkpoint, then all
    ranks end with exit code 143.

    Ranks hear of the signal at different times, or only one does. Each says in a sum that starts at the end of a step
    and is read at the end of the next whether it has: so all save behind the same step, and nobody waits for it.
    """

    _listener = None
    _client_state = dict

    @member
    def set_signal_client_state(self, function):
        """``function()`` returns the ``client_state`` of the checkpoint that ``elasticity.save_on_signal`` writes, and
        of the snapshots of ``elasticity.memory_copies``. Without one it is empty."""
        self._client_state = function

    def client_state(self):
        """The values of the program that a checkpoint has which the program does not save itself."""
        return self._client_state()

    def start(self):
        engine, self._folder = self.engine, self.engine._config.elasticity_config.save_on_signal
        if not self._folder or not engine._trains:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "elasticity.save_on_signal: signals reach the main thread alone, and this engine is made in another "
                "one; leave the key out, or call deepspeed.initialize in the main thread"
            )
        self._listener = _Listener(engine.global_rank)
        weakref.finalize(engine, self._listener.leave).atexit = False
        self._flag, self._work = torch.zeros(1, dtype=torch.int32), None
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._all = mesh_views.adopted_by_all() if several else None

    def stop(self):
        """SIGTERM does again what it did before."""
        if self._listener is not None:
            self._listener.leave()
            self._listener = self._all = self._work = None

    def after_step(self):
        """Raises SystemExit when the checkpoint is on the disk."""
        if self._listener is None or not self._agreed():
            return
        engine = self.engine
        engine.save_checkpoint(self._folder, client_state=self.client_state())
        if (behind := getattr(engine.checkpoint_engine, "behind", None)) is not None:
            behind.wait()
        logger.warning("SIGTERM: saved in %s behind step %d, and ended", self._folder, engine.global_steps)
        raise SystemExit(EXIT_CODE)

    def _agreed(self):
        if self._all is None:
            return self._listener.heard
        if self._work is not None:
            self._work.wait()
            if self._flag.item():
                return True
        self._flag.fill_(self._listener.heard)
        self._work = self._all.run("all_reduce", output=self._flag, op="max", tag="save_on_signal")
        return False


class _Listener:
    """The handler of SIGTERM, which knows no engine, so that it keeps none alive."""

    def __init__(self, rank):
        self.heard = False
        self._rank = rank
        self._handler = self._on_signal
        self._process = os.getpid()
        self._before = signal.signal(signal.SIGTERM, self._handler)

    def _on_signal(self, number, frame):
        if os.getpid() != self._process:  # a worker that was forked ends as it would without us
            signal.signal(number, self._before if self._before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.heard = True
        tell_launcher(saving=self._rank)
        if callable(self._before):
            self._before(number, frame)

    def leave(self):
        here = threading.current_thread() is threading.main_thread()  # else nobody may change handlers
        if here and signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
