"""Patterns of sparse attention: which blocks of keys each block of queries sees.

A layout is an int64 tensor ``[heads, blocks, blocks]`` of zeros and ones. In a unidirectional pattern no block of
queries sees later blocks; inside of its own block each query sees all keys, unless a mask says otherwise. Sources:
Child et al., "Sparse Transformers" (2019); Beltagy et al., "Longformer" (2020); Zaheer et al., "Big Bird" (2020).
"""

import random

import torch


class SparsityConfig:
    """The base of all patterns. A pattern of your own derives from it and has ``make_layout(seq_len)``, which begins
    with ``setup_layout`` and ends with ``check_and_propagate_first_head_layout``.

    ``num_heads``: of the queries. ``block``: tokens of a block. ``different_layout_per_head`` false: all heads have the
    layout of the first one.
    """

    def __init__(self, num_heads, block=16, different_layout_per_head=False):
        self.num_heads, self.block = num_heads, block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1
        self.made = {}  # KeyBlocks by length: see layouts.layout_of

    def __getstate__(self):
        return {**vars(self), "made": {}}

    def setup_layout(self, seq_len):
        """A layout of zeros for ``seq_len`` tokens. ValueError if these are not whole blocks."""
        if seq_len % self.block:
            raise ValueError(
                f"Sequence Length, {seq_len}, needs to be dividable by Block size {self.block}! "
                "SparseAttentionUtils.pad_to_block_size pads a batch to whole blocks"
            )
        blocks = seq_len // self.block
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout):
        """Gives all heads the layout of the first one, if they share it. Returns ``layout``."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout

    def make_layout(self, seq_len):
        """The layout for ``seq_len`` tokens. The base has none."""
        raise NotImplementedError(
            f"{type(self).__name__} has no make_layout(seq_len): give sparse attention one of the patterns, such as "
            "FixedSparsityConfig, or a subclass of SparsityConfig with make_layout"
        )

    def _made(self, seq_len, *steps):
        """The layout after ``step(head, layout)`` for each head with a layout of its own."""
        layout = self.setup_layout(seq_len)
        for head in range(self.num_layout_heads):
            for step in steps:
                layout = step(head, layout)
        if getattr(self, "attention", None) == "unidirectional":
            layout = layout.tril()
        return self.check_and_propagate_first_head_layout(layout)

    def _random(self, head, blocks):
        """Random numbers that are the same in every process, for a head and a number of blocks."""
        return random.Random(f"{type(self).__name__} {head} {blocks}")


def _check_attention(attention, horizontal=False):
    if attention not in ("unidirectional", "bidirectional"):
        raise NotImplementedError(
            f'only "uni/bi-directional" attentions are supported for now! attention is {attention!r}: it is '
            '"unidirectional" or "bidirectional"'
        )
    if horizontal and attention != "bidirectional":
        raise ValueError(
            'only "bi-directional" attentions can support horizontal global attention! horizontal_global_attention is '
            f"true and attention {attention!r}"
        )


def _check_ends(starts, ends):
    if ends is None:
        return
    if len(starts) != len(ends):
        raise ValueError(
            f"Global block start indices length, {len(starts)}, must be same as global block end indices length, "
            f"{len(ends)}!"
        )
    for start, end in zip(starts, ends):
        if start >= end:
            raise ValueError(f"Global block start index, {start}, must be smaller than global block end index, {end}!")


def _check_row(what, count, blocks):
    if blocks < count:
        raise ValueError(
            f"Number of {what} blocks, {count}, must be smaller than overal number of blocks in a row, {blocks}!"
        )


class _Pattern(SparsityConfig):
    """The steps that patterns have in common."""

    attention = "bidirectional"
    horizontal_global_attention = False

    @property
    def _one_way(self):
        return self.attention == "unidirectional"

    def _window(self, head, layout, start, stop):
        """Blocks [start, stop) see each other."""
        whole = torch.ones(stop - start, stop - start, dtype=layout.dtype)
        layout[head, start:stop, start:stop] = whole.tril() if self._one_way else whole

    def _global(self, head, layout, start, stop):
        """All blocks, or later ones, see the blocks [start, stop), which see all if attention is horizontal, too."""
        if self.horizontal_global_attention:
            layout[head, start:stop, :] = 1
        layout[head, (start if self._one_way else 0) :, start:stop] = 1

    def _sliding(self, head, layout):
        blocks, reach = layout.shape[1], self.num_sliding_window_blocks // 2
        _check_row("sliding window", self.num_sliding_window_blocks, blocks)
        for row in range(blocks):
            layout[head, row, max(0, row - reach) : min(row + reach + 1, blocks)] = 1
        return layout

    def _ranges(self, blocks):
        """The runs of global blocks."""
        ends = self.global_block_end_indices or [start + 1 for start in self.global_block_indices]
        return [(start, min(end, blocks)) for start, end in zip(self.global_block_indices, ends) if start < blocks]

    def _draw(self, head, layout, ahead):
        """``num_random_blocks`` of each row: of all blocks, or of those up to the row unless ``ahead``."""
        blocks = layout.shape[1]
        _check_row("random", self.num_random_blocks, blocks)
        drawn = self._random(head, blocks)
        for row in range(blocks):
            among = range(blocks) if ahead else range(row + 1)
            layout[head, row, drawn.sample(among, min(self.num_random_blocks, len(among)))] = 1
        return layout


class DenseSparsityConfig(SparsityConfig):
    """Every block sees every block: for comparisons."""

    def make_layout(self, seq_len):
        """The layout for ``seq_len`` tokens: ones."""
        return self.setup_layout(seq_len).fill_(1)


class FixedSparsityConfig(_Pattern):
    """Windows of ``num_local_blocks``, of each of which ``num_global_blocks`` are seen by all blocks (Sparse
    Transformers, fixed).

    ``num_different_global_patterns``: heads take turns with that many choices of the global blocks in a window: the
    last ones, those before them, and so on.
    """

    def __init__(
        self,
        num_heads,
        block=16,
        different_layout_per_head=False,
        num_local_blocks=4,
        num_global_blocks=1,
        attention="bidirectional",
        horizontal_global_attention=False,
        num_different_global_patterns=1,
    ):
        super().__init__(num_heads, block, different_layout_per_head)
        if num_local_blocks % num_global_blocks:
            raise ValueError(
                f"Number of blocks in a local window, {num_local_blocks}, must be dividable by number of global "
                f"blocks, {num_global_blocks}!"
            )
        _check_attention(attention, horizontal_global_attention)
        if num_different_global_patterns > 1 and not different_layout_per_head:
            raise ValueError(
                "Number of different layouts cannot be more than one when you have set a single layout for all heads! "
                f"Set different_layout_per_head to True. num_different_global_patterns is "
                f"{num_different_global_patterns}"
            )
        if num_different_global_patterns > num_local_blocks // num_global_blocks:
            raise ValueError(
                f"Number of layout versions (num_different_global_patterns), {num_different_global_patterns}, cannot "
                f"be larger than number of local window blocks divided by number of global blocks, {num_local_blocks} "
                f"/ {num_global_blocks} = {num_local_blocks // num_global_blocks}!"
            )
        self.num_local_blocks, self.num_global_blocks, self.attention = num_local_blocks, num_global_blocks, attention
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns

    def set_local_layout(self, h, layout):
        """Adds the windows of head ``h``."""
        blocks = layout.shape[1]
        for start in range(0, blocks, self.num_local_blocks):
            self._window(h, layout, start, min(start + self.num_local_blocks, blocks))
        return layout

    def set_global_layout(self, h, layout):
        """Adds the global blocks of head ``h``."""
        blocks, width = layout.shape[1], self.num_global_blocks
        first = self.num_local_blocks - (1 + h % self.num_different_global_patterns) * width
        whole = blocks - blocks % self.num_local_blocks
        starts = [*range(first, whole, self.num_local_blocks)]
        if whole < blocks:  # the last window is shorter
            starts.append(max(0, min(whole + first, blocks - width)))
        for start in starts:
            self._global(h, layout, start, min(start + width, blocks))
        return layout

    def make_layout(self, seq_len):
        """The layout for ``seq_len`` tokens."""
        return self._made(seq_len, self.set_local_layout, self.set_global_layout)


class VariableSparsityConfig(_Pattern):
    """Windows of the lengths ``local_window_blocks`` (the last one again and again), chosen global blocks, and random
    ones.

    ``global_block_indices``: global blocks, or with ``global_block_end_indices`` the first blocks of runs that end
    before these.
    """

    def __init__(
        self,
        num_heads,
        block=16,
        different_layout_per_head=False,
        num_random_blocks=0,
        local_window_blocks=[4],  # noqa: B006 (published default; copied below)
        global_block_indices=[0],  # noqa: B006
        global_block_end_indices=None,
        attention="bidirectional",
        horizontal_global_attention=False,
    ):
        super().__init__(num_heads, block, different_layout_per_head)
        _check_ends(global_block_indices, global_block_end_indices)
        _check_attention(attention, horizontal_global_attention)
        if not local_window_blocks or min(local_window_blocks) < 1:
            raise ValueError(f"local_window_blocks is {local_window_blocks}: windows have 1 block or more")
        self.num_random_blocks, self.local_window_blocks = num_random_blocks, list(local_window_blocks)
        self.global_block_indices, self.attention = list(global_block_indices), attention
        self.global_block_end_indices = global_block_end_indices and list(global_block_end_indices)
        self.horizontal_global_attention = horizontal_global_attention

    def set_random_layout(self, h, layout):
        """Adds the random blocks of head ``h``: of all blocks, or of earlier ones."""
        return self._draw(h, layout, ahead=not self._one_way)

    def set_local_layout(self, h, layout):
        """Adds the windows of head ``h``."""
        blocks, start, lengths = layout.shape[1], 0, iter(self.local_window_blocks)
        while start < blocks:
            length = next(lengths, self.local_window_blocks[-1])
            self._window(h, layout, start, min(start + length, blocks))
            start += length
        return layout

    def set_global_layout(self, h, layout):
        """Adds the global blocks of head ``h``."""
        for start, stop in self._ranges(layout.shape[1]):
            self._global(h, layout, start, stop)
        return layout

    def make_layout(self, seq_len):
        """The layout for ``seq_len`` tokens."""
        return self._made(seq_len, self.set_random_layout, self.set_local_layout, self.set_global_layout)


class BigBirdSparsityConfig(_Pattern):
    """Random blocks, a sliding window, and the first blocks, which see all and are seen by all (internal transformer
    construction)."""

    def __init__(
        self,
        num_heads,
        block=16,
        different_layout_per_head=False,
        num_random_blocks=1,
        num_sliding_window_blocks=3,
        num_global_blocks=1,
        attention="bidirectional",
    ):
        super().__init__(num_heads, block, different_layout_per_head)
        _check_attention(attention)
        self.num_random_blocks, self.num_sliding_window_blocks = num_random_blocks, num_sliding_window_blocks
        self.num_global_blocks, self.attention = num_global_blocks, attention

    def set_random_layout(self, h, layout):
        """Adds the random blocks of head ``h``: of all blocks, or of earlier ones."""
        return self._draw(h, layout, ahead=not self._one_way)

    def set_sliding_window_layout(self, h, layout):
        """Adds the window around each block of head ``h``."""
        return self._sliding(h, layout)

    def set_global_layout_itc(self, h, layout):
        """Adds the global blocks of head ``h``."""
        _check_row("global", self.num_global_blocks, layout.shape[1])
        layout[h, : self.num_global_blocks] = 1
        layout[h, :, : self.num_global_blocks] = 1
        return layout

    def make_layout(self, seq_len):
        """The layout for ``seq_len`` tokens."""
        return self._made(seq_len, self.set_random_layout, self.set_sliding_window_layout, self.set_global_layout_itc)


class BSLongformerSparsityConfig(_Pattern):
    """A sliding window, and chosen blocks that see all and are seen by all; indices as in
    ``VariableSparsityConfig``."""

    def __init__(
        self,
        num_heads,
        block=16,
        different_layout_per_head=False,
        num_sliding_window_blocks=3,
        global_block_indices=[0],  # noqa: B006
        global_block_end_indices=None,
        attention="bidirectional",
    ):
        super().__init__(num_heads, block, different_layout_per_head)
        _check_ends(global_block_indices, global_block_end_indices)
        _check_attention(attention)
        self.num_sliding_window_blocks, self.attention = num_sliding_window_blocks, attention
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = global_block_end_indices and list(global_block_end_indices)

    def set_sliding_window_layout(self, h, layout):
        """Adds the window around each block of head ``h``."""
        return self._sliding(h, layout)

    def set_global_layout(self, h, layout):
        """Adds the global blocks of head ``h``."""
        for start, stop in self._ranges(layout.shape[1]):
            layout[h, start:stop] = 1
            layout[h, :, start:stop] = 1
        return layout

    def make_layout(self, seq_len):
        """The layout for ``seq_len`` tokens."""
        return self._made(seq_len, self.set_sliding_window_layout, self.set_global_layout)


class LocalSlidingWindowSparsityConfig(_Pattern):
    """A sliding window alone, the same for all heads."""

    def __init__(self, num_heads, block=16, num_sliding_window_blocks=3, attention="unidirectional"):
        super().__init__(num_heads, block)
        _check_attention(attention)
        self.num_sliding_window_blocks, self.attention = num_sliding_window_blocks, attention

    def set_sliding_window_layout(self, h, layout):
        """Adds the window around each block of head ``h``."""
        return self._sliding(h, layout)

    def make_layout(self, seq_len):
        """The layout for ``seq_len`` tokens."""
        return self._made(seq_len, self.set_sliding_window_layout)
