"""Process groups made from lists of ranks, and which of them this rank is in."""

from deepspeed import comm as dist


class GroupSet:
    """Process groups over ``lists``, which cover every rank once. Every rank of the job makes it."""

    def __init__(self, lists):
        me = dist.get_rank()
        self.group = self.ranks = None
        for ranks in lists:
            made = dist.new_group(ranks)
            if me in ranks:
                self.group, self.ranks = made, list(ranks)

    @property
    def size(self):
        return len(self.ranks)

    @property
    def rank(self):
        """This rank's place in its group."""
        return self.ranks.index(dist.get_rank())


class Registry:
    """The groups this process knows, by name. They go when the process leaves its job: those of another are others."""

    def __init__(self):
        self._sets = {}
        self._job = None  # the group of all ranks when they were made

    def _current(self):
        job = dist.get_world_group() if dist.is_initialized() else None
        if job is not self._job:
            self._sets, self._job = {}, job
        return self._sets

    def __contains__(self, name):
        return name in self._current()

    def make(self, name, lists):
        """Makes the groups, once."""
        found = self._current()
        if name not in found:
            found[name] = GroupSet(lists)
        return found[name]

    def get(self, name, makers=""):
        """The ``GroupSet``; RuntimeError with ``makers``, who makes it, where there is none."""
        found = self._current()
        if name not in found:
            raise RuntimeError(f"there is no {name} group: {makers} makes it, and every rank has to call that")
        return found[name]

    def names(self, kind):
        """Names of ``(kind, name)`` entries, in the order in which they were made."""
        return [entry[1] for entry in self._current() if isinstance(entry, tuple) and entry[0] == kind]

    def clear(self):
        self._sets = {}


registry = Registry()
