"""The op ``packbits``: signs as bits, eight in a byte."""

from deepspeed.ops.codes import code_ops


def packbits(buffer, numel, rank):
    """Packs the signs of the first ``numel`` elements of ``buffer``.

    A bit is 1 where the element is at least 0; the first element is the highest bit of the first byte, and unused bits
    of the last byte are 0. ``rank`` is taken and not used: the bits are made on the device of ``buffer``.

    Returns:
        a torch.uint8 tensor of ceil(numel / 8) bytes.
    """
    return code_ops().pack_signs(buffer.reshape(-1)[:numel])


def unpackbits(buffer, numel, rank):
    """Returns 1 or -1 for each of the first ``numel`` bits of ``buffer``, as an fp32 tensor on its device."""
    return code_ops().unpack_signs(buffer.reshape(-1), numel)
