"""Memory of this process while something runs."""

import threading
import time


def private_bytes():
    """Resident memory of this process, its shared pages counted once: the kernel's proportional set size."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("no Pss in /proc/self/smaps_rollup")


class Peak(threading.Thread):
    """Largest figure seen, sampled every few milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.highest, self.stop = 0, False

    def run(self):
        while not self.stop:
            self.highest = max(self.highest, private_bytes())
            time.sleep(0.003)
