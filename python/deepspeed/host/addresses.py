"""The IP addresses of this machine."""

import ipaddress

from deepspeed.host.texts import read_text


def own_addresses():
    """The set of ``ipaddress`` objects of this machine's interfaces, from the kernel's tables. A socket cannot tell,
    because with net.ipv4.ip_nonlocal_bind=1 it binds to addresses of other machines, too."""
    # Each line of the second table begins with the 32 hexadecimal digits of an address.
    lines = read_text("/proc/net/if_inet6").splitlines()
    return _ipv4() | {ipaddress.ip_address(int(line.split()[0], 16).to_bytes(16, "big")) for line in lines}


def is_own_address(text):
    """Whether the IP address ``text`` ("10.0.0.5", "fe80::1%eth0") is one of this machine's."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return address.is_loopback or address.is_unspecified or address in own_addresses()


def _ipv4():
    """A line "|-- ADDRESS" names what the lines below it are about; "/32 host LOCAL" is an address of this machine."""
    found, address = set(), None
    for line in read_text("/proc/net/fib_trie").splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            address = words[1]
        elif words == ["/32", "host", "LOCAL"] and address is not None:
            found.add(ipaddress.ip_address(address))
    return found
