"""``ds_ssh``: one command on every host of a hostfile."""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from deepspeed.host.command_line import program
from deepspeed.host.programs import find_program
from deepspeed.launcher.arguments import DEFAULT_HOSTFILE
from deepspeed.launcher.exit_codes import shell_code
from deepspeed.launcher.options import parse_command
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
    options = parse_command(parser, sys.argv[1:] if args is None else args, "arguments")
    options.command += options.arguments
    return options


def command_on(host, words):
    """The command that runs ``words`` on ``host``."""
    line = words[0] if len(words) == 1 else join_words(words)
    return ["sh", "-c", line] if is_this_host(host) else ["ssh", "-o", "BatchMode=yes", "-T", host, line]


def run_everywhere(hosts, words, show):
    """Runs ``words`` on all hosts; ``show(host, line)`` gets each line. Returns ``{host: exit code}``."""

    def run(host):
        with subprocess.Popen(
            command_on(host, words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            for line in process.stdout:
                show(host, line.removesuffix(b"\n").decode("utf-8", "replace"))
            return shell_code(process.wait())

    threads = ThreadPoolExecutor(_AT_A_TIME)
    try:
        return dict(zip(hosts, threads.map(run, hosts)))
    finally:
        threads.shutdown(cancel_futures=True)  # after Ctrl-C nothing more starts


def _show(host, line):
    sys.stdout.write(f"{host}: {line}\n")  # one call, because hosts write at the same time
    sys.stdout.flush()


@program("ds_ssh: error")
def main(args=None):
    """Exit code: the largest of the hosts, 1 for a wrong hostfile, 2 without a command."""
    options = parse_args(args)
    if not options.command:
        print("ds_ssh: error: there is no command to run.", file=sys.stderr)
        return 2
    pool = fetch_hostfile(options.hostfile)
    if pool is None:
        raise ValueError(f"there is no hostfile {options.hostfile}: name one with -f F.")
    if find_program("ssh") is None and not all(map(is_this_host, pool)):
        raise ValueError("the program ssh is not installed (apt install openssh-client).")
    codes = run_everywhere(pool, options.command, _show)
    for host, code in codes.items():
        if code:
            print(f"ds_ssh: {host}: exit code {code}", file=sys.stderr)
    return max(codes.values())


if __name__ == "__main__":
    sys.exit(main())
