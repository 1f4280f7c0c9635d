"""Tables of kernels (csrc/kernels/table.h, routes.h, attention.h) as functions of Python, and calls of every entry.

tables = host_tables()      # of the CUDA kernels that run on the CPU: tensors lie in memory of the host
tables = standin_tables()   # those that deepspeed chooses for the stand-in, with DS_STANDIN_KERNELS=library_path()
results = call_every_entry(tables, lambda tensor: tensor.to("standin"))
"""

import ctypes
import functools
import os

import standin
import torch

from deepspeed.env_report.native import LIB_DIR

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # by the numbers of base/dtype.h
ABIS = {"": 5, "route_": 1, "attention_": 3}
SIZES = (0, 1, 33, 2100)
_POINTER, _SIZE, _DTYPE, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_float
_RULES = (
    *("adam", "adam8bit", "adagrad", "lamb_moments", "lamb", "lion", "muon_momentum", "muon", "sgd"),
    *("onebit_send", "onebit_take", "zero_one_local", "zero_one_send", "zero_one_sync"),
    *(f"onebit_lamb{part}" for part in ("", "_size", "_send", "_moments", "_coeff", "_factor")),
)


def library_path():
    """The library that CMake makes of csrc/kernels/cuda beside the stand-in."""
    return os.path.join(os.path.dirname(standin.library_path()), "libds_kernels_cuda_on_cpu.so")


def _struct(title, /, **fields):
    return type(title, (ctypes.Structure,), {"_fields_": list(fields.items())})


Launch = _struct("Launch", pool=_POINTER, stream=_POINTER, scratch=_POINTER)
Segment = _struct("Segment", data=_POINTER, numel=_SIZE)
Checked = _struct("Checked", data=_POINTER, numel=_SIZE, found=_POINTER)
Move = _struct("Move", to=_POINTER, source=_POINTER, numel=_SIZE)
UpdateKernel = _struct("UpdateKernel", name=ctypes.c_char_p, states=ctypes.c_int, constants_bytes=_SIZE)
UpdateSegment = _struct(
    "UpdateSegment", master=_POINTER, states=_POINTER * 4, grad=_POINTER, lp=_POINTER, numel=_SIZE, scratch=_POINTER,
    sums=_POINTER, stream=ctypes.c_uint64,
)  # fmt: skip
UpdateArgs = _struct(
    "UpdateArgs", grad=_DTYPE, lp=_DTYPE, master=_DTYPE, state=_DTYPE, constants=_POINTER, stochastic=ctypes.c_bool,
    seed=ctypes.c_uint64,
)  # fmt: skip
GemmGroup = _struct(
    "GemmGroup", a=_POINTER, b=_POINTER, bias=_POINTER, c=_POINTER, m=ctypes.c_int64, n=ctypes.c_int64, k=ctypes.c_int64
)
GemmForm = _struct("GemmForm", a_turned=ctypes.c_bool, b_turned=ctypes.c_bool)
Operand = _struct("Operand", data=_POINTER, batch=ctypes.c_int64, head=ctypes.c_int64, token=ctypes.c_int64)
State = _struct("State", largest=_POINTER, total=_POINTER, sum=_POINTER)
Dropout = _struct(
    "Dropout", seed=ctypes.c_uint64, below=ctypes.c_uint32, kept=_FLOAT, head=ctypes.c_uint32, query=ctypes.c_uint32,
    key=ctypes.c_uint32,
)  # fmt: skip
_LONG = ctypes.c_int64
Blocks = _struct(
    "Blocks", size=_LONG, start=_POINTER, list=_POINTER, heads=_LONG, reader_start=_POINTER, readers=_POINTER,
    reader_heads=_LONG,
)  # fmt: skip
Bias = _struct(
    "Bias", data=_POINTER, dtype=_DTYPE, inner=_LONG, outer=_LONG, batch=_LONG, head=_LONG, query=_LONG, key=_LONG
)
Shape = _struct(
    "Shape", dtype=_DTYPE, batch=ctypes.c_int64, heads=ctypes.c_int64, kv_heads=ctypes.c_int64, queries=ctypes.c_int64,
    keys=ctypes.c_int64, size=ctypes.c_int64, value_size=ctypes.c_int64, scale=_FLOAT, soft_cap=_FLOAT,
    causal=ctypes.c_bool, offset=ctypes.c_int64, window=ctypes.c_int64, looks=_POINTER, looks_batch=ctypes.c_int64,
    looks_query=ctypes.c_int64, dropout=Dropout, blocks=Blocks, biases=Bias * 2,
)  # fmt: skip

_ELEMENTS = (_POINTER, _DTYPE, _POINTER, _DTYPE, _SIZE, _FLOAT)
_ROWS = (_POINTER, _POINTER, _DTYPE, _SIZE, _SIZE)
_UPDATE = (ctypes.POINTER(UpdateKernel), ctypes.POINTER(UpdateSegment), _SIZE, ctypes.POINTER(UpdateArgs), _POINTER)
_LOOKS = (ctypes.POINTER(Shape), *[ctypes.POINTER(Operand)] * 3)
_STATE = ctypes.POINTER(State)
# name -> what a call takes behind the launch; other signatures: (result, what a call takes)
ENTRIES = {
    "": {
        "copy": _ELEMENTS,
        "accumulate": _ELEMENTS,
        "sum_squares": (ctypes.POINTER(Segment), _SIZE, _DTYPE, _POINTER),
        "finish_norm": (_POINTER, _POINTER, _FLOAT, _FLOAT, ctypes.c_bool, _POINTER),
        "find_update": [ctypes.POINTER(UpdateKernel), ctypes.c_char_p],
        "update_name": [ctypes.c_char_p, _SIZE],
        "update": _UPDATE,
        "scale": (_POINTER, _DTYPE, _SIZE, _FLOAT),
        "last_error": [ctypes.c_char_p],
        "device_error": [ctypes.c_char_p],
        "column_sums": (_POINTER, _DTYPE, _SIZE, _SIZE, _SIZE, _POINTER),
        "move_all": (ctypes.POINTER(Move), _SIZE, _DTYPE, _DTYPE, _FLOAT, ctypes.c_bool),
        "find_nonfinite": (ctypes.POINTER(Checked), _SIZE, _DTYPE),
    },
    "route_": {
        "topk_gate": (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER),
        "permute_rows": (*_ROWS, _POINTER, _POINTER, ctypes.c_int64),
        "combine_rows": (*_ROWS, _SIZE, _POINTER, _POINTER),
        "dot_rows": (_POINTER, _POINTER, _POINTER, _DTYPE, _SIZE, _SIZE, _SIZE, _POINTER),
        "grouped_gemm": (ctypes.POINTER(GemmGroup), _SIZE, GemmForm, _DTYPE),
    },
    "attention_": {
        "forward": (*_LOOKS, _STATE, ctypes.c_bool),
        "merge": (_STATE, _STATE, _DTYPE, _SIZE, _SIZE),
        "backward": (*_LOOKS, ctypes.POINTER(Operand), *[_POINTER] * 5),
        "bias_backward": (*_LOOKS, ctypes.POINTER(Operand), _POINTER, _POINTER, ctypes.c_int, _POINTER),
    },
}


class _Scratch:
    """ds::kernels::Scratch: a pointer to a table with the one virtual function."""

    def __init__(self, make):
        self.made = []

        def allocate(_, size):
            self.made.append(make(torch.empty(size, dtype=torch.uint8)))
            return self.made[-1].data_ptr()

        self.function = ctypes.CFUNCTYPE(_POINTER, _POINTER, _SIZE)(allocate)
        self.functions = (_POINTER * 1)(ctypes.cast(self.function, _POINTER).value)
        self.object = (_POINTER * 1)(ctypes.addressof(self.functions))


class Tables:
    """The three tables of a device. ``call(entry, *arguments)`` puts a launch on a stream, by its id; tensors are
    passed by their address, dtypes by their number. ``make`` brings a tensor of the host to the device."""

    def __init__(self, found, make):
        self.make, self.stream, self.entries, self.kept = make, 0, {}, []
        self.scratch = _Scratch(make)
        for kind, entries in ENTRIES.items():
            address = found(kind, ABIS[kind])
            if not address:
                raise RuntimeError(f"there is no table of {kind or 'plain '}kernels")
            start = address + (24 if kind == "" else 8)
            for index, (name, takes) in enumerate(entries.items()):
                pointer = _POINTER.from_address(start + 8 * index).value
                returns, *takes = takes if isinstance(takes, list) else (None, ctypes.POINTER(Launch), *takes)
                self.entries[name] = ctypes.CFUNCTYPE(returns, *takes)(pointer)

    def call(self, entry, *arguments):
        launch = Launch(None, self.stream, ctypes.addressof(self.scratch.object))
        self.entries[entry](launch, *[self._argument(one) for one in arguments])
        if error := self.entries["last_error"]():
            raise RuntimeError(error.decode())

    def _argument(self, one):
        if isinstance(one, torch.Tensor):
            return one.data_ptr()
        return DTYPES.index(one) if isinstance(one, torch.dtype) else one

    def random(self, *sizes, dtype=torch.float32, seed=0, offset=0):
        """Numbers on the device; ``offset`` elements behind an address that fits vectors."""
        numbers = torch.randn(offset + _count(sizes), generator=torch.Generator().manual_seed(seed)).to(dtype)
        whole = self.make(numbers)
        self.kept.append(whole)
        return whole[offset:].view(sizes)

    def segment(self, numel, dtypes, states, seed, codes=False):
        """``(UpdateSegment, the tensors that it names)``; ``codes``: two of the states are of 8 bits."""
        master, state, grad, lp = dtypes
        tensors = [
            self.random(numel, dtype=dtype, seed=seed + at)
            for at, dtype in enumerate((master, grad, lp, torch.float32, torch.float64))
        ]
        own = [self.random(numel, dtype=state, seed=seed + 10 + at).abs_() for at in range(states)]
        if codes:
            own[:2] = [self.random(numel, seed=seed + 20 + at).mul_(40).to(torch.uint8) for at in range(2)]
            own[2:] = [one.float() for one in own[2:]]
        tensors[4] = self.random(6, dtype=torch.float64, seed=seed).abs_()  # the most that a rule has (1-bit LAMB)
        pointers = (_POINTER * 4)(*[one.data_ptr() for one in own])
        first = [one.data_ptr() for one in tensors]
        return UpdateSegment(first[0], pointers, first[1], first[2], numel, first[3], first[4], seed), [*tensors, *own]


def _count(sizes):
    return functools.reduce(lambda a, b: a * b, sizes, 1)


def host_tables():
    """Those of the CUDA kernels on the CPU, for memory of the host."""
    library = ctypes.CDLL(library_path())

    def found(kind, abi):
        get = getattr(library, f"ds_device_{kind}kernels")
        get.restype = _POINTER
        return get(ctypes.c_uint32(abi))

    return Tables(found, lambda tensor: tensor)


def standin_tables(device="standin"):
    """Those that deepspeed finds for the stand-in."""
    library = ctypes.CDLL(os.path.join(LIB_DIR, "libds_kernels_cpu.so"))

    def found(kind, abi):
        get = getattr(library, f"ds_{kind}kernels")
        get.restype = _POINTER
        return get(ctypes.c_uint32(abi), b"standin")

    return Tables(found, lambda tensor: tensor.to(device, copy=True))


def call_every_entry(tables):
    """Calls of each entry with some sizes, dtypes and alignments: ``[(what was called, tensors that it wrote)]``."""
    results = []
    for calls in (_elements, _sums, _updates, _routes, _attention):
        results += [(name, [one.cpu().clone() for one in written]) for name, written in calls(tables)]
    tables.kept.clear()
    tables.scratch.made.clear()
    return results


def _elements(t):
    for size in SIZES:
        for offset, (to, source) in enumerate(zip(DTYPES, (*DTYPES[1:], DTYPES[0]), strict=True)):
            out, data = t.random(size, dtype=to, seed=1, offset=offset), t.random(size, dtype=source, seed=2)
            for factor in (1.0, 0.3):
                t.call("copy", out, to, data, source, size, factor)
                yield f"copy {size} {to} {source} {factor}", [out]
            same = t.random(size, dtype=source, seed=3)
            t.call("copy", same, source, data, source, size, 1.0)
            t.call("accumulate", out, to, data, source, size, 0.3)
            t.call("scale", out, to, size, 0.7)
            moves = (Move * 2)(Move(out.data_ptr(), same.data_ptr(), size // 3),
                               Move(out[size // 2 :].data_ptr(), same.data_ptr(), size - size // 2))  # fmt: skip
            t.call("move_all", moves, 2, to, source, 0.5, True)
            sums = t.random(7, dtype=torch.float64, seed=4)
            t.call("column_sums", data, source, size, 3, 7, sums)
            yield f"accumulate, scale and column_sums {size} {to} {source}", [same, out, sums]


def _sums(t):
    for dtype in DTYPES:
        data = [t.random(SIZES[i % len(SIZES)], dtype=dtype, seed=i, offset=i % 2) for i in range(140)]
        segments = (Segment * len(data))(*[Segment(one.data_ptr(), one.numel()) for one in data])
        total, found = t.random(1, dtype=torch.float64).zero_(), t.random(2, dtype=torch.float64)
        t.call("sum_squares", segments, len(data), dtype, total)
        t.call("finish_norm", total, None, 2.0, 1.5, True, found)
        data[1][:1], data[2][-1:] = float("inf"), float("nan")
        bits = t.make(torch.zeros(len(data), dtype=torch.int32))
        checked = (Checked * len(data))(
            *[Checked(one.data_ptr(), one.numel(), bits[i:].data_ptr()) for i, one in enumerate(data)]
        )
        t.call("find_nonfinite", checked, len(data), dtype)
        yield f"find_nonfinite {dtype}", [bits]
        yield f"sum_squares and finish_norm {dtype}", [total, found]


def _updates(t):
    names = []
    while name := t.entries["update_name"](len(names)):
        names.append(name.decode())
    assert sorted(names) == sorted(_RULES)
    for at, name in enumerate(names):
        kernel = t.entries["find_update"](name.encode())
        constants = (_FLOAT * (kernel.contents.constants_bytes // 4 + 1))(*[0.5] * 4)
        for dtypes in ((torch.float32,) * 4, (torch.float32, torch.float32, torch.bfloat16, torch.float16)):
            made = [t.segment(size, dtypes, kernel.contents.states, at, name == "adam8bit") for size in SIZES]
            segments = (UpdateSegment * len(made))(*[one[0] for one in made])
            master, state, grad, lp = (DTYPES.index(dtype) for dtype in dtypes)
            args = UpdateArgs(grad, lp, master, state, ctypes.addressof(constants), False, 0)
            scale = t.make(
                torch.tensor([0.0, torch.tensor([0.5, 0.0]).view(torch.float64).item()], dtype=torch.float64)
            )
            t.call("update", kernel, segments, len(made), args, scale)
            yield f"update {name} {dtypes}", [tensor for one in made for tensor in one[1]]


def _routes(t):
    logits, select = t.random(70, 12, seed=1), t.random(70, 12, seed=2)
    probs, index = t.random(70, 12), t.make(torch.zeros(70, 2, dtype=torch.int32))
    t.call("topk_gate", logits, select, 70, 12, 2, probs, index)
    yield "topk_gate", [probs, index]
    slots = t.make(torch.randint(-1, 70, (70, 2), generator=torch.Generator().manual_seed(3), dtype=torch.int32))
    weight = t.random(140, seed=4)
    for dtype in DTYPES:
        rows, grad = t.random(70, 33, dtype=dtype, seed=5), t.random(70, 33, dtype=dtype, seed=6)
        moved, joined = t.random(140, 33, dtype=dtype), t.random(70, 33, dtype=dtype)
        dots = t.random(140)
        t.call("permute_rows", moved, rows, dtype, 33, 140, slots, weight, 2)
        t.call("combine_rows", joined, rows, dtype, 33, 70, 2, slots, weight)
        t.call("dot_rows", dots, rows, grad, dtype, 33, 70, 2, slots)
        groups, outs = [], []
        for m, n, k in ((70, 33, 17), (0, 4, 4), (5, 70, 1)):
            a, b, bias = (t.random(*size, dtype=dtype, seed=7) for size in ((m, k), (n, k), (n,)))
            outs.append(t.random(m, n, dtype=dtype))
            groups.append(GemmGroup(a.data_ptr(), b.data_ptr(), bias.data_ptr(), outs[-1].data_ptr(), m, n, k))
        t.call("grouped_gemm", (GemmGroup * 3)(*groups), 3, GemmForm(False, True), dtype)
        yield f"rows and products {dtype}", [moved, joined, dots, *outs]


def _blocks(t):
    """A layout of 3 x 3 blocks of 16 tokens, the same for all heads, as lists of queries and of keys."""
    lists = [t.make(torch.tensor(one, dtype=torch.int32)) for one in ([0, 2, 3, 5], [0, 1, 1, 0, 2], [0, 2, 4, 5])]
    readers = t.make(torch.tensor([0, 2, 0, 1, 2], dtype=torch.int32))
    found = [*lists, readers]
    first, numbers, last, others = [one.data_ptr() for one in found]
    return Blocks(16, first, numbers, 0, last, others, 0), found


def _attention(t):
    blocks, lists = _blocks(t)
    for dtype in DTYPES:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        number = DTYPES.index(dtype)
        shape = Shape(number, 2, 4, 2, 37, 41, 24, 16, 0.2, 5.0, True, 3, 0, None, 0, 0, Dropout(7, 1 << 30, 4 / 3))
        query, grad = t.random(2, 4, 37, 24, dtype=dtype, seed=1), t.random(2, 4, 37, 16, dtype=dtype, seed=2)
        key, value = t.random(2, 2, 41, 24, dtype=dtype, seed=3), t.random(2, 2, 41, 16, dtype=dtype, seed=4)
        q, k, v, g = (Operand(one.data_ptr(), *one.stride()[:3]) for one in (query, key, value, grad))
        states = [[t.random(2, 4, 37, size, dtype=wide, seed=size).abs_() for size in (1, 1, 16)] for _ in range(2)]
        own = [State(*[one.data_ptr() for one in state]) for state in states]
        t.call("forward", shape, q, k, v, own[0], True)
        t.call("merge", own[0], own[1], wide, 2 * 4 * 37, 16)
        lse, row_sum = t.random(2, 4, 37, dtype=wide, seed=5).add_(5), t.random(2, 4, 37, dtype=wide, seed=6)
        found = [torch.zeros_like(one, dtype=wide) for one in (query, key, value)]
        t.call("backward", shape, q, k, v, g, lse, row_sum, *found)
        shape.blocks = blocks
        bias, more = t.random(2, 4, 37, 41, dtype=dtype, seed=7), t.random(41, dtype=wide, seed=8)
        shape.biases[0] = Bias(bias.data_ptr(), number, 2, 0, *bias.stride())
        shape.biases[1] = Bias(more.data_ptr(), DTYPES.index(wide), 2, 0, 0, 0, 0, 1)
        for which, one in enumerate((bias, more)):
            found.append(torch.zeros_like(one, dtype=wide))
            t.call("bias_backward", shape, q, k, v, g, lse, row_sum, which, found[-1])
        yield f"attention {dtype}", [*states[0], *found, *lists]
