import os
import shutil
import socket
import subprocess
import sys

import pytest

from deepspeed.host.addresses import is_own_address, own_addresses
from deepspeed.launcher.plan import is_this_host

ELSEWHERE = "203.0.113.7"  # an address for documentation: no machine has it

IN_A_NAMESPACE = f"""
open("/proc/sys/net/ipv4/ip_nonlocal_bind", "w").write("1")
import socket
with socket.socket() as probe:
    probe.bind(("{ELSEWHERE}", 0))
from deepspeed.launcher.plan import is_this_host
assert not is_this_host("{ELSEWHERE}")
assert is_this_host("127.0.0.1") and is_this_host("127.0.1.1")
"""


def test_addresses_of_this_machine_and_of_others():
    assert is_own_address("127.0.0.1") and is_own_address("127.0.1.1") and is_own_address("::1")
    assert not is_own_address(ELSEWHERE) and not is_own_address("2001:db8::7")
    assert not is_this_host(ELSEWHERE) and not is_this_host("no-such-host.invalid")
    for address in own_addresses():
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        if address.version == 4 or not address.is_link_local:
            with socket.socket(family) as probe:
                probe.bind((str(address), 0))
            assert is_this_host(str(address))


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a network namespace needs root and unshare"
)
def test_a_kernel_that_binds_to_any_address_makes_no_host_local():
    command = ["unshare", "-n", sys.executable, "-c", IN_A_NAMESPACE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
