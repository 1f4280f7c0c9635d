"""Facts about this machine, found without torch: cores, memory nodes, devices, ports, the BLAS behind torch.

This is the lowest room of the Python side: the launcher and the report, which run on head nodes without torch, use it,
and so do the accelerators. It imports the standard library only.
"""
