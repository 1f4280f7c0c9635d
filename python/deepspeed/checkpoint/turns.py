"""Ranks of one machine that do something one after the other: what it takes of memory and disk is taken once."""

import socket


def in_turn(ranks, function):
    """``function()`` on every rank, while no other rank of this machine is in it. Every rank calls it; ``function``
    must not wait for other ranks. Raises what it raised here, after all had their turn."""
    hosts = ranks.gather(socket.gethostname())
    mine = hosts[: ranks.rank].count(hosts[ranks.rank])
    error = None
    for turn in range(max(hosts.count(host) for host in set(hosts))):
        if turn == mine:
            try:
                function()
            except Exception as caught:
                error = caught
        ranks.gather(None)
    if error is not None:
        raise error
