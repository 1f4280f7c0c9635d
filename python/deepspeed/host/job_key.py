"""How two processes of a job show each other that they know its key, without saying it."""

import hashlib
import hmac


def proof(key, nonce, who):
    """What shows that ``who`` knows ``key``; ``nonce``: a text that the other side has just made up."""
    return hmac.new(key.encode(), f"{who} {nonce}".encode(), hashlib.sha256).hexdigest()


def proves(text, key, nonce, who):
    """Whether ``text`` is that proof."""
    expected = proof(key, nonce, who).encode()
    return isinstance(text, str) and hmac.compare_digest(text.encode("utf-8", "surrogateescape"), expected)
