"""Ranks that agree through small files, for threads in the background: collectives belong to the training loop."""

import json
import os
import shutil
import time

from deepspeed.checkpoint.ranks import Ranks


class RanksThroughFiles(Ranks):
    """The ranks ``like``, meeting in ``folder``, which those that write into the same directory share.

    With a disk for every node the ranks of one node meet; for the other nodes' ranks ``gather`` gives None. A rank
    that does not come within ``patience_s`` seconds is named in a TimeoutError.
    """

    def __init__(self, like, folder, patience_s):
        self.rank, self.size, self.node, self.nodes, self.leads = (
            like.rank,
            like.size,
            like.node,
            like.nodes,
            like.leads,
        )
        self.folder, self.patience_s = folder, patience_s
        self.turn = 0

    def _path(self, turn, rank):
        return os.path.join(self.folder, f"{turn}.{rank}.json")

    def gather(self, value):
        here = [rank for rank in range(self.size) if self.nodes[rank] == self.node]
        turn, self.turn = self.turn, self.turn + 1
        if here == [self.rank]:
            return [value if rank == self.rank else None for rank in range(self.size)]
        os.makedirs(self.folder, exist_ok=True)
        own = self._path(turn, self.rank)
        with open(own + ".writing", "w") as file:
            json.dump(value, file)
        os.replace(own + ".writing", own)
        found, pause, until = {}, 0.001, time.monotonic() + self.patience_s
        while len(found) < len(here):
            for rank in here:
                if rank not in found and os.path.exists(self._path(turn, rank)):
                    with open(self._path(turn, rank)) as file:
                        found[rank] = json.load(file)
            if len(found) == len(here):
                break
            if time.monotonic() > until:
                late = ", ".join(str(rank) for rank in here if rank not in found)
                raise TimeoutError(f"ranks {late} have not written their part within {self.patience_s:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        return [found.get(rank) for rank in range(self.size)]

    def close(self):
        """After the last ``gather``. The last rank to call it removes the folder: until then others may be reading."""
        here = [rank for rank in range(self.size) if self.nodes[rank] == self.node]
        if here == [self.rank]:
            return
        with open(os.path.join(self.folder, f"left.{self.rank}"), "w"):
            pass
        if all(os.path.exists(os.path.join(self.folder, f"left.{rank}")) for rank in here):
            shutil.rmtree(self.folder, ignore_errors=True)
