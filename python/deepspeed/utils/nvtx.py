"""Named ranges around functions, for the profiler of the accelerator."""

import functools

from deepspeed.accelerator import get_accelerator

DEEPSPEED_NVTX_DOMAIN = "DeepSpeed"


def instrument_w_nvtx(func):
    """Decorator: the function's name is a range in the profiler while it runs, also when it raises.

    Where the accelerator separates domains, the range belongs to the domain ``DeepSpeed``.
    """

    @functools.wraps(func)
    def wrapped(*args, **kwargs):
        accelerator = get_accelerator()
        domain = {"domain": DEEPSPEED_NVTX_DOMAIN} if accelerator.supports_nvtx_domain else {}
        accelerator.range_push(func.__qualname__, **domain)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop(**domain)

    return wrapped
