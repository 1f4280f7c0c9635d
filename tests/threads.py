"""Calls that a test makes on threads of their own."""

from concurrent.futures import ThreadPoolExecutor


def started(call, /, *args, **options):
    """The future of ``call(*args, **options)``, which a thread of its own has begun."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *args, **options)
    pool.shutdown(wait=False)
    return future
