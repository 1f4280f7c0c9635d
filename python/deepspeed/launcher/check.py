"""``deepspeed --check``: checks each host of a hostfile, and says for each problem how to solve it."""

import os
import select
import statistics
import sys
import time

from deepspeed.launcher import plan
from deepspeed.launcher.cluster import address_of, agent_words, choose_runner, which_are_here
from deepspeed.launcher.control import LOOK_S, MESSAGE
from deepspeed.launcher.head import differences, version_text
from deepspeed.launcher.host_link import HostLink, Way

_LITTLE_DISK = 1 << 30
_LITTLE_SHM = 256 << 20
_LATE_S = 2.0
_SPACES = {"memory": "memory", "disk": "disk", "/dev/shm": "shm"}


class Check:
    """Asks every host; ``problems`` are sentences that name the host and the fix."""

    def __init__(self, args, hosts, runner):
        self._args, self._runner = args, runner
        self._hosts = [HostLink(name, node, slots) for node, (name, slots) in enumerate(hosts.items())]
        self._near = which_are_here(hosts)
        self.problems = []

    def run(self):
        """One line of text per host."""
        try:
            self._reach()
            self._ask()
            self._compare()
            self._measure()
        finally:
            for host in self._hosts:
                if host.link is not None:
                    host.link.close()
                if host.way is not None:
                    host.way.end()
        return [self._line(host) for host in self._hosts]

    def _problem(self, host, text):
        self.problems.append(f"{host.name}: {text}")

    # ---- questions and answers -----------------------------------------------------------------------------------
    def _answers(self, hosts, name, limit_s):
        """``{host: value of name in its next message}``, without the hosts that are lost meanwhile."""
        found, deadline = {}, time.monotonic() + limit_s
        while time.monotonic() < deadline and any(one not in found and not one.link.lost for one in hosts):
            started = time.monotonic()
            live = [one for one in self._hosts if one.link is not None and not one.link.lost]
            readable, _, _ = select.select([one.link.read_fd for one in live], [], [], LOOK_S)
            for one in live:
                if one.link.read_fd in readable:
                    one.link.receive()
                one.link.flush()
                one.link.beat(time.monotonic() - started)
                while one.link.frames:
                    kind, message = one.link.frames.popleft()
                    if kind == MESSAGE and name in message and one in hosts:
                        found.setdefault(one, message[name])
        return found

    def _reach(self):
        for host in self._hosts:
            words = agent_words(self._args, "--node", str(host.node))
            command = words if self._near[host.name] else self._runner.agent_command(host.name, words)
            host.way = Way(command, dict(os.environ), True)
            host.link = host.way.link
        here = self._answers(self._hosts, "hello", self._args.join_timeout)
        for host in self._hosts:
            if host in here:
                host.facts, host.state = here[host], "here"
                continue
            for fd in host.way.streams:
                host.way.read(fd)
            why = host.way.last_words() or host.link.lost or f"no answer within {self._args.join_timeout:.0f} s"
            text = f"cannot be reached: {why}. Try `ssh {host.name} true`; it must work without a question."
            self._problem(host, text)

    def _here(self):
        return [host for host in self._hosts if host.state == "here"]

    def _ask(self):
        port = plan.asked_port(self._args) or plan.DEFAULT_PORT
        told = {"folder": os.path.abspath("."), "script": self._script(), "port": port}
        for host in self._here():
            host.link.send({"check": told})
        for host, facts in self._answers(self._here(), "checked", 60.0).items():
            host.facts.update(facts)
        offsets = [0.0]  # of this host
        for host in self._here():
            asked = time.time()
            host.link.send({"clock": 1})
            for said in self._answers([host], "clock", 10.0).values():
                host.facts["ahead_s"] = said - (asked + time.time()) / 2
                offsets.append(host.facts["ahead_s"])
        middle = statistics.median(offsets)
        for host in self._here():
            off = host.facts.get("ahead_s", middle) - middle
            if abs(off) > _LATE_S:
                self._problem(host, f"its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}: set up NTP.")

    def _script(self):
        args = self._args
        return "" if args.module or args.no_python or not args.user_script else args.user_script

    # ---- judgement -----------------------------------------------------------------------------------------------
    def _compare(self):
        for host in self._here():
            if "torch" not in host.facts:
                self._problem(host, "did not answer. Try again; if it stays so, look at its load.")
                continue
            for text in differences(host):
                self._problem(host, f"{text}.")
            for wrong, text in self._lacks(host.facts, len(host.slots)):
                if wrong:
                    self._problem(host, text)
        for name in ("torch", "driver"):
            self._same(name)
        first = self._hosts[0]
        if first.facts.get("port") is False and plan.asked_port(self._args):  # else a free one is chosen
            self._problem(first, "the port where ranks meet is in use: choose another with --master_port.")

    def _lacks(self, facts, slots):
        # Pairs of a condition and the problem that it is.
        folder, disk, shm = facts["folder"], facts["disk"], facts["shm"]
        return (
            (not facts["torch"], "has no torch for this Python: install it there."),
            (not folder, f"has no folder {os.path.abspath('.')}: start jobs in a folder that hosts share."),
            (
                folder and not facts["script"],
                f"does not see the script {self._script()}: put it where all hosts see it.",
            ),
            (
                0 < facts["gpus"] < slots,
                f"has {facts['gpus']} GPU(s), but {slots} slots: lower its slots=N.",
            ),
            (folder and disk < _LITTLE_DISK, f"has {disk >> 20} MiB free in the folder: make room."),
            (shm < _LITTLE_SHM, f"has {shm >> 20} MiB free in /dev/shm: make it larger."),
        )

    def _same(self, name):
        values = {host.name: host.facts[name] for host in self._here() if host.facts.get(name)}
        usual = statistics.mode(values.values()) if values else ""
        for host in self._here():
            if host.facts.get(name) and host.facts[name] != usual:
                self._problem(host, f"has {name} {host.facts[name]}, most hosts {usual}: install the same.")

    def _measure(self):
        first = self._hosts[0]
        if first.state != "here" or len(self._here()) < 2:
            return
        first.link.send({"echo": 1})
        port = self._answers([first], "echo", 10.0).get(first)
        if port is None:
            return
        near = all(self._near.values())
        address = self._args.master_addr or ("127.0.0.1" if near else address_of(first, self._hosts, self._near))
        for host in self._here()[1:]:
            host.link.send({"measure": [address, port]})
            said = self._answers([host], "measured", 30.0).get(host, {"why": "no answer"})
            host.facts.update(said)
            if "why" in said:
                self._problem(
                    host, f"does not reach {first.name} at {address}: {said['why']}. Look at firewalls; --master_addr "
                    f"names another address."
                )  # fmt: skip

    # ---- the report ----------------------------------------------------------------------------------------------
    def _line(self, host):
        facts = host.facts
        if host.state != "here" or "torch" not in facts:
            return f"{host.name}: not reached"
        parts = [
            f"{len(host.slots)} slots", f"{facts['gpus']} GPUs", f"{facts['cores']} cores",
            f"Python {version_text(facts['python'])}", f"torch {facts['torch'] or 'none'}",
            f"deepspeed {facts['deepspeed']}", *([f"driver {facts['driver']}"] if facts["driver"] else []),
            *(f"{what} {facts[name] / 2**30:.1f} GiB" for what, name in _SPACES.items()),
        ]  # fmt: skip
        if "ms" in facts:
            parts.append(f"{facts['ms']:.2f} ms and {facts['mb_s']:.0f} MB/s to {self._hosts[0].name}")
        return f"{host.name}: {', '.join(parts)}"


def run_check(args, hosts):
    """Prints the report. Returns the exit code: 0 if a job can start, else 1."""
    notes = []
    runner = choose_runner(args, hosts, notes)
    if not hasattr(runner, "agent_command"):
        args.launcher = "ssh"
        runner = choose_runner(args, hosts, notes)
    check = Check(args, hosts, runner)
    for line in check.run():
        print(line)
    for problem in check.problems:
        print(f"deepspeed: {problem}", file=sys.stderr)
    if not check.problems:
        print(f"A job of {sum(map(len, hosts.values()))} ranks on {len(hosts)} host(s) can start.")
    return 1 if check.problems else 0
