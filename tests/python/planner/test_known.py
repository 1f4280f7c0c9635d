"""Results of operators on meta tensors that are known from an earlier call."""

import torch

from deepspeed._compat import memory_of
from deepspeed.planner.known import KnownResults


def test_an_operation_of_known_metadata_gives_the_same_again():
    """Metadata and memory: results of their own are new tensors, views stay views, other arguments are not confused."""
    known, x = KnownResults(), torch.empty(4, 6, device="meta")
    aten = torch.ops.aten
    for func, args in (
        (aten._log_softmax.default, (x, 1, False)),
        (aten._log_softmax.default, (x.t(), 1, False)),
        (aten.mm.default, (x, x.t())),
        (aten.native_layer_norm.default, (x, [6], None, None, 1e-5)),
        (aten.add.Tensor, (x, x.bfloat16())),
        (aten.add_.Tensor, (x, x)),
        (aten.t.default, (x,)),
        (aten._unsafe_view.default, (x, [24])),
        (aten.cat.default, ([x, x], 1)),
    ):
        wanted = func(*args)
        for found in (known.run(func, args, {}), known.run(func, args, {})):
            pairs = list(zip(wanted, found)) if isinstance(wanted, tuple) else [(wanted, found)]
            for a, b in pairs:
                assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device), func
                assert (memory_of(a) == memory_of(x)) == (memory_of(b) == memory_of(x)), func
    assert len(known.results) == 6
