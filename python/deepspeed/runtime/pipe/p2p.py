"""Import path of existing scripts."""

from deepspeed.pipe.p2p import (  # noqa: F401
    _is_valid_send_recv,
    can_send_recv,
    init_process_groups,
    recv,
    recv_obj,
    send,
    send_obj,
    wait,
)
