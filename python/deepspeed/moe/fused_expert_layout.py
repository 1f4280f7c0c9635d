"""The layout of experts that are rows of two three-dimensional parameters."""

from deepspeed.moe.errors import fail


def classify_fused_gate_up_layout(w1_shape, w2_shape):
    """Gates and ups ``[experts, 2 x ffn, hidden]`` with downs ``[experts, hidden, ffn]``, as linear layers have them,
    are "out_in"; ``[experts, hidden, 2 x ffn]`` with ``[experts, ffn, hidden]`` are "in_out". ValueError for neither.
    """
    first, second = tuple(w1_shape), tuple(w2_shape)
    if len(first) == len(second) == 3 and first[0] == second[0]:
        if first[1] == 2 * second[2] and first[2] == second[1]:
            return "out_in"
        if first[2] == 2 * second[1] and first[1] == second[2]:
            return "in_out"
    fail(
        "",
        f"experts of shapes {list(first)} and {list(second)} are neither [experts, 2 x ffn, hidden] with [experts, "
        "hidden, ffn] nor [experts, hidden, 2 x ffn] with [experts, ffn, hidden]",
    )
