"""Compares every byte of a checkpoint with the one that was saved, and names the tensors that differ."""

import collections
import concurrent.futures
import json
import math
import os
import zipfile
import zlib

from deepspeed.host.recorded_names import open_regular, path_below

# ---- manifest ------------------------------------------------------------------------------------------------------
# ``checkpoint_manifest.json``: which files a checkpoint has, and the checksum of each and of every tensor in it. It
# is written last, when all files are on the disk, so a folder that has one is complete. It carries the CRC-32 of its
# own text, which proves that it is not damaged, and not who wrote it: names in it may lead anywhere, so only
# ``path_below`` makes paths of them. Nothing here needs torch: ``ds_ckpt`` reads it on any machine.

NAME = "checkpoint_manifest.json"
VERSION = 1


class DamagedManifest(RuntimeError):
    """The manifest itself cannot be trusted."""


def text_of(facts, files):
    """The manifest as text. ``facts``: what ``ds_ckpt ls`` tells of the run; ``files``: file name -> record, a dict."""
    body = json.dumps({"version": VERSION, **facts, "files": files}, indent=1, sort_keys=True)
    return f'{{"crc32": {zlib.crc32(body.encode())},\n"checkpoint": {body}}}\n'


def read(folder):
    """The manifest of ``folder`` as a dict, or None where there is none. Raises ``DamagedManifest``."""
    path = os.path.join(folder, NAME)
    try:
        with open_regular(path) as file:
            text = file.read().decode()
        found = json.loads(text)
        body = text[text.index('"checkpoint": ') + len('"checkpoint": ') : text.rindex("}")]
        wrong = zlib.crc32(body.encode()) != found["crc32"]
        facts = found["checkpoint"]
        others = {key: value for key, value in facts.items() if key not in ("version", "files")}
        wrong = wrong or text != text_of(others, facts["files"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedManifest(f"{path} is damaged: {error}") from error
    if wrong:
        raise DamagedManifest(f"{path} is damaged: its checksum is not that of its text")
    _check(path, facts)
    return facts


# Numbers by which checkpoints are compared, and the largest: a time is one that a calendar has.
_NUMBERS = {"saved_at": 1 << 36, "global_steps": 1 << 62}


def _has_numbers(record, *keys):
    """Whether it is a dict with numbers from 0 on under these keys."""
    return isinstance(record, dict) and all(type(record.get(key)) is int and record[key] >= 0 for key in keys)


def _check(path, facts):
    """DamagedManifest for a text that no save writes, and for a name that is no path in the folder."""

    def refuse(what):
        raise DamagedManifest(f"{path} is damaged: {what}")

    if not _has_numbers(facts, "version") or facts["version"] < 1:
        refuse(f"its version is {facts['version']!r}")
    if facts["version"] > VERSION:
        raise DamagedManifest(f"{path} has version {facts['version']}, this library knows up to {VERSION}: update it")
    for key, most in _NUMBERS.items():
        value = facts.get(key, 0)
        if type(value) not in (int, float) or not 0 <= value <= most:
            refuse(f"its {key} is {value!r}, not a number from 0 to {most}")
    if not isinstance(facts["files"], dict):
        refuse("its files are not a table")
    for name, record in facts["files"].items():
        try:
            path_below(os.path.dirname(path), name, path, "tag")  # the text: links are looked at when the name is used
        except ValueError as error:
            raise DamagedManifest(str(error)) from error
        if not _has_numbers(record, "bytes", "crc32") or not isinstance(record.get("tensors", []), list):
            refuse(f"what it says of the file {name!r} is not a record")
        for tensor in record.get("tensors", []):
            if not _has_numbers(tensor, "offset", "bytes", "crc32") or not isinstance(tensor.get("name"), str):
                refuse(f"what it says of a tensor in the file {name!r} is not a record")


def _path(folder, name):
    return path_below(folder, name, os.path.join(folder, NAME))


def _size_problem(folder, name, record):
    """A text that says why a file cannot be the one that was saved: it is not there, or has another size. None for one
    that may be it. No file is read."""
    try:
        size = os.stat(_path(folder, name)).st_size
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    return f"is damaged: it has {size} bytes, {record['bytes']} were saved" if size != record["bytes"] else None


def missing_or_short(folder, facts):
    """Texts that say which files are not there or have another size than they had. Cheap: no file is read."""
    found = ((name, _size_problem(folder, name, record)) for name, record in sorted(facts["files"].items()))
    return [f"{name} {text}" for name, text in found if text is not None]


# ---- verify --------------------------------------------------------------------------------------------------------

_CHUNK = 8 << 20


class Problem(collections.namedtuple("Problem", "file tensor text")):
    """``tensor`` is None where the damage is in no tensor or nobody can say in which."""

    def __str__(self):
        return f"{self.file}: " + (f"tensor '{self.tensor}': " if self.tensor else "") + self.text


def crc32_of(path, begin=0, size=None):
    """CRC-32 of ``size`` bytes from ``begin``, read in chunks (the page cache is not filled with what is read once)."""
    value, left = 0, math.inf if size is None else size
    with open_regular(path) as file:
        file.seek(begin)
        while left > 0 and (data := file.read(min(_CHUNK, left))):
            value, left = zlib.crc32(data, value), left - len(data)
    return value


def _check_file(folder, name, record):
    """Problems of a file. ``record``: what the manifest says of it, None without one."""
    if record is None:
        return _check_zip(folder, name)
    text = _size_problem(folder, name, record)
    if text is not None:
        return [Problem(name, None, text)]
    path = _path(folder, name)
    try:
        if crc32_of(path) == record["crc32"]:
            return []
        bad = [
            Problem(name, tensor["name"], f"bytes {tensor['offset']} to {tensor['offset'] + tensor['bytes']} differ")
            for tensor in record.get("tensors", [])
            if crc32_of(path, tensor["offset"], tensor["bytes"]) != tensor["crc32"]
        ]
    except OSError as error:
        return [Problem(name, None, f"cannot be read: {error.strerror}")]
    return bad or [Problem(name, None, "differs outside of its tensors: in the structure that says what they are")]


def _check_zip(folder, name):
    """A file without a manifest: the records of torch's zip format carry checksums of their own."""
    path = os.path.join(folder, name)
    found = []
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                try:
                    with archive.open(info) as record:
                        while record.read(_CHUNK):
                            pass
                except (zipfile.BadZipFile, OSError, RuntimeError, zlib.error) as error:
                    found.append(Problem(name, info.filename, str(error)))
    except (zipfile.BadZipFile, OSError) as error:
        return [Problem(name, None, f"is not a readable archive: {error}")]
    return found


def verify_folder(folder, only=None, threads=2):
    """Problems of one checkpoint, an empty list when every byte is right. ``only``: names of the files to read.

    Without a manifest (files of another implementation) what the files say of themselves is checked.
    """
    try:
        facts = read(folder)
    except DamagedManifest as error:
        return [Problem(NAME, None, str(error))]
    if facts is None:
        walk = ((root, name) for root, _, files in os.walk(folder) for name in files if name.endswith(".pt"))
        records = dict.fromkeys(os.path.relpath(os.path.join(root, name), folder) for root, name in walk)
    else:
        records = facts["files"]
    jobs = [(folder, name, record) for name, record in sorted(records.items()) if only is None or name in only]
    with concurrent.futures.ThreadPoolExecutor(max(1, threads)) as pool:
        return [problem for problems in pool.map(lambda job: _check_file(*job), jobs) for problem in problems]
