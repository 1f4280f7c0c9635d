"""Fingerprints of collectives that go through gloo: who is where, told through the job's store.

Comparing every call before it starts would cost round trips each. So a rank only writes down what it calls, and nothing
is sent while all goes well. A rank that has waited for a second asks, by a counter in the store that a thread of every
rank looks at twice a second; then all ranks of the group post what they are doing. Two that wait in the same place with
different calls have found the mistake: all ranks of the group fail, with a message that says where each of them is.

With ``DS_COMM_FINGERPRINTS=strict`` the ranks do compare every call before it starts: gloo of torch 1.13 ends the
process where sizes differ, before anybody can say why. What waits in a handle of torch (``async_op=True`` where nothing
is left to do afterwards) cannot be interrupted; it fails when the group's timeout is over.
"""

import collections
import ctypes
import functools
import inspect
import json
import os
import socket
import threading
import time
import weakref
from datetime import timedelta

import torch.distributed as dist

from deepspeed import _native
from deepspeed.comm.stacks import stack_text
from deepspeed.comm.timeouts import default_timeout
from deepspeed.log import logger

_LENGTH = 256
_POLL_S = 0.5
_SUSPICIOUS_S = 1.0
_HEARD_S = 1.2  # how long the one who has found out waits until the others know
_ANSWER_S = 2.0  # how long ranks have to say where they are
_SLICE = timedelta(seconds=0.5)
_WAITED = "Operation timed out!"  # torch's words for a wait that ended before the operation

_lock = threading.Lock()
# Process group -> _Station. Weak: torch decides when a group ends, and with a station goes its hold on the job's store,
# whose threads (torch 1.13) run hot once the other ends of its connections are gone.
_stations = weakref.WeakKeyDictionary()
_thread = None
_pid = None


class _Flight:
    __slots__ = ("number", "fingerprint", "began", "ended", "work")

    def __init__(self, number, fingerprint):
        self.number, self.fingerprint = number, fingerprint
        self.began, self.ended, self.work = time.time(), None, None

    def open(self):
        if self.ended is None and self.work is not None and self.work.is_completed():
            self.ended = time.time()
        return self.ended is None


class _Station:
    """One group, as this rank sees it."""

    def __init__(self, group, name):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"deepspeed/where/{name}", store)
        self.name = name
        self.flights = collections.deque(maxlen=_LENGTH)
        self.number = 0
        self.asked = 0
        self.failed = None
        self.store.set(f"who{self.rank}", f"{os.getpid()} on {socket.gethostname()}")
        self.store.add(f"known{self.rank}", 1)

    def ended(self, rank):
        """True when the rank was on this host and nothing comes from its process any more."""
        if not self.store.add(f"known{rank}", 0):
            return False
        pid, _, host = self.store.get(f"who{rank}").decode().split(" ", 2)
        return host == socket.gethostname() and _native._C.process_ended(int(pid))

    def enter(self, fingerprint):
        if self.failed:
            raise RuntimeError(f"this group has failed before: {self.failed.splitlines()[0]}")
        self.number += 1
        flight = _Flight(self.number, fingerprint)
        self.flights.append(flight)
        if os.environ.get("DS_COMM_FINGERPRINTS") == "strict":
            self.meet(flight)
        return flight

    def meet(self, flight):
        """Waits until all ranks have said what they call; fails where that differs."""
        here = f"call{flight.number}/"
        self.store.set(here + str(self.rank), flight.fingerprint)
        began, met = time.monotonic(), self.store.add(here + "met", 1)
        while met < self.size:
            time.sleep(0.0005)
            met = self.store.add(here + "met", 0)
            if self.failed:
                raise GroupFailed(self.failed)
            if time.monotonic() - began > default_timeout().total_seconds():
                raise GroupFailed(
                    self.fail(
                        f"{self.size - met} of {self.size} ranks have not come to number "
                        f"{flight.number} of group {self.name}, {flight.fingerprint}"
                    )
                )
        calls = [self.store.get(here + str(rank)).decode() for rank in range(self.size)]
        if len(set(calls)) > 1:
            told = "; ".join(f"rank {rank} {call}" for rank, call in enumerate(calls))
            raise GroupFailed(
                self.fail(
                    f"the ranks of a group call different collectives: {told}. (Number {flight.number} of group "
                    f"{self.name}.)"
                )
            )
        if self.rank == 0 and flight.number > 2:  # everybody has read them: all have come to the next call
            for key in (*map(str, range(self.size)), "met"):
                self.store.delete_key(f"call{flight.number - 2}/{key}")

    def oldest_open(self):
        for flight in list(self.flights):
            if flight.open():
                return flight
        return None

    # ---- the store ---------------------------------------------------------------------------------------------
    def look(self):
        """From the watching thread: answers whoever asks; asks, and judges, where this rank waits too long."""
        flight = self.oldest_open()
        waiting = flight is not None and time.time() - flight.began > _SUSPICIOUS_S
        asked = self.store.add("asked", 1 if waiting else 0)
        if asked == self.asked:
            return
        self.asked = asked
        self.post(flight)
        if self.failed is None and self.store.add("failed", 0):
            self.failed = self.store.get("why").decode()
            self.store.add("heard", 1)
        if waiting and self.failed is None:
            self.judge(flight)

    def post(self, flight):
        last = flight or (self.flights[-1] if self.flights else None)
        place = {
            "tick": self.asked,
            "number": last.number if last else 0,
            "call": last.fingerprint if last else "",
            "open": flight is not None,
            "since": time.time() - (last.began if flight else (last.ended or last.began)) if last else 0.0,
            "process": f"{os.getpid()} on {socket.gethostname()}",
            "stack": stack_text(),
        }
        self.store.set(f"place{self.rank}", json.dumps(place))
        self.store.add(f"posted{self.rank}", 1)

    def places(self, tick=0):
        """What the ranks have posted, by rank; None where nothing is there that is as new as ``tick``."""
        found = []
        for rank in range(self.size):
            place = None
            if self.store.add(f"posted{rank}", 0):
                place = json.loads(self.store.get(f"place{rank}").decode())
            found.append(place if place and place["tick"] >= tick else None)
        return found

    def judge(self, flight):
        for rank, place in enumerate(self.places()):
            if place and place["open"] and place["number"] == flight.number and place["call"] != flight.fingerprint:
                self.fail(
                    f"the ranks of a group call different collectives: rank {self.rank} {flight.fingerprint}; "
                    f"rank {rank} {place['call']}. (Number {flight.number} of group {self.name}.)"
                )
                return

    def fail(self, why):
        """All ranks of the group stop. Returns the message, with where everybody is."""
        text = why + self.report()
        if self.failed is None:
            self.store.set("why", text)
            self.store.add("failed", 1)
            self.store.add("asked", 1)
            heard, deadline = self.store.add("heard", 1), time.monotonic() + _HEARD_S
            gone = sum(map(self.ended, range(self.size)))
            while heard < self.size - gone and time.monotonic() < deadline:
                time.sleep(0.05)  # the store may end with this process
                heard = self.store.add("heard", 0)
            self.failed = text
        return text

    def report(self):
        """Where the ranks are, from those that answer."""
        tick = self.store.add("asked", 1)
        self.asked = tick
        self.post(self.oldest_open())
        deadline = time.monotonic() + _ANSWER_S
        places = self.places(tick)
        gone = [rank for rank in range(self.size) if self.ended(rank)]
        while time.monotonic() < deadline and any(p is None for r, p in enumerate(places) if r not in gone):
            time.sleep(0.1)
            places = self.places(tick)
        lines = ["\nWhere the ranks are:"]
        for rank, place in enumerate(places):
            if place is None:
                how = "has ended" if rank in gone else "does not answer; it has ended, or its interpreter is busy in C"
                lines.append(f"  rank {rank}: {how}")
                continue
            call = f"{place['call']}, number {place['number']}"
            where = f"in {call}, for" if place["open"] else f"outside of collectives; {call}, its last, ended"
            since = f"{place['since']:.1f} s" + ("" if place["open"] else " ago")
            lines.append(f"  rank {rank} (process {place['process']}): {where} {since}")
            lines += ["    " + line for line in place["stack"].splitlines()]
        return "\n".join(lines)


# ---- the thread ---------------------------------------------------------------------------------------------------
def _serve():
    while True:
        time.sleep(_POLL_S)
        _look()


def _look():
    """At all groups, once; nothing of them is held when it returns."""
    for group, station in list(_stations.items()):
        try:
            station.look()
        except (RuntimeError, OSError, ValueError) as error:  # the store has gone, and with it the job
            _stations.pop(group, None)
            logger.debug("group %s is no longer watched: %s", station.name, error)


def _name_of(group):
    module = dist.distributed_c10d
    names = module._world.pg_names if hasattr(module, "_world") else module._pg_names
    return str(names[group])


def _station(group):
    global _thread, _pid
    group = dist.group.WORLD if group is None else group
    found = _stations.get(group)
    if found is None or _pid != os.getpid():
        with _lock:
            if _pid != os.getpid():
                _stations.clear()
                _thread, _pid = None, os.getpid()
            found = _stations[group] = _Station(group, _name_of(group))
            if _thread is None:
                _thread = threading.Thread(target=_serve, name="deepspeed-c10d-watch", daemon=True)
                _thread.start()
    return found


def forget(group=None):
    """The group, or all of them, will not be used any more."""
    if group is None:
        _stations.clear()
    else:
        _stations.pop(group, None)


def flights():
    """What flight_record shows of these groups."""
    return [
        {
            "group": station.name, "number": flight.number, "op": flight.fingerprint.partition("(")[0],
            "call": flight.fingerprint, "tag": "", "began": flight.began,
            "seconds": None if flight.open() else flight.ended - flight.began,
            "state": "under way" if flight.open() else "done",
        }
        for station in list(_stations.values()) for flight in list(station.flights)
    ]  # fmt: skip


# ---- calls --------------------------------------------------------------------------------------------------------
class GroupFailed(RuntimeError):
    """Ranks did not meet; the message says where they are."""


def watched(chosen, serves, fingerprint):
    """Decorates a method of the carrier with the parameters ``group`` and ``async_op``. ``chosen(group, *arguments)``:
    the group that carries it; ``serves(group, *arguments)``: that one is over gloo; ``fingerprint(*arguments)``: the
    call in words, equal on all ranks that may meet."""

    def decorate(method):
        names = list(inspect.signature(method).parameters)[1:]
        position = names.index("group")

        @functools.wraps(method)
        def operation(self, *args, **kwargs):
            group = args[position] if len(args) > position else kwargs.get("group")
            given = args[:position]
            if len(given) < position:
                given = tuple(args[i] if i < len(args) else kwargs.get(names[i]) for i in range(position))
            carrier = chosen(group, *given)
            if carrier is not group:
                if len(args) > position:
                    args = (*given, carrier, *args[position + 1 :])
                else:
                    kwargs["group"] = carrier
                return method(self, *args, **kwargs)
            if not serves(group, *given):
                return method(self, *args, **kwargs)
            station = _station(group)
            if station.size == 1:
                return method(self, *args, **kwargs)
            flight = station.enter(fingerprint(*given))
            try:
                result = method(self, *args, **kwargs)
            except RuntimeError as error:
                raise _explained(group, station, flight, error) from error
            if hasattr(result, "is_completed"):
                flight.work = result
            else:
                flight.ended = time.time()
            return result

        return operation

    return decorate


def _explained(group, station, flight, error):
    # Its threads may be in an operation that never ends, and its destructor would wait for them: it is never destroyed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD if group is None else group))
    if isinstance(error, GroupFailed):
        return error
    if station.failed:
        return GroupFailed(station.failed)
    try:
        return GroupFailed(station.fail(f"{flight.fingerprint} failed on rank {station.rank}: {error}"))
    except (RuntimeError, OSError):  # the store has ended with rank 0 of the job
        return GroupFailed(f"{flight.fingerprint} failed: {error} (Rank 0 of the job has ended; nobody knows more.)")


def wait(work, timeout=None):
    """``work.wait()`` of a collective of gloo that ends, too, when a group of this process has failed."""
    if timeout is not None:
        return work.wait(timeout)
    while True:
        try:
            return work.wait(_SLICE)
        except RuntimeError as error:
            if _WAITED not in str(error) or work.is_completed():
                raise
        for station in list(_stations.values()):
            if station.failed:
                raise GroupFailed(station.failed)


def end(work, async_op):
    """The handle of an operation of gloo when ``async_op``, else waits for it."""
    if async_op or work is None:
        return work
    wait(work)
    return None
