"""Whether every byte of a checkpoint is the one that was saved; where not, which tensor it belongs to."""

import concurrent.futures
import dataclasses
import json
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
            data = file.read()
    except FileNotFoundError:
        return None
    try:
        text = data.decode()
        found = json.loads(text)
        body = text[text.index('"checkpoint": ') + len('"checkpoint": ') : text.rindex("}")]
        wrong = zlib.crc32(body.encode()) != found["crc32"]
        facts = found["checkpoint"]
        others = {key: value for key, value in facts.items() if key not in ("version", "files")}
        wrong = wrong or text != text_of(others, facts["files"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedManifest(f"{path} is damaged: {error}") from error
    if wrong:
        raise DamagedManifest(f"{path} is damaged: its checksum is not that of its text")
    _check(path, facts)
    return facts


# Numbers by which checkpoints are compared, and the largest: a time is one that a calendar has.
_NUMBERS = {"saved_at": 1 << 36, "global_steps": 1 << 62}


def _is_number(value, least=0):
    return type(value) is int and value >= least


def _check(path, facts):
    """DamagedManifest for a text that no save writes, and for a name that is no path in the folder."""

    def refuse(what):
        raise DamagedManifest(f"{path} is damaged: {what}")

    if not _is_number(facts["version"], 1):
        refuse(f"its version is {facts['version']!r}")
    if facts["version"] > VERSION:
        raise DamagedManifest(f"{path} has version {facts['version']}, this library knows up to {VERSION}: update it")
    for key, most in _NUMBERS.items():
        value = facts.get(key, 0)
        if type(value) not in (int, float) or not 0 <= value <= most:
            refuse(f"its {key} is {value!r}, not a number from 0 to {most}")
    if not isinstance(facts["files"], dict):
        refuse("its files are no table")
    for name, record in facts["files"].items():
        try:
            path_below(os.path.dirname(path), name, path, "tag")  # the text: links are looked at when the name is used
        except ValueError as error:
            raise DamagedManifest(str(error)) from error
        numbers = isinstance(record, dict) and [record.get("bytes"), record.get("crc32")]
        tensors = numbers and record.get("tensors", [])
        if not numbers or not all(map(_is_number, numbers)) or not isinstance(tensors, list):
            refuse(f"what it says of the file {name!r} is no record")
        for tensor in tensors:
            numbers = isinstance(tensor, dict) and [tensor.get(key) for key in ("offset", "bytes", "crc32")]
            if not numbers or not all(map(_is_number, numbers)) or not isinstance(tensor.get("name"), str):
                refuse(f"what it says of a tensor in the file {name!r} is no record")


def _path(folder, name):
    return path_below(folder, name, os.path.join(folder, NAME))


def missing_or_short(folder, facts):
    """Texts that say which files are not there or have another size than they had. Cheap: no file is read."""
    found = []
    for name, record in sorted(facts["files"].items()):
        try:
            size = os.stat(_path(folder, name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            found.append(f"{name} is missing")
            continue
        except (OSError, ValueError) as error:
            found.append(f"{name} cannot be read: {error}")
            continue
        if size != record["bytes"]:
            found.append(f"{name} is damaged: it has {size} bytes, {record['bytes']} were saved")
    return found


# ---- verify --------------------------------------------------------------------------------------------------------

_CHUNK = 8 << 20


@dataclasses.dataclass(frozen=True)
class Problem:
    """``tensor`` is None where the damage is in no tensor or nobody can say in which."""

    file: str
    tensor: str
    text: str

    def __str__(self):
        return f"{self.file}: " + (f"tensor '{self.tensor}': " if self.tensor else "") + self.text


def crc32_of(path, begin=0, size=None):
    """CRC-32 of ``size`` bytes from ``begin``, read in chunks (the page cache is not filled with what is read once)."""
    value = 0
    with open_regular(path) as file:
        file.seek(begin)
        while size is None or size > 0:
            data = file.read(_CHUNK if size is None else min(_CHUNK, size))
            if not data:
                break
            value = zlib.crc32(data, value)
            if size is not None:
                size -= len(data)
    return value


def _check_file(folder, name, record):
    try:
        path = _path(folder, name)
        size = os.stat(path).st_size
        if size != record["bytes"]:
            return [Problem(name, None, f"has {size} bytes, {record['bytes']} were saved")]
        if crc32_of(path) == record["crc32"]:
            return []
        bad = [
            Problem(name, tensor["name"], f"bytes {tensor['offset']} to {tensor['offset'] + tensor['bytes']} differ")
            for tensor in record.get("tensors", [])
            if crc32_of(path, tensor["offset"], tensor["bytes"]) != tensor["crc32"]
        ]
    except (FileNotFoundError, NotADirectoryError):
        return [Problem(name, None, "is missing")]
    except OSError as error:
        return [Problem(name, None, f"cannot be read: {error.strerror}")]
    except ValueError as error:
        return [Problem(name, None, str(error))]
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
        return [Problem(name, None, f"is no readable archive: {error}")]
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
        names = sorted(
            os.path.relpath(os.path.join(root, name), folder)
            for root, _, files in os.walk(folder)
            for name in files
            if name.endswith(".pt")
        )
        jobs = [(_check_zip, (folder, name)) for name in names if only is None or name in only]
    else:
        jobs = [
            (_check_file, (folder, name, record))
            for name, record in sorted(facts["files"].items())
            if only is None or name in only
        ]
    with concurrent.futures.ThreadPoolExecutor(max(1, threads)) as pool:
        results = list(pool.map(lambda job: job[0](*job[1]), jobs))
    return [problem for problems in results for problem in problems]
