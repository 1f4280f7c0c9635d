"""Which ranks share the writing of files of which all data-parallel ranks have the same (``writer.data_parallel``)."""

import os
import socket

from deepspeed.checkpoint import native_contents
from deepspeed.checkpoint.file_writer import PreparedTorch
from deepspeed.checkpoint.shared_file import Cuts, SharedTorch, complete
from deepspeed.host.cpu import socket_of_process


def make_sharing(engine, ranks):
    """A ``Sharing`` for one save, or None where nothing is to be shared. Every rank calls it."""
    writer = engine._config.checkpoint_config.writer
    mode = writer.data_parallel if writer is not None else None
    if mode is None or engine._stage_policy.saved.model_by_rank or native_contents.is_wanted(engine):
        return None
    local = int(os.environ.get("LOCAL_RANK", 0))
    own = [socket.gethostname(), socket_of_process(local), engine.mp_rank_for_files(), engine.parallel.dp_rank]
    return Sharing(mode.upper(), ranks.gather(own), ranks)


class Sharing:
    """``facts``: [host, socket, model-parallel rank, data-parallel rank] of every rank.

    REPLICA: every data-parallel rank writes; SOCKET: one of each socket of each host; MACHINE: one of each host. With a
    disk for every node (``ranks.nodes``) those on the node of the first.
    """

    def __init__(self, mode, facts, ranks):
        self.ranks = ranks
        self.writers = []  # ranks that share this rank's files, the one that leads first
        mp_rank = facts[ranks.rank][2]
        members = sorted((fact[3], rank) for rank, fact in enumerate(facts) if fact[2] == mp_rank)
        node = ranks.nodes[members[0][1]]
        taken = set()
        for dp_rank, rank in members:
            host, socket_number = facts[rank][:2]
            place = {"REPLICA": dp_rank, "SOCKET": (host, socket_number), "MACHINE": host}[mode]
            if ranks.nodes[rank] == node and place not in taken:
                taken.add(place)
                self.writers.append(rank)
        self.writes = ranks.rank in self.writers and len(self.writers) > 1
        self.leads = self.writes and self.writers[0] == ranks.rank
        self._led = {}  # name -> (PreparedTorch, Cuts) of files that this rank completes

    def cut(self, files, names, agree):
        """``files`` as ``contents.files_of`` gives them, with the parts of this rank in place of the files ``names``.
        Every rank calls it; ``agree(error, value)`` gives the values of all, or raises on all."""
        prepared, error = {}, None
        try:
            if self.writes:
                prepared = {name: PreparedTorch(files[name]()) for name in names}
        except Exception as caught:
            error = caught
        told = agree(error, {name: [len(made.texts), made.entries()] for name, made in prepared.items()})
        found, error = dict(files), None
        for name, made in prepared.items():
            texts, entries = told[self.writers[0]][name]
            own = [list(entry) for entry in made.entries()[texts:-2]]
            if own != [list(entry) for entry in entries[texts:-2]]:
                error = RuntimeError(
                    f"{name} has other tensors here than on rank {self.writers[0]}: ranks can share its writing only "
                    "when all have the same; set checkpoint.writer.data_parallel to null, or give all the same "
                    "client_state"
                )
                continue
            cuts = Cuts(entries, texts, len(self.writers))
            found[name] = lambda part=SharedTorch(made, cuts, self.writers.index(self.ranks.rank)): part
            if self.leads:
                self._led[name] = made, cuts
        agree(error, None)
        return found

    def complete(self, records, folder):
        """Ends the files that this rank leads. ``records``: of every rank, name -> record. Returns this rank's own, in
        which those files stand as wholes."""
        own = dict(records[self.ranks.rank])
        for name in [name for name, record in own.items() if "part" in record]:
            del own[name]
            if name in self._led:
                parts = [records[rank][name]["part"] for rank in self.writers]
                own[name] = complete(os.path.join(folder, name), *self._led[name], parts).to_dict()
        return own
