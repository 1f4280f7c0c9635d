"""Products in which one matrix has some blocks only."""

import torch


def places(layout):
    """``(heads, rows, columns)`` of the blocks of a layout, in the order in which they are stored."""
    return layout.nonzero().unbind(1)


def in_blocks(dense, block):
    """``[batch, heads, rows, columns]`` as ``[batch, heads, row blocks, column blocks, block, block]``."""
    return dense.unflatten(-1, (-1, block)).unflatten(-3, (-1, block)).transpose(-3, -2)


def gathered(dense, where, block):
    """The blocks of a dense tensor at ``where``: ``[batch, blocks, block, block]``."""
    return in_blocks(dense, block)[:, where[0], where[1], where[2]]


class MatMul:
    """``C = A B``, where one of the three has the blocks of ``layout`` only, stored as ``[batch, blocks, block,
    block]`` in the order of ``layout.nonzero()``; the others are ``[batch, heads, rows, columns]``.

    ``mode``: three letters for C, A and B: "sdd", "dsd" or "dds" (s: blocks, d: dense). ``layout``: ``[heads, rows,
    columns]`` of zeros and ones. ``trans_a``, ``trans_b``: A or B is given transposed. Autograd computes gradients, of
    blocks only where the operand has blocks. Memory is that of the gathered blocks.
    """

    def __init__(self, layout, block, mode, trans_a=False, trans_b=False, bench=False):
        if mode not in ("sdd", "dsd", "dds"):
            raise NotImplementedError(f"Supported modes are: sdd, dsd, dds; got {mode!r}")
        self.layout, self.block, self.mode = layout.detach().ne(0).cpu(), block, mode
        self.trans_a, self.trans_b, self.bench = trans_a, trans_b, bench
        self._where = places(self.layout)

    def __call__(self, a, b):
        """The product of ``a`` and ``b``. ValueError if their shapes do not fit the layout."""
        where = [one.to(a.device) for one in self._where]
        if self.mode == "sdd":
            return self._blocks(a, b, where)
        return self._dense(a, b, where, left=self.mode == "dsd")

    def _blocks(self, a, b, where):
        a, b = a.transpose(-1, -2) if self.trans_a else a, b.transpose(-1, -2) if self.trans_b else b
        heads, rows, columns = self.layout.shape
        expected = [(heads, rows * self.block), (heads, columns * self.block)]
        found = [(a.shape[1], a.shape[2]), (b.shape[1], b.shape[3])]
        if found != expected or a.shape[3] != b.shape[2]:
            raise ValueError(
                f"operands of the shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit a layout of {heads} heads "
                f"with {rows} x {columns} blocks of {self.block}"
            )
        left = a.unflatten(2, (rows, self.block))[:, where[0], where[1]]
        right = b.unflatten(3, (columns, self.block)).transpose(2, 3)[:, where[0], where[2]]
        return torch.matmul(left, right)

    def _dense(self, a, b, where, left):
        """C is dense; A (``left``) or B has blocks."""
        sparse, dense = (a, b) if left else (b, a)
        trans_sparse, trans_dense = (self.trans_a, self.trans_b) if left else (self.trans_b, self.trans_a)
        if sparse.dim() != 4 or sparse.shape[1:] != (len(where[0]), self.block, self.block):
            raise ValueError(
                f"an operand of blocks has the shape {tuple(sparse.shape)}: the layout has {len(where[0])} blocks of "
                f"{self.block}, [batch, blocks, {self.block}, {self.block}]"
            )
        dense = dense.transpose(-1, -2) if trans_dense else dense
        sparse = sparse.transpose(-1, -2) if trans_sparse else sparse
        heads, rows, columns = self.layout.shape
        row, column = (where[2], where[1]) if trans_sparse else (where[1], where[2])
        rows, columns = (columns, rows) if trans_sparse else (rows, columns)
        shared, out, to, read = (columns, rows, row, column) if left else (rows, columns, column, row)
        along = 2 if left else 3
        if dense.shape[1] != heads or dense.shape[along] != shared * self.block:
            raise ValueError(
                f"a dense operand has the shape {tuple(dense.shape)}, {dense.shape[1]} heads and "
                f"{dense.shape[along]} numbers to sum over: the layout has {heads} heads and {shared} blocks of "
                f"{self.block}"
            )
        parts = dense.unflatten(along, (shared, self.block))
        if not left:
            parts = parts.transpose(2, 3)  # [batch, heads, column blocks, rows, block]
        parts = parts[:, where[0], read]
        products = torch.matmul(sparse, parts) if left else torch.matmul(parts, sparse)
        sums = products.new_zeros(products.shape[0], heads * out, *products.shape[2:])
        sums = sums.index_add(1, where[0] * out + to, products).unflatten(1, (heads, out))
        return sums.flatten(2, 3) if left else sums.transpose(2, 3).flatten(3, 4)
