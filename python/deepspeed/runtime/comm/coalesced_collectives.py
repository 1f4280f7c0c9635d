"""Import path that existing scripts use."""

from deepspeed.comm.coalesced import all_to_all_quant_reduce, reduce_scatter_coalesced  # noqa: F401
