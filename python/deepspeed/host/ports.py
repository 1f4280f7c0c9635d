"""TCP ports where ranks rendezvous."""

import contextlib
import errno
import socket


def port_is_free(port):
    """True when a server could listen on ``port`` of this machine now, on every address it has."""
    return all(_can_listen(family, port) for family in (socket.AF_INET, socket.AF_INET6))


def _can_listen(family, port):
    try:
        probe = socket.socket(family)
    except OSError:
        return True  # this machine has no IPv6, so no process listens there
    with probe:
        # torch's store sets this, too: a port in TIME_WAIT counts as free, a port with a listener does not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL  # IPv6 is compiled in but switched off
    return True


def free_port():
    """A port without a listener, chosen by the system."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def claim_port(port):
    """Claims ``port`` for this launcher: returns a socket that holds the claim while it is open, or None if the port
    has a listener or another launcher of this machine has claimed it. Without claims two jobs that start together would
    use one port, and each would take ranks of the other job for its own."""
    claim = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        claim.bind(f"\0deepspeed.port.{port}")  # no file, and gone with the process; a network namespace has its own
        if port_is_free(port):
            return claim
    claim.close()
    return None


def claim_any_port(first, count=1000):
    """``(port, claim)`` of the first port from ``first`` on that can be claimed. These ports are below those that the
    system gives to connections, so no connection takes one meanwhile."""
    for port in range(first, first + count):
        claim = claim_port(port)
        if claim is not None:
            return port, claim
    raise OSError(errno.EADDRINUSE, f"no port between {first} and {first + count - 1} of this machine is free")
