"""Engines of others in a save of ours: ``create``, ``save``, ``load`` and ``commit``, and no more is asked of them."""

import os

from deepspeed.checkpoint import storage, verify
from deepspeed.checkpoint.engines.base import CheckpointCommitInfo
from deepspeed.checkpoint.file_record import FileRecord


class ForeignFiles:
    """Writes the files of one checkpoint through ``engine``; after ``finish`` each is at its path."""

    def __init__(self, engine, tag, save_dir, save_latest):
        self.engine = engine
        self.info = CheckpointCommitInfo(tag, save_dir, save_latest)
        self._paths = {}
        self._begun = False

    def write_file(self, name, value, path):
        if not self._begun:
            self._begun = True
            self.engine.create(self.info)
        self.engine.save(storage.compact(value), path)  # a copy: it may still be reading when training goes on
        self._paths[name] = path

    def finish(self):
        """Returns name -> record of the files. Raises RuntimeError when the engine does not vouch for them."""
        who = f"the checkpoint engine {type(self.engine).__name__}"
        answer = self.engine.commit(self.info)
        if answer is not None and not answer:
            raise RuntimeError(f"{who} answered {answer!r} to commit({self.info.tag!r})")
        records = {}
        for name, path in self._paths.items():
            if not os.path.isfile(path):
                raise RuntimeError(f"{who} has left no file {path}: its save(state_dict, path) must write there")
            records[name] = FileRecord(name, os.path.getsize(path), verify.crc32_of(path)).to_dict()
        return records
