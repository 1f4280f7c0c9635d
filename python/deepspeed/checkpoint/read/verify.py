"""Whether every byte of a checkpoint is the one that was saved; where not, which tensor it belongs to."""

import concurrent.futures
import dataclasses
import json
import os
import zipfile
import zlib

# ---- manifest ------------------------------------------------------------------------------------------------------
# ``checkpoint_manifest.json``: which files a checkpoint has, and the checksum of each and of every tensor in it. It
# is written last, when all files are on the disk, so a folder that has one is complete. It carries the CRC-32 of its
# own text. Nothing here needs torch: ``ds_ckpt`` reads it on any machine.

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
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    try:
        text = data.decode()
        found = json.loads(text)
        body = text[text.index('"checkpoint": ') + len('"checkpoint": ') : text.rindex("}")]
        wrong = zlib.crc32(body.encode()) != found["crc32"]
        facts = found["checkpoint"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedManifest(f"{path} is damaged: {error}") from error
    if wrong or text != text_of({k: v for k, v in facts.items() if k not in ("version", "files")}, facts["files"]):
        raise DamagedManifest(f"{path} is damaged: its checksum is not that of its text")
    if facts["version"] > VERSION:
        raise DamagedManifest(f"{path} has version {facts['version']}, this library knows up to {VERSION}: update it")
    return facts


def missing_or_short(folder, facts):
    """Texts that say which files are not there or have another size than they had. Cheap: no file is read."""
    found = []
    for name, record in sorted(facts["files"].items()):
        try:
            size = os.stat(os.path.join(folder, name)).st_size
        except FileNotFoundError:
            found.append(f"{name} is missing")
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
    with open(path, "rb", buffering=0) as file:
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
    path = os.path.join(folder, name)
    try:
        size = os.stat(path).st_size
        if size != record["bytes"]:
            return [Problem(name, None, f"has {size} bytes, {record['bytes']} were saved")]
        if crc32_of(path) == record["crc32"]:
            return []
        bad = [
            Problem(name, tensor["name"], f"bytes {tensor['offset']} to {tensor['offset'] + tensor['bytes']} differ")
            for tensor in record["tensors"]
            if crc32_of(path, tensor["offset"], tensor["bytes"]) != tensor["crc32"]
        ]
    except FileNotFoundError:
        return [Problem(name, None, "is missing")]
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
