"""Import path of existing scripts."""

from deepspeed.sequence.chunked_loss import (  # noqa: F401
    ChunkedCausalLMLoss,
    chunked_cross_entropy,
    install_chunked_causal_lm_loss,
)
