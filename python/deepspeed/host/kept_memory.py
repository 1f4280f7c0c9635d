"""The memory of a host that outlives the ranks of an elastic job: a folder in /dev/shm that the host's agent holds.

Ranks write into their own host's folder as into any other. Into that of another host files go through its keeper
(``deepspeed.launcher.memory_keeper``): a connection that begins with a proof of the keeper's key, a line of JSON with
``folder`` and ``files`` ([name, bytes] in order), then the bytes of all files. The answer is a line: what went wrong,
or an empty text when all files are there. The last file appears when all others are whole.
"""

import json
import os
import socket

from deepspeed.host.job_key import proof

FOLDER_VARIABLE = "DS_MEMORY_FOLDER"  # of this host
KEEPER_VARIABLE = "DS_MEMORY_KEEPER"  # port:key of its keeper
LINE_BYTES = 1 << 20  # the longest line that either side reads
SILENT_S = 30.0  # after which the other side counts as gone


def own_address():
    """The address at which the hosts of this job reach this one."""
    target = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def read_line(connection):
    """A line of text without its end. OSError when there is none."""
    data = bytearray()
    while not data.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(data) > LINE_BYTES:
            raise ConnectionError("the connection was closed" if not byte else "what came is not a line")
        data += byte
    return data[:-1].decode("utf-8", "replace")


def hand_over(keeper, source, folder, files):
    """Copies ``files`` (names below ``source``) to another host, as ``folder`` below its keeper's.

    ``keeper``: (address, port, key). Raises OSError, also for what the other host says.
    """
    address, port, key = keeper
    sizes = [os.path.getsize(os.path.join(source, name)) for name in files]
    with socket.create_connection((address, port), timeout=SILENT_S) as connection:
        told = {
            "proof": proof(key, read_line(connection), "rank"), "folder": folder, "files": list(zip(files, sizes)),
        }  # fmt: skip
        connection.sendall(json.dumps(told).encode() + b"\n")
        for name in files:
            with open(os.path.join(source, name), "rb") as file:
                connection.sendfile(file)
        why = read_line(connection)
    if why:
        raise OSError(f"the keeper at {address} says: {why}")
