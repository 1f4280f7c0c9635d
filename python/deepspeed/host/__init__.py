"""What this machine has, learned without torch: cores, memory nodes, devices, ports, the BLAS behind torch.

The lowest room of the Python side: the launcher and the report run on head nodes without torch, and the accelerators
ask the same questions. Imports the standard library only.
"""
