"""Folders of checkpoints as somebody who means harm would write them, in a sandbox with sentinel files around.

Everything follows from the number of a case: a case that failed once can be run again by itself.
"""

import json
import os
import pathlib
import random
import zlib

import torch

from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.write import owner, verify

MODEL = "mp_rank_00_model_states.pt"
SHARD = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


class Sandbox:
    """``base/outside`` has sentinels, and so has the folder ``base/saves/t`` beside the files of a checkpoint."""

    def __init__(self, base):
        self.base, self.outside = str(base), os.path.join(base, "outside")
        self.saves, self.folder = os.path.join(base, "saves"), os.path.join(base, "saves", "t")
        os.makedirs(os.path.join(self.outside, "deep"))
        os.makedirs(os.path.join(self.folder, "mine"))
        for path in self._paths():
            pathlib.Path(path).write_text(f"sentinel {os.path.basename(path)}")
        self._seen = self._state()

    def _paths(self):
        outside = [os.path.join(self.outside, *parts) for parts in (("victim",), ("deep", "victim"), (MODEL,))]
        return [*outside, os.path.join(self.folder, "thesis.txt"), os.path.join(self.folder, "mine", "notes")]

    def _state(self):
        found = {os.path.join(root, name) for root, ds, fs in os.walk(self.outside) for name in (*ds, *fs)}
        contents = [(pathlib.Path(path).read_bytes(), os.stat(path).st_size) for path in self._paths()]
        return found, contents, sorted(os.listdir(self.base))

    def check(self):
        assert self._state() == self._seen

    def names(self):
        """Names that lead, or might lead, to the sentinels or into loops."""
        up = os.path.relpath(self.outside, self.folder)
        victim = os.path.join(self.outside, "victim")
        return [
            victim, f"{up}/victim", f"mine/../{up}/victim", f"./{up}/victim", "out/victim", "out/deep/victim", "file",
            "thesis.txt", "mine/notes", "mine", "out", "..", ".", "", "/", "//", f"/{up}/victim", f"..//{up}/victim",
            "a\0b", "\ud800", "\udcff/..",
            "x" * 300, "y/" * 200 + "z", "loop", "loop/a", "pipe", "dangling", "-rf", "~/victim",
            f"{MODEL}/../../victim", f"{up}/deep", "a\nb", "\\..\\victim", f"{victim}\0.pt", "a//b", "sub/new",
        ]  # fmt: skip

    def plant_links(self):
        out = self.outside
        for name, target in (("out", out), ("file", f"{out}/victim"), ("loop", "loop"), ("dangling", f"{out}/new")):
            os.symlink(target, os.path.join(self.folder, name))
        os.mkfifo(os.path.join(self.folder, "pipe"))


def junk(chance, bad):
    return chance.choice([
        None, True, -1, 0, 3, 2**70, 1.5, float("inf"), "", "text", [], {}, [[]], {"a": 1}, chance.choice(bad),
        [chance.choice(bad)], {"x": chance.choice(bad)},
    ])  # fmt: skip


def changed(value, chance, bad):
    """``value`` with one change somewhere: a node replaced, a key renamed, removed or added."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        made, key = dict(value), chance.choice(list(value))
        how = chance.random()
        if how < 0.3:
            made[chance.choice(bad)] = made.pop(key)
        elif how < 0.4:
            del made[key]
        elif how < 0.5:
            made[chance.choice(bad)] = made[key]
        else:
            made[key] = changed(made[key], chance, bad)
        return made
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        return [*value[:at], changed(value[at], chance, bad), *value[at + 1 :]]
    return junk(chance, bad)


def _record(path):
    data = pathlib.Path(path).read_bytes()
    return {"name": os.path.basename(path), "bytes": len(data), "crc32": zlib.crc32(data), "tensors": []}


def put_files(sandbox, chance):
    """The files of a checkpoint, and its manifest as a dict."""
    records = {}
    for name in (MODEL, SHARD, names.RUN_STATES(rank=0)):
        path = os.path.join(sandbox.folder, name)
        pathlib.Path(path).write_bytes(bytes([chance.randrange(256)]) * chance.randrange(1, 99))
        records[name] = _record(path)
    return {"tag": "t", "saved_at": 1.0, "global_steps": 3, "zero_stage": 1, "world_size": 1}, records


def put_manifest(folder, facts, records, chance, sandbox):
    """Changed in its structure, with the right checksum over it; or in its bytes."""
    bad, how = sandbox.names(), chance.random()
    if how < 0.5:  # an honest record, or one that fits the sentinel, under another name
        found = [*records.values(), _record(os.path.join(sandbox.outside, "victim"))]
        records = {**records, **{chance.choice(bad): chance.choice(found) for _ in range(3)}}
    elif how < 0.9:
        facts, records = chance.choice([(changed(facts, chance, bad), records), (facts, changed(records, chance, bad))])
    try:
        text = verify.text_of(facts if isinstance(facts, dict) else {"facts": facts}, records).encode()
    except (TypeError, ValueError):
        text = b"{}"
    if how >= 0.9:
        data = bytearray(text)
        for _ in range(chance.randrange(1, 9)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        text = bytes(data[: chance.randrange(1, len(data) + 1)])
    pathlib.Path(folder, verify.NAME).write_bytes(text)


def put_mark(folder, chance, sandbox, **more):
    bad = sandbox.names()
    facts = {**owner.Process.here()._asdict(), "pid": 2**22 + 1, "locked": False, "in_place": True, **more}
    facts["files"] = [MODEL, *(chance.choice(bad) for _ in range(4))]
    if chance.random() < 0.4:
        facts = changed(facts, chance, bad)
    text = json.dumps(facts)
    if chance.random() < 0.1:
        text = text[: chance.randrange(len(text))]
    pathlib.Path(owner.path_in(folder)).write_text(text)


def change_source(folder, chance, bad):
    """The name of a parameter or state in all files of ``folder`` is changed."""
    old = chance.choice(["words.weight", "layers.0.scale", "exp_avg", "exp_avg_sq"])
    rename_key(folder, old, chance.choice(bad))


def rename_key(folder, old, new):
    """The keys ``old`` in all files of ``folder`` become ``new``."""

    def renamed(value):
        if isinstance(value, dict):
            made = {(new if key == old else key): renamed(item) for key, item in value.items()}
            return type(value)(made) if type(value) is not dict else made
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(renamed(item) for item in value)
        return value

    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        value = torch.load(path, weights_only=False)
        torch.save(renamed(value), path)


def change_universal(folder, chance, sandbox):
    """One entry below ``zero`` becomes something else."""
    zero, bad = os.path.join(folder, "zero"), sandbox.names()
    name = chance.choice(sorted(entry.name for entry in os.scandir(zero) if entry.is_dir()))
    place, how = os.path.join(zero, name), chance.randrange(7)
    file = os.path.join(place, chance.choice(["fp32.pt", "exp_avg.pt", "step.pt"]))
    if how == 0:
        os.rename(place, place + ".moved")
        os.symlink(sandbox.outside, place)
    elif how == 1:
        os.unlink(file)
        os.symlink(os.path.join(sandbox.outside, "victim"), file)
    elif how == 2:
        os.unlink(file)
        os.mkfifo(file)
    elif how == 3:
        with open(file, "r+b") as opened:
            opened.seek(chance.randrange(os.path.getsize(file)))
            opened.write(bytes(chance.randrange(256) for _ in range(8)))
    elif how == 4:
        torch.save(junk(chance, [text for text in bad if text.isprintable()]), file)
    else:
        path = os.path.join(folder, MODEL)
        model = torch.load(path, weights_only=False)
        if how == 5:
            model["param_shapes"][0][chance.choice(bad)] = torch.Size([2])
        else:
            model[chance.choice(list(model))] = junk(chance, [text for text in bad if text.isprintable()])
        torch.save(model, path)


def chance_of(number):
    return random.Random(f"hostile folder {number}")
