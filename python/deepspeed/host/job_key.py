"""Proofs by which two processes of a job show that they know its key without sending it; and jobs without a key."""

import hashlib
import hmac
import ipaddress

KEY_VARIABLE = "DS_JOB_KEY"
MAKE_KEY = f"""export {KEY_VARIABLE}=$(python3 -c "import secrets; print(secrets.token_hex(16))")"""
NO_KEY = (
    f"the job has no key, so other hosts are refused. Make a key on one host with this line, and set {KEY_VARIABLE} to "
    f"the same text on every host: {MAKE_KEY} (--insecure works without a key: any host that reaches the "
    f"port can then take part in the job and read its environment)"
)


def is_from_here(connection):
    """Whether both ends of a TCP connection are on this machine."""
    here, there = connection.getsockname()[0], connection.getpeername()[0]
    return here == there or ipaddress.ip_address(there.partition("%")[0]).is_loopback


def proof(key, nonce, who):
    """The proof that ``who`` knows ``key``. ``nonce``: a random text of the other side."""
    return hmac.new(key.encode(), f"{who} {nonce}".encode(), hashlib.sha256).hexdigest()


def proves(text, key, nonce, who):
    """Whether ``text`` is that proof."""
    expected = proof(key, nonce, who).encode()
    return isinstance(text, str) and hmac.compare_digest(text.encode("utf-8", "surrogateescape"), expected)
