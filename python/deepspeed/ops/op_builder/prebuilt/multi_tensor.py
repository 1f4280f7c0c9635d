"""Lists of lists of tensors, as Apex's multi-tensor functions take them."""


def is_wanted(function, names, lists, noop_flag):
    """Whether ``noop_flag`` lets the update happen; ValueError unless there is one list per name, all of one length."""
    if len(lists) != len(names) or len({len(one) for one in lists}) > 1:
        raise ValueError(
            f"{function} takes {len(names)} lists of tensors of one length ({', '.join(names)}), not "
            f"{len(lists)} of {', '.join(str(len(one)) for one in lists)}."
        )
    return noop_flag is None or noop_flag.device.type != "cpu" or not noop_flag.any()
