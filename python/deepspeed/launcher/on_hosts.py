"""``ds_ssh``: one command on every host of a hostfile."""

import argparse
import os
import selectors
import subprocess
import sys

from deepspeed.host.programs import find_program
from deepspeed.launcher.arguments import DEFAULT_HOSTFILE
from deepspeed.launcher.plan import fetch_hostfile, is_this_host
from deepspeed.launcher.words import join_words

_AT_A_TIME = 64


def parse_args(args=None):
    """The options as a namespace; ``command`` is a list of words."""
    parser = argparse.ArgumentParser(
        prog="ds_ssh",
        description="Runs a command on every host of a hostfile, over ssh, and shows each line with its host.",
        epilog="One word is a line for the shell of the hosts; several words are passed on as they are.",
    )
    parser.add_argument("-f", "--hostfile", default=DEFAULT_HOSTFILE, metavar="F", help=f"default {DEFAULT_HOSTFILE}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command")
    return parser.parse_args(args)


def command_on(host, words):
    """The command that runs ``words`` on ``host``."""
    line = words[0] if len(words) == 1 else join_words(words)
    if is_this_host(host):
        return ["sh", "-c", line]
    return ["ssh", "-o", "BatchMode=yes", "-T", host, line]


def run_everywhere(hosts, words, show):
    """Runs ``words`` on all hosts; ``show(host, line)`` gets each line. Returns ``{host: exit code}``."""
    waiting, codes = list(hosts), {}
    with selectors.DefaultSelector() as selector:
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < _AT_A_TIME:
                host = waiting.pop(0)
                process = subprocess.Popen(
                    command_on(host, words),
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
                selector.register(process.stdout, selectors.EVENT_READ, [host, process, b""])
            for key, _ in selector.select():
                host, process, start = key.data
                data = os.read(key.fd, 65536)
                *lines, key.data[2] = (start + data).split(b"\n")
                if not data and key.data[2]:
                    lines.append(key.data[2])
                for line in lines:
                    show(host, line.decode("utf-8", "replace"))
                if not data:
                    selector.unregister(process.stdout)
                    process.stdout.close()
                    codes[host] = process.wait()
    return {host: codes[host] for host in hosts}


def main(args=None):
    """Exit code: the largest of the hosts, 1 for a wrong hostfile, 2 without a command."""
    options = parse_args(args)
    if not options.command:
        print("ds_ssh: error: there is no command to run.", file=sys.stderr)
        return 2
    try:
        pool = fetch_hostfile(options.hostfile)
    except ValueError as error:
        print(f"ds_ssh: error: {error}", file=sys.stderr)
        return 1
    if pool is None:
        print(f"ds_ssh: error: there is no hostfile {options.hostfile}: name one with -f F.", file=sys.stderr)
        return 1
    if find_program("ssh") is None and not all(map(is_this_host, pool)):
        print("ds_ssh: error: the program ssh is not installed (apt install openssh-client).", file=sys.stderr)
        return 1
    codes = run_everywhere(pool, options.command, lambda host, line: print(f"{host}: {line}", flush=True))
    for host, code in codes.items():
        if code:
            print(f"ds_ssh: {host}: exit code {code if code > 0 else 128 - code}", file=sys.stderr)
    return max(code if code >= 0 else 128 - code for code in codes.values())


if __name__ == "__main__":
    sys.exit(main())
