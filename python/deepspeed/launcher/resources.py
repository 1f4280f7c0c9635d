"""Hosts and slots: the hostfile, the --include/--exclude language, and their text form for command lines."""

import base64
import json
import re

from deepspeed.host.command_line import check_slots

_LINE = re.compile(r"(\S+)\s+slots=(\d+)\s*(?:#.*)?")


def parse_hostfile_lines(hostfile_lines):
    """``{host: slots}`` from lines such as ``worker-1 slots=4``, in order.

    Blank lines and lines that start with ``#`` are skipped. ValueError for any other line, for a host named twice and
    for a file that names no host.
    """
    pool = {}
    for number, text in meant_lines(hostfile_lines):
        match = _LINE.fullmatch(text)
        if not match:
            raise ValueError(
                f"hostfile line {number} is {text!r}; each line must read 'NAME slots=N', for example "
                f"'worker-1 slots=4'."
            )
        host, slots = match[1], int(match[2])
        if host in pool:
            raise ValueError(f"hostfile line {number} names the host {host!r} a second time: give each host one line.")
        check_slots(slots, f"hostfile line {number}: slots of the host {host}")
        pool[host] = slots
    if not pool:
        raise ValueError("the hostfile names no host: write one 'NAME slots=N' per line, or leave --hostfile out.")
    return pool


def meant_lines(lines):
    """``(number, text)`` of each line that is neither blank nor a remark, which starts with ``#``."""
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line.strip()


def parse_node_config(text):
    """``"worker-0:1,3"`` -> ("worker-0", ["1", "3"]); without slots ("worker-0", None)."""
    host, colon, slots = text.partition(":")
    host = host.strip()
    names = [slot.strip() for slot in slots.split(",")] if colon else None
    if not host or (names is not None and not all(names)):
        raise ValueError(
            f"{text!r} is not of the form NODE or NODE:SLOT,SLOT,...; join several with '@', for example "
            f"'worker-0:0,2@worker-1'."
        )
    return host, names


def parse_resource_filter(host_info, include_str="", exclude_str=""):
    """The hosts and slots that remain of ``host_info`` (``{host: [slot, ...]}``) after one of the two filters.

    ``include_str`` keeps only what it names, ``exclude_str`` drops what it names; both speak
    ``NODE[:SLOT[,SLOT...]]`` joined with ``@``. A host left without slots is dropped. ValueError when both are given
    and for an unknown host or slot.
    """
    if include_str and exclude_str:
        raise ValueError("--include and --exclude exclude each other: give one of them.")
    if not include_str and not exclude_str:
        return dict(host_info)
    named = {}
    for part in (include_str or exclude_str).split("@"):
        host, slots = parse_node_config(part)
        if host not in host_info:
            raise ValueError(f"there is no host {host!r}; the hosts are: {', '.join(host_info)}.")
        have = list(host_info[host])
        chosen = named.setdefault(host, [])
        chosen += have if slots is None else [_slot(host, slot, have) for slot in slots]
    if include_str:
        kept = {host: [slot for slot in host_info[host] if slot in named[host]] for host in host_info if host in named}
    else:
        kept = {host: [slot for slot in have if slot not in named.get(host, ())] for host, have in host_info.items()}
    return {host: slots for host, slots in kept.items() if slots}


def parse_inclusion_exclusion(resource_pool, inclusion, exclusion):
    """``{host: [slot, ...]}`` of ``{host: number of slots}`` after one of the two filters."""
    numbered = {host: list(range(count)) for host, count in resource_pool.items()}
    return parse_resource_filter(numbered, inclusion, exclusion)


def _slot(host, text, have):
    # GPUs may also be named by UUID where CUDA_VISIBLE_DEVICES does so.
    named = {str(slot): slot for slot in have}
    if text not in named:
        raise ValueError(f"host {host!r} has no slot {text!r}; its slots are: {', '.join(named) or 'none'}.")
    return named[text]


def counts_of(world):
    """``{host: number of slots}`` of a world whose values are such numbers, or lists of slots."""
    return {host: slots if isinstance(slots, int) else len(slots) for host, slots in world.items()}


def encode_world_info(world_info):
    """``{host: [slot, ...]}`` as URL-safe base64 of JSON, fit for a command line."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode("utf-8")).decode("utf-8")


def decode_world_info(text):
    """The inverse of ``encode_world_info``: ``{host: [slot, ...]}``, or numbers of slots; ValueError for other text."""
    try:
        world = json.loads(base64.urlsafe_b64decode(text))
    except ValueError:
        world = None
    if not isinstance(world, dict) or not all(isinstance(slots, (int, list)) for slots in world.values()):
        raise ValueError(f"--world_info {text!r} is not what encode_world_info makes of {{host: [slot, ...]}}.")
    return world
