"""The head of an elastic job (``--elastic_training``): its ranks run in rounds, each on the hosts that are here then.

A round ends when a rank fails, a host is lost or asked to go, or when, behind a checkpoint, the hosts that wait allow
more ranks. All ranks of it end, and the next round starts at once with the largest number of ranks that can share the
batch; scripts go on from the newest checkpoint. Slots and hosts left over stand by. This process is the one that must
stay: it may run on a host of the job or elsewhere.
"""

import os
import signal
import time

from deepspeed.host.variables import number
from deepspeed.launcher.control import INPUT
from deepspeed.launcher.elastic_layout import layout
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.head import Head, differences, notes_of, start_ranks
from deepspeed.launcher.host_link import HostLink

_LAST_CALL_S = 30.0  # the first round waits this long for more hosts when there are enough
_AGAIN_S = 10.0  # seconds between two tries to reach a host
_LEFT = 5  # factor on _AGAIN_S for a host that was asked to leave and may be shutting down
_FAILURES = 2  # failed rounds in a row without a new checkpoint before the job fails


class ElasticHead(Head):
    """Runs an elastic ``ClusterJob`` to its end.

    ``DS_ELASTIC_FAILURES``: see ``_FAILURES``; ``DS_ELASTIC_RETRY_S``: seconds between two tries to reach a host.
    """

    _waits_for_more = True

    def __init__(self, job):
        super().__init__(job)
        self._least = max(1, job.args.min_elastic_nodes)
        self._most = job.args.max_elastic_nodes if job.args.max_elastic_nodes > 0 else None
        self._worlds = None  # numbers of ranks that can share the batch; the ranks send them
        self._least_s = 0.0  # least time between two voluntary changes
        self._restarts = self._failures = 0
        self._most_failures = int(number("DS_ELASTIC_FAILURES", _FAILURES, "a number", LaunchError))
        self._again_s = number("DS_ELASTIC_RETRY_S", _AGAIN_S, "a number", LaunchError)
        self._phase = "gathering"  # hosts; "starting", "running", "ending" ranks
        self._said_waiting = False  # the user was told that there are not enough hosts
        self._part, self._world = [], 0  # hosts and ranks of this round
        self._announced = False  # the end was announced, and ranks save
        self._said = 0  # hosts of this round whose ranks have all returned 0
        self._last_call = self._started + _LAST_CALL_S
        self._changed_at = self._started
        self._look_at = self._started + self._again_s
        self._variables = {"ELASTIC_RUN_ID": os.environ.get("ELASTIC_RUN_ID") or os.urandom(8).hex()}

    # ---- hosts come and go -------------------------------------------------------------------------------------------
    def _on_hello(self, host, facts):
        host.state, host.facts, host.pending = "here", facts, 0
        if self._code is not None:
            host.link.send({"stop": "the job has ended", "bye": self._code})
            return self._drop(host, "done")
        why = next(differences(host), "")
        if why:
            self._refuse(host, f"host {host.name} {why}")
        elif self._restarts or self._phase == "running":
            self._say(f"deepspeed: host {host.name} is here.\n", self._job.verbose)

    def _refuse(self, host, why):
        self._say(f"deepspeed: {why}. The job goes on without it.\n")
        if host.link is not None and not host.link.lost:
            host.link.send({"stop": why, "bye": 1})
        self._drop(host, "gone")
        self._why = why

    def _on_lost(self, host):
        was, words = host.state, host.link.lost
        if was == "gone" or self._code is not None:
            return self._drop(host, "done")
        said = host.way.last_words() if host.way is not None else ""
        self._drop(host, "away")
        how = f"{words} ({said})" if said else words
        if was == "away" and not host.tries:
            self._say(f"deepspeed: host {host.name} could not be reached or could not start the launcher: {how}.\n")
        elif was != "away":
            after = time.monotonic() - self._started
            self._say(f"deepspeed: host {host.name} was lost {after:.1f} s after the start: {how}.\n")
        host.tries += 1
        if host not in self._part:
            return
        if self._phase == "starting":
            self._back_to_gathering()
        elif self._phase == "running" and was == "running":
            self._end_round()
        elif self._phase == "ending":  # the loss of this host made ranks of other hosts fail
            self._failures = max(0, self._failures - 1)

    def _drop(self, host, state):
        host.state, host.again_at = state, time.monotonic() + self._again_s
        if host.link is not None:
            self._selector.drop(host.link.read_fd)
            host.link.close()
            host.link = None
        if host.way is not None:
            self._selector.drop(*host.way.streams)
            if state == "away":
                host.way.process.kill()
            host.way.end()
            self._ways.remove(host.way)
            host.way = None

    def _look_for_hosts(self, now):
        if now < self._look_at or self._code is not None:
            return
        self._look_at = now + self._again_s / 4
        for name, slots in self._job.hosts_now().items():
            if all(host.name != name for host in self._hosts):
                self._hosts.append(HostLink(name, len(self._hosts), slots))
        for host in self._hosts:
            if host.state == "away" and host.link is None and now >= host.again_at and self._job.can_reach(host):
                self._hear(self._job.start_way(host))
                self._listen(host)

    # ---- a round -----------------------------------------------------------------------------------------------------
    def _turn(self):
        super()._turn()
        now = time.monotonic()
        self._look_for_hosts(now)
        if self._code is None and self._phase == "gathering":
            self._gather(now)
        elif self._phase == "ending" and not any(host.state == "running" for host in self._part):
            self._back_to_gathering()

    def _layout(self):
        here = [host for host in self._hosts if host.state in ("here", "running")]
        return layout([(host, host.slots) for host in here], self._worlds, self._least, self._most)

    def _gather(self, now):
        expected = [host for host in self._hosts if host.state == "away" and host.link is not None]
        waited = self._hosts if self._job.hosts_come_alone else expected
        if self._restarts == 0 and now < self._last_call and any(host.state == "away" for host in waited):
            return
        part = self._layout()
        if part:
            self._start(part)
        elif now > self._join_at:
            self._fail(
                f"for {self._job.join_timeout:.0f} s (--join_timeout) there were not enough hosts or slots to go on: "
                f"{self._lacking()}"
            )
        elif not any(host.state in ("here", "away") for host in self._hosts):
            self._fail(f"no host is left: {self._why}")
        elif not self._said_waiting:
            self._said_waiting = True
            left = f"{self._join_at - now:.0f} s (--join_timeout)"
            self._say(f"deepspeed: waiting {left} for hosts: {self._lacking()}.\n")

    def _lacking(self):
        here = [host for host in self._hosts if host.state == "here"]
        return (
            f"here are {len(here)} host(s) with {sum(len(host.slots) for host in here)} slot(s), and needed "
            f"{self._least} host(s) (--min_elastic_nodes)"
            + (f" and {min(self._worlds)} rank(s) (the section elasticity)" if self._worlds else "")
        )

    def _start(self, part):
        hosts, slots = zip(*part)
        if not self._has_port(hosts[0]):
            return
        variables = {
            **self._variables,
            "TORCHELASTIC_RUN_ID": self._variables["ELASTIC_RUN_ID"],
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
        }
        shares = self._job.shares(hosts, slots, variables)
        self._said_waiting = False
        self._phase, self._part, self._world = "starting", hosts, sum(map(len, slots))
        for host, share in zip(hosts, shares):
            host.state = "told"
            host.pending += 1
            host.link.send({"share": share})

    def _on_ready(self, host, notes):
        host.pending -= 1
        if host.pending or host.state != "told":
            return
        host.state, host.facts["notes"] = "ready", notes
        if self._phase != "starting" or any(one.state != "ready" for one in self._part):
            return
        if not self._restarts:
            self._say(notes_of(self._part), self._job.verbose)
        idle = sum(len(one.slots) for one in self._hosts if one.state in ("here", "ready")) - self._world
        self._say(
            f"deepspeed: {'start' if not self._restarts else f'restart {self._restarts}'}: {self._world} rank(s) on "
            f"{', '.join(one.name for one in self._part)}" + (f"; {idle} slot(s) stand by" if idle else "") + ".\n",
            self._job.verbose or self._restarts > 0,
        )
        self._phase, self._said, self._changed_at = "running", 0, time.monotonic()
        self._announced, self._job.first_failing = False, None
        start_ranks(self._part)
        for one in self._part:
            one.link.send_bytes(INPUT, b"")  # input that was read once cannot be sent to a second round

    def _back_to_gathering(self):
        for host in self._part:
            if host.state in ("told", "ready"):
                host.state = "here"
        if self._phase != "starting":
            self._restarts += 1
        self._phase, self._part = "gathering", []
        self._join_at = time.monotonic() + self._job.join_timeout

    def _end_round(self, but=None):
        self._phase = "ending"
        for host in self._part:
            if host is not but and host.state == "running":
                self._signal(host, signal.SIGTERM, failed=True)

    # ---- what hosts say ----------------------------------------------------------------------------------------------
    def _on_message(self, host, message):
        if self._code is not None or "hello" in message or "ready" in message:
            return super()._on_message(host, message)
        if "worlds" in message:
            self._worlds = [world for world in message["worlds"] if world > 0]
            self._least_s = 60.0 * message.get("min_time", 0)
            if self._phase == "running" and self._world not in self._worlds:
                self._say(f"deepspeed: {self._world} ranks cannot share the batch of the section elasticity.\n")
                self._end_round()
        if "saving" in message:
            self._announced = True
        if "saved" in message:
            self._failures = 0
            self._grow()
        if "error" in message:
            self._refuse(host, f"host {host.name}: {message['error'].rstrip('.')}")
            if self._phase == "starting":
                self._back_to_gathering()
        elif "failed" in message and self._phase == "running":
            self._on_failure(host, message["code"])
        elif "report" in message:
            if self._phase == "running":
                self._on_failure(host, 1)
            if self._job.first_failing is host:
                self._say(message["report"])
        elif "done" in message:
            self._on_done(host, message)

    def _on_failure(self, host, code, asked=False):
        if not asked and not (self._announced and code == 128 + signal.SIGTERM):
            self._job.first_failing = host
            self._failures += 1
        if self._failures > self._most_failures:
            self._say(
                f"deepspeed: ranks failed {self._failures} times without a new checkpoint (DS_ELASTIC_FAILURES is "
                f"{self._most_failures}); the job is ended.\n"
            )
            return self._stop(code, signal.SIGTERM, but=host, failed=True)
        self._end_round(but=host)

    def _on_done(self, host, message):
        code, host.facts["port"] = message["done"], message["port"]
        host.state = "here"
        if message["leaving"]:
            self._say(f"deepspeed: host {host.name} was asked to go.\n")
            host.link.send({"over": code})
            self._drop(host, "away")
            host.again_at += _LEFT * self._again_s
        if self._phase != "running":
            return
        if code:
            return self._on_failure(host, code, message["leaving"])
        self._said += 1
        if self._said == len(self._part):
            self._code = 0
            self._end_at = time.monotonic()
            for one in self._hosts:
                if one.link is not None:
                    one.link.send({"over": 0})
                self._drop(one, "done")

    def _grow(self):
        """Called after a checkpoint: starts a round with more ranks if the waiting hosts allow it."""
        part = self._layout()
        if self._phase != "running" or time.monotonic() < self._changed_at + self._least_s:
            return
        if sum(len(own) for _, own in part) > self._world:
            self._say("deepspeed: hosts have come; the ranks start again behind this checkpoint.\n")
            self._end_round()

    # ---- the end -----------------------------------------------------------------------------------------------------
    def _check_time(self, now):
        if self._code is not None:
            super()._check_time(now)

    def _finish(self, host, code):
        host.state = "done"
        self._bye(host)
