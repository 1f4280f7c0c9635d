"""The pickle machine, with nothing in it that runs code (the opcodes: pickletools of Python's library).

Pickle's own Unpickler asks about names and then calls whatever it was given: with arguments from the file, through
``__setstate__`` found on instances, with attributes set on classes. This one calls nothing but the functions of a table
(``deepspeed.utils.pickle_table``), touches only containers that it made, and bounds what a short file can ask for.
"""

import codecs
import collections
import enum
import pickle
import struct

_MARK = object()
_LONGEST_LINE = 4000  # characters of a decimal number: longer ones take quadratic time
_KEY_NODES = 4096  # a key is hashed: nested tuples that share parts would take exponential time
_KEY_DEPTH = 64
# Freed one inside the other without a guard against recursion: deeper ones would end the interpreter's stack.
_MOST_UNGUARDED = 4096
_PLAIN_KEYS = (str, int, float, bool, bytes, complex, type(None))


class RefusedClass(pickle.UnpicklingError):
    """A pickle names something that could run code. ``name`` is what, ``path`` the file."""

    def __init__(self, name, path="the file"):
        self.name, self.path = name, path
        super().__init__(name, path)

    def __str__(self):
        return (
            f"{self.path} contains {self.name}, which is neither a tensor nor plain data, and loading it could run "
            f"code. If you trust the file, let this name through with allow=[{self.name!r}], or everything with the "
            f'configuration {{"checkpoint": {{"trust_pickles": true}}}} or the environment variable '
            f"DS_CHECKPOINT_TRUST=1."
        )


class Machine:
    """Runs one pickle out of ``data`` (bytes-like) from ``position`` on; afterwards ``position`` is behind its end.

    find(module, name): the value of a global, or RefusedClass.
    call(function, arguments), make(cls, arguments, keywords), build(value, state): REDUCE, NEWOBJ, BUILD.
    persistent(id): what a persistent id stands for.
    """

    def __init__(self, data, table, persistent, position=0):
        self.data, self.table, self.persistent, self.position = memoryview(data), table, persistent, position
        self.stack, self.memo, self.unguarded = [], {}, 0

    def run(self):
        """The object. pickle.UnpicklingError for anything that is no pickle of plain data."""
        codes, data = _CODES, self.data
        try:
            while True:
                code = data[self.position]
                self.position += 1
                if code == 0x2E:  # STOP
                    value = self.stack.pop()
                    if value is _MARK:
                        raise ValueError("a mark is left")
                    return value
                codes[code](self)
        except pickle.UnpicklingError:
            raise
        except (MemoryError, RecursionError) as error:
            raise pickle.UnpicklingError(f"the pickle asks for too much at byte {self.position}") from error
        except KeyError as error:
            raise pickle.UnpicklingError(f"damaged pickle at byte {self.position}: no {error}") from error
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
                struct.error) as error:  # fmt: skip
            raise pickle.UnpicklingError(f"damaged pickle at byte {self.position}: {error}") from error

    # ---- reading -------------------------------------------------------------------------------------------------
    def take(self, size):
        start, end = self.position, self.position + size
        if size < 0 or end > len(self.data):
            raise pickle.UnpicklingError(f"the pickle is cut off: {size} bytes wanted at byte {start}")
        self.position = end
        return self.data[start:end]

    def number(self, form):
        size = struct.calcsize(form)
        return struct.unpack(form, self.take(size))[0]

    def line(self, longest=1 << 20):
        end = self.position
        limit = min(len(self.data), self.position + longest)
        while end < limit and self.data[end] != 0x0A:
            end += 1
        if end == limit:
            raise ValueError("a line without end")
        found = bytes(self.data[self.position : end])
        self.position = end + 1
        return found

    def text(self, size):
        return str(self.take(size), "utf-8", "surrogatepass")

    # ---- the stack -----------------------------------------------------------------------------------------------
    def push(self, value):
        self.stack.append(value)

    def pop(self):
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a value is missing")
        return value

    def top(self):
        value = self.stack[-1]
        if value is _MARK:
            raise ValueError("a value is missing")
        return value

    def since_mark(self):
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a mark is missing")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    # ---- containers ----------------------------------------------------------------------------------------------
    def count_unguarded(self, value):
        """Bounds the containers that Python frees recursively."""
        if isinstance(value, (collections.deque, collections.defaultdict)):
            self.unguarded += 1
            if self.unguarded > _MOST_UNGUARDED:
                raise ValueError(f"more than {_MOST_UNGUARDED} deques and defaultdicts")
        return value

    def append(self, target, items):
        if isinstance(target, list):
            list.extend(target, items)
        elif isinstance(target, collections.deque):
            collections.deque.extend(target, items)
        elif not self.table.append(target, items):
            raise TypeError(f"items for a {type(target).__name__}")

    def set_items(self, target, items):
        if len(items) % 2:
            raise ValueError("a key without a value")
        if isinstance(target, collections.OrderedDict):
            put = collections.OrderedDict.__setitem__
        elif isinstance(target, dict):
            put = dict.__setitem__
        elif self.table.trusts(type(target)):
            put = type(target).__setitem__
        else:
            raise TypeError(f"keys for a {type(target).__name__}")
        for at in range(0, len(items), 2):
            check_key(items[at])
            put(target, items[at], items[at + 1])

    def add_items(self, target, items):
        if not isinstance(target, set):
            raise TypeError(f"members for a {type(target).__name__}")
        for item in items:
            check_key(item)
            set.add(target, item)

    def reduce(self, function, arguments):
        if type(arguments) is not tuple:
            raise TypeError(f"arguments in a {type(arguments).__name__}")
        self.push(self.count_unguarded(self.table.call(function, arguments)))

    def new(self, cls, arguments, keywords=None):
        if type(arguments) is not tuple or (keywords is not None and type(keywords) is not dict):
            raise TypeError("arguments that are no tuple")
        self.push(self.count_unguarded(self.table.make(cls, arguments, keywords or {})))


def check_key(key):
    """ValueError unless hashing and comparing ``key`` is cheap and runs nobody's code."""
    if type(key) in _PLAIN_KEYS:
        return
    nodes, level = 0, [key]
    for _ in range(_KEY_DEPTH):
        following = []
        for item in level:
            if isinstance(item, (tuple, frozenset)):
                nodes += len(item)
                if nodes > _KEY_NODES:
                    raise ValueError("a key of too many parts")
                following.extend(item)
            kind = type(item)
            if isinstance(item, enum.Enum):
                continue
            if type(kind.__hash__).__name__ not in ("wrapper_descriptor", "NoneType"):
                raise ValueError(f"a key of type {kind.__name__}")
        level = following
        if not level:
            return
    raise ValueError("a key that is nested too deeply")


# ---- the opcodes ---------------------------------------------------------------------------------------------------
_CODES = {}


def _code(byte):
    def register(function):
        _CODES[byte[0]] = function
        return function

    return register


def _constant(byte, make):
    _CODES[byte[0]] = lambda m: m.stack.append(make())


def _value(byte, read):
    _CODES[byte[0]] = lambda m: m.stack.append(read(m))


def _long(m, form):
    return int.from_bytes(m.take(m.number(form)), "little", signed=True)


def _decimal_line(m):
    text = m.line(_LONGEST_LINE).decode("ascii")
    return {"00": False, "01": True}.get(text) if text in ("00", "01") else int(text.rstrip("L"))


def _quoted(m):
    text = m.line(1 << 30)
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise ValueError("a string without quotes")
    return codecs.escape_decode(text[1:-1])[0].decode("utf-8")


def _bytes_of(m, form):
    return bytes(m.take(m.number(form)))


for _byte, _make in ((b"N", lambda: None), (b"\x88", lambda: True), (b"\x89", lambda: False), (b"]", list),
                     (b"}", dict), (b")", tuple), (b"\x8f", set), (b"(", lambda: _MARK)):  # fmt: skip
    _constant(_byte, _make)
for _byte, _read in (
    (b"I", _decimal_line),
    (b"L", _decimal_line),
    (b"J", lambda m: m.number("<i")),
    (b"K", lambda m: m.number("<B")),
    (b"M", lambda m: m.number("<H")),
    (b"\x8a", lambda m: _long(m, "<B")),
    (b"\x8b", lambda m: _long(m, "<i")),
    (b"F", lambda m: float(m.line(_LONGEST_LINE))),
    (b"G", lambda m: m.number(">d")),
    (b"S", _quoted),
    (b"T", lambda m: _bytes_of(m, "<i").decode("utf-8")),
    (b"U", lambda m: _bytes_of(m, "<B").decode("utf-8")),
    (b"V", lambda m: str(m.line(1 << 30), "raw-unicode-escape")),
    (b"X", lambda m: m.text(m.number("<I"))),
    (b"\x8c", lambda m: m.text(m.number("<B"))),
    (b"\x8d", lambda m: m.text(m.number("<Q"))),
    (b"B", lambda m: _bytes_of(m, "<I")),
    (b"C", lambda m: _bytes_of(m, "<B")),
    (b"\x8e", lambda m: _bytes_of(m, "<Q")),
    (b"\x96", lambda m: bytearray(m.take(m.number("<Q")))),
    (b"h", lambda m: m.memo[m.number("<B")]),
    (b"j", lambda m: m.memo[m.number("<I")]),
    (b"g", lambda m: m.memo[int(m.line(32))]),
    (b"2", lambda m: m.top()),
    (b"t", lambda m: tuple(m.since_mark())),
    (b"l", lambda m: m.since_mark()),
    (b"\x85", lambda m: (m.pop(),)),
    (b"Q", lambda m: m.persistent(m.pop())),
):
    _value(_byte, _read)


@_code(b"\x80")
def _protocol(m):
    version = m.number("<B")
    if version > pickle.HIGHEST_PROTOCOL:
        raise ValueError(f"protocol {version}")


@_code(b"\x95")
def _frame(m):
    size = m.number("<Q")
    if size > len(m.data) - m.position:
        raise ValueError("a frame is cut off")


@_code(b"0")
def _pop(m):
    m.stack.pop()


@_code(b"1")
def _pop_mark(m):
    m.since_mark()


@_code(b"\x86")
def _tuple2(m):
    b, a = m.pop(), m.pop()
    m.push((a, b))


@_code(b"\x87")
def _tuple3(m):
    c, b, a = m.pop(), m.pop(), m.pop()
    m.push((a, b, c))


@_code(b"p")
def _put(m):
    m.memo[int(m.line(32))] = m.top()


@_code(b"q")
def _binput(m):
    m.memo[m.number("<B")] = m.top()


@_code(b"r")
def _long_binput(m):
    m.memo[m.number("<I")] = m.top()


@_code(b"\x94")
def _memoize(m):
    m.memo[len(m.memo)] = m.top()


@_code(b"d")
def _dict(m):
    items, made = m.since_mark(), {}
    m.set_items(made, items)
    m.push(made)


@_code(b"\x91")
def _frozenset(m):
    items = m.since_mark()
    for item in items:
        check_key(item)
    m.push(frozenset(items))


@_code(b"a")
def _append(m):
    item = m.pop()
    m.append(m.top(), [item])


@_code(b"e")
def _appends(m):
    items = m.since_mark()
    m.append(m.top(), items)


@_code(b"s")
def _set_item(m):
    value, key = m.pop(), m.pop()
    m.set_items(m.top(), [key, value])


@_code(b"u")
def _set_items(m):
    items = m.since_mark()
    m.set_items(m.top(), items)


@_code(b"\x90")
def _add_items(m):
    items = m.since_mark()
    m.add_items(m.top(), items)


@_code(b"c")
def _global(m):
    module, name = m.line().decode("utf-8"), m.line().decode("utf-8")
    m.push(m.table.find(module, name))


@_code(b"\x93")
def _stack_global(m):
    name, module = m.pop(), m.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError("a global whose name is no text")
    m.push(m.table.find(module, name))


@_code(b"R")
def _reduce(m):
    arguments, function = m.pop(), m.pop()
    m.reduce(function, arguments)


@_code(b"\x81")
def _newobj(m):
    arguments, cls = m.pop(), m.pop()
    m.new(cls, arguments)


@_code(b"\x92")
def _newobj_ex(m):
    keywords, arguments, cls = m.pop(), m.pop(), m.pop()
    m.new(cls, arguments, keywords)


@_code(b"i")
def _inst(m):
    module, name = m.line().decode("utf-8"), m.line().decode("utf-8")
    cls = m.table.find(module, name)
    m.reduce(cls, tuple(m.since_mark()))


@_code(b"o")
def _obj(m):
    items = m.since_mark()
    if not items:
        raise ValueError("an object without a class")
    m.reduce(items[0], tuple(items[1:]))


@_code(b"b")
def _build(m):
    state = m.pop()
    m.table.build(m.top(), state)


def _refused_code(what):
    def refuse(m):
        raise pickle.UnpicklingError(f"{what} at byte {m.position} of the pickle: no checkpoint has these")

    return refuse


for _byte in (b"\x82", b"\x83", b"\x84"):
    _CODES[_byte[0]] = _refused_code("a code of the extension registry")
for _byte in (b"\x97", b"\x98"):
    _CODES[_byte[0]] = _refused_code("a buffer outside of the file")
_CODES[b"P"[0]] = _refused_code("a persistent id in words")
