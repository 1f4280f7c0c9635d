"""Memory that a process holds and that ranks share."""

import os
import time


def segments():
    """Mapped segments and open files of segments of this process, and all open files but pipes: of these plain torch 2
    leaves two behind on rank 0 whenever a process group has been there."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        mapped = sum("memfd:deepspeed" in line for line in file)
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    targets = [target for target in targets if not target.startswith("pipe:")]
    return mapped + sum("memfd:deepspeed" in target for target in targets), len(targets)


def settled(count, most):
    """The result of ``count()`` once it is at most ``most``, or after 10 s: a machine that stalls may end threads
    late."""
    end = time.monotonic() + 10
    while (found := count()) > most and time.monotonic() < end:
        time.sleep(0.05)
    return found
