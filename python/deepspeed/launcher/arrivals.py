"""Accepts agents that connect to the head. An agent proves that it knows the key and names a host without an agent."""

import os

from deepspeed.host.job_key import NO_KEY, is_from_here, proof, proves
from deepspeed.launcher.control import LOOK_S, MESSAGE, Link

_MOST_NAMED = 8  # refused addresses that are named to the user
_UNKNOWN_BYTES = 1 << 16  # a peer may send before it has proved that it knows the key


class Arrivals:
    """Listens at ``job.meeting`` until ``close``. ``joined(host)``: a host has its link. ``failed(text)``: the job
    cannot go on. ``say(text)``: for the user. Without a key only processes of this machine are let in, unless the job
    is ``insecure``."""

    def __init__(self, job, hosts, selector, joined, failed, say):
        self._job, self._hosts, self._selector = job, hosts, selector
        self._joined, self._failed, self._say = joined, failed, say
        self._refused = set()  # addresses that were named to the user
        self._unknown = {}  # link of a peer that has not proved yet that it knows the key -> nonce, address
        selector.watch(job.meeting, self._accept)

    def _accept(self):
        try:
            connection, (address, _) = self._job.meeting.accept()
        except OSError:  # the peer has closed the connection
            return
        refused = not (self._job.key or self._job.insecure or is_from_here(connection))
        link = Link.over(connection, largest=_UNKNOWN_BYTES)
        if refused:
            return self._refuse_other_host(link, address)
        nonce = os.urandom(16).hex()
        self._unknown[link] = nonce, address
        link.send({"nonce": nonce})
        self._selector.watch(link.read_fd, link.receive)

    def turn(self):
        """Handles the messages of connected peers."""
        for link, (nonce, address) in list(self._unknown.items()):
            link.beat(LOOK_S)  # a peer that sends nothing is dropped
            while link.frames and link.frames[0] == (MESSAGE, {"beat": 1}):
                link.frames.popleft()
            if link.frames or link.lost:
                self._judge(link, nonce, address)

    def _judge(self, link, nonce, address):
        try:
            join = link.frames[0][1]["join"]
            theirs, challenge = join["proof"], str(join["nonce"])
            host, why = self._job.host_of(join, self._hosts)
        except (LookupError, TypeError, AttributeError, UnicodeEncodeError):  # not an agent of this program
            return self._refuse(link, "this is not an agent of a job")
        key = self._job.key if host is None else self._job.key_of(host)
        if key is None and not link.lost:
            return None  # the key of this agent arrives on another connection, possibly later
        link.frames.popleft()
        if key is None or not proves(theirs, key, nonce, "agent"):
            return self._refuse(link, "this is another job")
        if host is None:
            return self._refuse(link, why)
        if host.link is not None and self._job.args.elastic_training:
            # A second agent is accepted after the loss of the first one was noticed.
            return self._end(link, f"host {host.node} ({host.name}) is here already")
        if host.link is not None:
            why = f"two processes say that they are host {host.node} ({host.name})"
            self._refuse(link, why)
            return self._failed(f"{why}: give each host a number of its own")
        self._forget(link)
        host.link, host.peer = link, address
        if "slots" in join:
            host.slots, host.name = join["slots"], join["name"]
        link.send({"welcome": proof(key, challenge, "head")})
        link.trust()
        self._joined(host)

    def _refuse(self, link, why):
        self._end(link, f"refused: {why}")

    def _end(self, link, why):
        self._forget(link)
        link.send({"stop": why})
        link.close()

    def _forget(self, link):
        self._selector.drop(link.read_fd)
        self._unknown.pop(link, None)

    def _refuse_other_host(self, link, address):
        if address not in self._refused and len(self._refused) < _MOST_NAMED:
            self._refused.add(address)
            self._say(f"deepspeed: a connection from {address} was refused: {NO_KEY}.\n")
        self._refuse(link, NO_KEY)

    def close(self):
        """Accepts no further agents."""
        for link in list(self._unknown):
            self._forget(link)
            link.close()
        self._selector.unregister(self._job.meeting)
        self._job.meeting.close()
