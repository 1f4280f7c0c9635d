"""``checkpoint_manifest.json``: which files a checkpoint has, and the checksum of each and of every tensor in it.

It is written last, when all files are on the disk, so a folder that has one is complete. It carries the CRC-32 of its
own text. Nothing here needs torch: ``ds_ckpt`` reads it on any machine.
"""

import json
import os
import zlib

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
