"""Files that a reader of checkpoints must survive: each is an attack of its own, built byte by byte.

``ATTACKS``: name -> function that makes the file's bytes. Run as a script, it reads the paths in its arguments one
after the other under an audit hook and prints for each what happened, as JSON.
"""

import io
import json
import os
import pickle
import resource
import struct
import sys
import time
import zipfile
import zlib

MARK = "ds_hostile_mark"
COMMAND = f"touch {MARK}"
ATTACKS = {}


def attack(function):
    ATTACKS[function.__name__] = function
    return function


# ---- building blocks -----------------------------------------------------------------------------------------------
def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def value(item):
    """The opcodes of plain data, without protocol and STOP."""
    if isinstance(item, Raw):
        return item.code
    if isinstance(item, tuple):
        return b"(" + b"".join(map(value, item)) + b"t"
    if isinstance(item, list):
        return b"](" + b"".join(map(value, item)) + b"e"
    if isinstance(item, dict):
        return b"}(" + b"".join(value(k) + value(v) for k, v in item.items()) + b"u"
    if isinstance(item, bytes):
        return b"B" + struct.pack("<I", len(item)) + item
    if isinstance(item, str):
        return text(item)
    if isinstance(item, (bool, float, type(None))):
        return pickle.dumps(item, 2)[2:-1]
    data = item.to_bytes(item.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(data)) + data


class Raw:
    def __init__(self, code):
        self.code = code


def call(module, attribute, *arguments):
    return Raw(name(module, attribute) + value(tuple(arguments)) + b"R")


def zipped(structure, records=()):
    """A file of torch.save with this structure."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        code = structure.code if isinstance(structure, Raw) else structure
        archive.writestr("archive/data.pkl", b"\x80\x02" + code + b".")
        for key, data in dict(records).items():
            archive.writestr(f"archive/{key}", data)
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def storage(key="0", kind="FloatStorage", numel=4, location="cpu"):
    return Raw(value(("storage", Raw(name("torch", kind)), key, location, numel)) + b"Q")


def tensor(offset=0, size=(4,), stride=(1,), stored=None):
    empty = call("collections", "OrderedDict")
    return call("torch._utils", "_rebuild_tensor_v2", stored or storage(), offset, size, stride, False, empty)


def with_tensor(*arguments, **options):
    return zipped(tensor(*arguments, **options), {"data/0": bytes(16)})


def calls(title, module, attribute, *arguments):
    ATTACKS[title] = lambda: zipped(call(module, attribute, *arguments))


STAGE = Raw(name("deepspeed.runtime.zero.config", "ZeroStageEnum"))
FROM_TYPE = Raw(name("torch._tensor", "_rebuild_from_type_v2"))


# ---- functions that run something ----------------------------------------------------------------------------------
for _title, _module, _attribute, *_arguments in (
    ("os_system", "os", "system", COMMAND),
    ("posix_system", "posix", "system", COMMAND),
    ("nt_system", "nt", "system", COMMAND),
    ("eval", "builtins", "eval", f"__import__('os').system({COMMAND!r})"),
    ("exec", "builtins", "exec", f"__import__('os').system({COMMAND!r})"),
    ("eval_of_python_2", "__builtin__", "eval", f"__import__('os').system({COMMAND!r})"),
    ("compile", "builtins", "compile", "1", "x", "eval"),
    ("import", "builtins", "__import__", "os"),
    ("open", "builtins", "open", MARK, "w"),
    ("print", "builtins", "print", "x"),
    ("type", "builtins", "type", "X", (Raw(name("builtins", "dict")),), {}),
    ("popen", "subprocess", "Popen", ["touch", MARK]),
    ("check_output", "subprocess", "check_output", ["touch", MARK]),
    ("partial", "functools", "partial", Raw(name("builtins", "dict"))),
    ("reduce", "functools", "reduce", Raw(name("builtins", "dict")), []),
    ("attrgetter", "operator", "attrgetter", "__class__"),
    ("methodcaller", "operator", "methodcaller", "system", COMMAND),
    ("map", "builtins", "map", Raw(name("builtins", "int")), ["1"]),
    ("torch_load", "torch", "load", "other.pt"),
    ("torch_serialization_load", "torch.serialization", "load", "other.pt"),
    ("torch_hub", "torch.hub", "load", "user/repository", "model"),
    ("torch_jit", "torch.jit", "load", "other.pt"),
    ("storage_from_bytes", "torch.storage", "_load_from_bytes", pickle.dumps(1)),
    ("torch_import", "torch._utils", "_import_dotted_name", "os.system"),
    ("numpy_load", "numpy", "load", "other.npy", None, True),
    ("numpy_fromfile", "numpy", "fromfile", "/etc/passwd"),
    ("numpy_runstring", "numpy.testing._private.utils", "runstring", "1", {}),
    ("ctypes_library", "ctypes", "CDLL", "libc.so.6"),
    ("import_module", "importlib", "import_module", "antigravity"),
    ("run_path", "runpy", "run_path", "other.py"),
    ("loads", "pickle", "loads", pickle.dumps(1)),
    ("function", "types", "FunctionType"),
    ("pty", "pty", "spawn", "/bin/sh"),
    ("webbrowser", "webbrowser", "open", "http://localhost"),
    ("timeit", "timeit", "timeit", f"__import__('os').system({COMMAND!r})"),
    ("pdb", "pdb", "run", "1"),
    ("profile", "cProfile", "run", "1"),
    ("doctest", "doctest", "debug_script", "1"),
    ("add_extension", "copyreg", "add_extension", "os", "system", 7),
    ("newobj_function", "copyreg", "__newobj__", Raw(name("builtins", "dict"))),
    ("breakpoint", "builtins", "breakpoint"),
    ("memoryview", "builtins", "memoryview", b"x"),
    ("property", "builtins", "property"),
    ("linear", "torch.nn.modules.linear", "Linear", 1, 1),
    ("never_imported", "antigravity", "fly"),
    ("from_type_of_a_function", "torch._tensor", "_rebuild_from_type_v2", Raw(name("builtins", "dict")),
     Raw(name("torch", "Tensor")), (), {}),
    ("from_type_of_itself", "torch._tensor", "_rebuild_from_type_v2", FROM_TYPE, Raw(name("torch", "Tensor")), (), {}),
    ("reconstructor_of_a_foreign_class", "copyreg", "_reconstructor", Raw(name("subprocess", "Popen")),
     Raw(name("builtins", "object")), None),
    ("reconstructor_of_object", "copyreg", "_reconstructor", Raw(name("builtins", "object")),
     Raw(name("builtins", "object")), None),
    ("getattr_of_a_class", "builtins", "getattr", Raw(name("builtins", "dict")), "__class__"),
    ("getattr_of_an_enum", "builtins", "getattr", STAGE, "__init__"),
    ("getattr_of_a_module", "builtins", "getattr", Raw(name("torch", "_utils")), "sys"),
    ("dotted_into_a_module", "torch", "serialization.os.system", COMMAND),
    ("dotted_into_a_class", "collections", "OrderedDict.__init__"),
    ("dotted_to_subclasses", "builtins", "dict.__class__.__subclasses__"),
    ("name_of_a_module", "torch", "os", COMMAND),
    ("a_class_with_its_own_say", "__main__", "OwnSay"),
    ("a_class_that_is_freed", "__main__", "Freed"),
    ("a_lazy_module", "lazy_module", "anything"),
):  # fmt: skip
    calls(_title, _module, _attribute, *_arguments)


# ---- other ways to call ----------------------------------------------------------------------------------------------
ATTACKS.update(
    {
        "inst": lambda: zipped(b"(" + text(COMMAND) + b"ios\nsystem\n"),
        "obj": lambda: zipped(b"(" + name("os", "system") + text(COMMAND) + b"o"),
        "newobj": lambda: zipped(name("subprocess", "Popen") + value((["touch", MARK],)) + b"\x81"),
        "newobj_ex": lambda: zipped(
            name("subprocess", "Popen") + value(()) + value({"args": ["touch", MARK]}) + b"\x92"
        ),
        "newobj_of_a_tensor": lambda: zipped(name("torch", "Tensor") + value(()) + b"\x81"),
        "stack_global": lambda: zipped(text("os") + text("system") + b"\x93" + value((COMMAND,)) + b"R"),
    }
)


@attack
def stack_global_out_of_the_memo():
    hidden = text("sys" + "tem") + b"q\x01" + b"0" + text("o" + "s") + b"q\x02" + b"0"
    return zipped(hidden + b"h\x02h\x01\x93" + value((COMMAND,)) + b"R")


@attack
def stack_global_of_no_text():
    return zipped(value(1) + value(2) + b"\x93")


@attack
def memo_that_changes_its_mind():
    code = name("builtins", "dict") + b"q\x010" + name("os", "system") + b"q\x010h\x01" + value((COMMAND,)) + b"R"
    return zipped(code)


ATTACKS.update(
    {
        "memo_of_nothing": lambda: zipped(b"j\xff\xff\xff\x7f"),
        "reduce_of_a_string": lambda: zipped(text("os.system") + value((COMMAND,)) + b"R"),
        "reduce_of_a_dtype": lambda: zipped(name("torch", "float32") + value(()) + b"R"),
        "arguments_in_a_list": lambda: zipped(name("builtins", "dict") + value([1]) + b"R"),
    }
)


for _size, _code in ((1, b"\x82\x07"), (2, b"\x83\x07\x00"), (4, b"\x84\x07\x00\x00\x00")):
    ATTACKS[f"extension_{_size}"] = lambda code=_code: zipped(code + value((COMMAND,)) + b"R")
ATTACKS.update(
    {
        "buffers": lambda: zipped(b"\x97\x98"),
        "persistent_id_in_words": lambda: zipped(b"Pos.system\n"),
        "unknown_opcode": lambda: zipped(b"\xf0"),
        "protocol_99": lambda: zipped(b"\x80\x63N"),
        "nothing_on_the_stack": lambda: zipped(b""),
        "a_mark_as_value": lambda: zipped(b"("),
        "pop_of_nothing": lambda: zipped(b"0000"),
        "mark_missing": lambda: zipped(b"Nt"),
    }
)


# ---- state -----------------------------------------------------------------------------------------------------------
SCALER = name("deepspeed.runtime.fp16.loss_scaler", "LossScaler")


def built(target, state):
    return zipped(target + value(state) + b"b")


for _title, _target, _state in (
    ("setstate_on_an_instance", SCALER + b")\x81", {"__setstate__": Raw(name("builtins", "dict"))}),
    ("class_of_an_instance", SCALER + b")\x81", {"__class__": Raw(name("builtins", "dict"))}),
    ("a_method_replaced", SCALER + b")\x81", {"update_scale": Raw(name("builtins", "dict"))}),
    ("a_property_replaced", SCALER + b")\x81", {"loss_scale": 3}),
    ("slots_of_an_instance", SCALER + b")\x81", (None, {"__reduce__": Raw(name("builtins", "dict"))})),
    ("state_of_no_dict", SCALER + b")\x81", [1, 2]),
    ("state_on_a_class", SCALER, {"x": 1}),
    ("slots_on_a_class", SCALER, (None, {"update_scale": Raw(name("builtins", "dict"))})),
    ("state_on_a_function", name("torch._utils", "_rebuild_tensor_v2"), (None, {"__code__": 1})),
    ("state_on_an_enum_member", name("deepspeed.runtime.zero.config", "ZeroStageEnum") + value((3,)) + b"R", {"x": 1}),
    ("state_on_a_dtype", name("torch", "float32"), {"x": 1}),
    ("a_method_of_a_mapping", name("collections", "OrderedDict") + b")R", {"items": Raw(name("builtins", "dict"))}),
    ("a_factory_by_state", name("collections", "defaultdict") + b")R", (None, {"default_factory": SCALER})),
    ("state_on_a_list", b"]", {"append": 1}),
    ("state_of_a_uuid", name("uuid", "UUID") + b")\x81", {"int": -1}),
    ("state_of_a_generator", name("torch", "Generator") + b")R", (1, 2, "x")),
):
    ATTACKS[_title] = lambda target=_target, state=_state: built(target, state)

ATTACKS.update(
    {
        "factory_that_runs": lambda: zipped(
            call("collections", "defaultdict", Raw(name("torch._utils", "_rebuild_tensor_v2")))
        ),
        "factory_of_tensors": lambda: zipped(call("collections", "defaultdict", Raw(name("torch", "Tensor")))),
        "append_to_a_class": lambda: zipped(SCALER + value(1) + b"a"),
        "item_of_a_tuple": lambda: zipped(b")" + value(1) + value(2) + b"s"),
        "member_of_a_dict": lambda: zipped(b"}(" + value(1) + b"\x90"),
        "key_without_value": lambda: zipped(b"}(" + value(1) + b"u"),
    }
)


# ---- numpy -----------------------------------------------------------------------------------------------------------
def dtype(code="f8", state=(3, "<", None, None, None, -1, -1, 0)):
    return Raw(call("numpy", "dtype", code, False, True).code + value(state) + b"b")


def array(shape, data, kind=None):
    core = call("numpy.core.multiarray", "_reconstruct", Raw(name("numpy", "ndarray")), (0,), b"b")
    return core.code + value((1, shape, kind or dtype(), False, data)) + b"b"


ATTACKS.update(
    {
        "array_of_objects": lambda: zipped(array((1,), [call("os", "system", COMMAND)], dtype("O"))),
        "array_of_objects_in_bytes": lambda: zipped(array((1,), bytes(8), dtype("O8"))),
        "array_with_object_fields": lambda: zipped(array((1,), bytes(8), dtype("O,i8"))),
        "array_too_large": lambda: zipped(array((1 << 60,), bytes(8))),
        "array_of_negative_size": lambda: zipped(array((-1,), bytes(8))),
        "array_of_overflowing_size": lambda: zipped(array((1 << 32, 1 << 32), b"")),
        "dtype_that_is_a_pointer": lambda: zipped(
            array((1,), bytes(8), dtype("f8", (3, "<", None, ("a",), {"a": (dtype("O"), 0)}, 8, 1, 0)))
        ),
        "dtype_that_grows": lambda: zipped(
            dtype("S8", (3, "|", None, None, None, 8, 1, 0)).code
            + b"q\x05"
            + array((1,), bytes(8), Raw(b"h\x05"))
            + b"h\x05"
            + value((3, "|", None, None, None, 1 << 19, 1, 0))
            + b"b\x86"
        ),
        "scalar_of_an_object": lambda: zipped(call("numpy.core.multiarray", "scalar", dtype("O"), pickle.dumps(1))),
    }
)


# ---- tensors outside of their storage --------------------------------------------------------------------------------
for _title, _options in {
    "offset_outside": {"offset": 4},
    "offset_far_outside": {"offset": 1 << 62},
    "offset_negative": {"offset": -1},
    "offset_no_number": {"offset": "0"},
    "size_outside": {"size": (5,)},
    "size_negative": {"size": (-4,)},
    "size_overflows": {"size": (1 << 32, 1 << 32), "stride": (1, 1)},
    "size_of_more_than_64_bits": {"size": (1 << 80,)},
    "stride_outside": {"size": (2,), "stride": (4,)},
    "stride_negative": {"offset": 3, "stride": (-1,)},
    "stride_overflows": {"size": (3,), "stride": (1 << 62,)},
    "stride_missing": {"size": (2, 2), "stride": (1,)},
    "expanded_without_end": {"size": (1 << 50,), "stride": (0,)},
}.items():
    ATTACKS[_title] = lambda options=_options: with_tensor(**options)
for _title, _stored in {
    "storage_larger_than_its_record": storage(numel=5),
    "storage_of_huge_numel": storage(numel=1 << 61),
    "storage_of_negative_numel": storage(numel=-1),
    "storage_without_record": storage(key="7"),
    "storage_outside_of_the_archive": storage(key="../../etc/passwd"),
    "storage_of_no_kind": Raw(value(("storage", Raw(name("builtins", "dict")), "0", "cpu", 4)) + b"Q"),
    "persistent_id_of_another_kind": Raw(value(("module", "os", "0", "cpu", 4)) + b"Q"),
    "persistent_id_of_a_class": Raw(name("builtins", "dict") + b"Q"),
    "storage_that_is_a_list": Raw(value([1, 2, 3, 4])),
}.items():
    ATTACKS[_title] = lambda stored=_stored: with_tensor(stored=stored)


@attack
def storage_of_two_kinds():
    both = value(tensor()) + value(tensor(stored=storage(kind="DoubleStorage", numel=2), size=(2,)))
    return zipped(both + b"\x86", {"data/0": bytes(16)})


@attack
def parameter_with_hooks():
    hooks = {1: Raw(name("builtins", "dict"))}
    return zipped(call("torch._utils", "_rebuild_parameter", tensor(), True, hooks), {"data/0": bytes(16)})


@attack
def sparse_outside():
    indices = tensor(stored=storage("1", "LongStorage", 1), size=(1, 1), stride=(1, 1))
    values = tensor(size=(1,))
    layout = call("torch.serialization", "_get_layout", "torch.sparse_coo")
    code = call("torch._utils", "_rebuild_sparse_tensor", layout, (indices, values, (4,)))
    return zipped(code, {"data/0": bytes(16), "data/1": struct.pack("<q", 1 << 40)})


# ---- sizes and recursion ---------------------------------------------------------------------------------------------
for _title, _code in {
    "bytes_of_an_exabyte": b"\x8e" + struct.pack("<Q", 1 << 60),
    "bytes_of_more_than_64_bits": b"\x8e" + b"\xff" * 8,
    "text_of_an_exabyte": b"\x8d" + struct.pack("<Q", 1 << 60),
    "bytearray_of_an_exabyte": b"\x96" + struct.pack("<Q", 1 << 60),
    "number_of_a_gigabyte": b"\x8b" + struct.pack("<i", 1 << 30),
    "number_of_negative_length": b"\x8b" + struct.pack("<i", -1),
    "frame_of_an_exabyte": b"\x95" + struct.pack("<Q", 1 << 60),
    "number_in_decimals": b"L" + b"9" * 1000000 + b"L\n",
    "line_without_end": b"I" + b"9" * 1000,
    "nested_tuples_as_key": b"}" + b")" + b"\x85" * 200000 + b"Ns",
    "laughing_tuples_as_key": b"}" + b")" + b"q\x01h\x01\x86" * 80 + b"Ns",
    "laughing_set": b"\x8f(" + b")" + b"q\x01h\x01\x86" * 80 + b"\x90",
    "nested_frozensets": b"((t"
    + b"".join([b"q\x010(h\x01\x91"] * 0)
    + b"\x91"
    + b"".join([b"q\x010(h\x01\x91"] * 9999),
}.items():
    ATTACKS[_title] = lambda code=_code: zipped(code)
ATTACKS.update(
    {
        "bytearray_of_a_terabyte": lambda: zipped(call("builtins", "bytearray", 1 << 40)),
        "bytes_of_a_terabyte": lambda: zipped(call("builtins", "bytes", 1 << 40)),
        "list_of_a_range": lambda: zipped(call("builtins", "list", call("builtins", "range", 1 << 40))),
        "set_of_a_range": lambda: zipped(call("builtins", "set", call("builtins", "range", 1 << 40))),
        "range_of_huge_numbers": lambda: zipped(call("builtins", "range", 1 << 90)),
        "fraction_with_an_exponent": lambda: zipped(call("fractions", "Fraction", "1e999999999")),
        "int_of_long_text": lambda: zipped(call("builtins", "int", "9" * 1000000)),
        "text_of_an_object": lambda: zipped(call("builtins", "str", [1])),
        "size_of_no_numbers": lambda: zipped(call("torch", "Size", ["x"])),
        "device_of_nothing": lambda: zipped(call("torch", "device", "tpu:99999999999999")),
        "nested_deques": lambda: zipped(
            name("collections", "deque") + b"q\x00)R" + b"".join([b"q\x010h\x00)Rh\x01a"] * 100000)
        ),
        "nested_defaultdicts": lambda: zipped(
            name("collections", "defaultdict") + b"q\x00)R" + b"".join([b"q\x010h\x00)RNh\x01s"] * 100000)
        ),
    }
)


@attack
def copies_of_a_list():
    copy = name("builtins", "list") + b"q\x000"
    return zipped(copy + b"](" + b"N" * 1000000 + b"eq\x010(" + b"h\x00h\x01\x85R" * 100000 + b"l")


@attack
def copies_of_bytes():
    copy = name("builtins", "bytearray") + b"q\x000"
    return zipped(copy + value(bytes(1000000)) + b"q\x010(" + b"h\x00h\x01\x85R" * 100000 + b"l")


@attack
def copies_of_an_array():
    data = name("numpy.core.multiarray", "_reconstruct") + b"q\x000" + value(bytes(1000000)) + b"q\x010"
    one = b"h\x00" + value((Raw(name("numpy", "ndarray")), (0,), b"b")) + b"R"
    one += value((1, (1000000,), Raw(b"h\x02"), False, Raw(b"h\x01"))) + b"b"
    kind = dtype("u1", (3, "|", None, None, None, -1, -1, 0)).code + b"q\x020"
    return zipped(data + kind + b"(" + one * 20000 + b"l")


# ---- zip files that lie ----------------------------------------------------------------------------------------------
def raw_zip(entries, directory_offset=None, count=None, tail=b""):
    """entries: dicts name, data, and what to lie about: method, flags, size, packed, header, local_name, extra."""
    file, directory = io.BytesIO(), b""
    for entry in entries:
        data, header = entry["data"], file.tell()
        packed, size = entry.get("packed", len(data)), entry.get("size", len(data))
        method, flags, checksum = entry.get("method", 0), entry.get("flags", 0), zlib.crc32(data)
        local, known = entry.get("local_name", entry["name"]).encode(), entry["name"].encode()
        extra = entry.get("extra", b"")
        sizes = (checksum, min(packed, 0xFFFFFFFF), min(size, 0xFFFFFFFF))
        file.write(struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, flags, method, 0, 0, *sizes, len(local), len(extra)))
        file.write(local + extra + data)
        wide = entry.get("wide", b"")
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\x01\x02", 20, 20, flags, method, 0, 0, *sizes, len(known), len(wide), 0, 0, 0, 0,
            entry.get("header", header),
        ) + known + wide  # fmt: skip
    start, count = file.tell(), len(entries) if count is None else count
    offset = start if directory_offset is None else directory_offset
    file.write(directory + tail)
    file.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(directory), offset, 0))
    return file.getvalue()


PLAIN = {"name": "archive/data.pkl", "data": b"\x80\x02" + tensor().code + b"."}
DATA = {"name": "archive/data/0", "data": bytes(16)}
WIDE = struct.pack("<2H3Q", 1, 24, 1 << 62, 1 << 62, 1 << 62)
EXABYTE = {"size": 1 << 40, "packed": 1 << 40, "header": 0xFFFFFFFF, "wide": WIDE}
for _title, _entries, _lies in (
    ("record_outside", [PLAIN, {**DATA, "header": 1 << 20}], {}),
    ("record_larger_than_the_file", [PLAIN, {**DATA, "size": 1 << 30, "packed": 1 << 30}], {}),
    (
        "record_of_an_exabyte",
        [PLAIN, {**DATA, "size": 1 << 40, "packed": 1 << 40, "header": 0xFFFFFFFF, "wide": WIDE}],
        {},
    ),
    ("records_overlap", [PLAIN, {**DATA, "header": 0}], {}),
    ("record_on_another", [PLAIN, {**DATA, "local_name": "archive/data/1"}], {}),
    ("record_runs_into_the_directory", [PLAIN, {**DATA, "extra": b"", "packed": 40, "size": 40}], {}),
    ("two_sizes", [PLAIN, {**DATA, "size": 1 << 20}], {}),
    ("encrypted", [PLAIN, {**DATA, "flags": 1}], {}),
    ("unknown_method", [PLAIN, {**DATA, "method": 99}], {}),
    ("name_twice", [PLAIN, DATA, DATA], {}),
    ("name_above", [PLAIN, {**DATA, "name": "archive/../../x"}], {}),
    ("name_from_the_root", [PLAIN, {**DATA, "name": "/etc/passwd"}], {}),
    ("two_structures", [PLAIN, DATA, {**PLAIN, "name": "other/data.pkl"}], {}),
    ("no_structure", [DATA], {}),
    ("directory_outside", [PLAIN, DATA], {"directory_offset": 1 << 30}),
    ("directory_of_65000_records", [PLAIN, DATA], {"count": 65000}),
    ("directory_of_fewer_bytes", [PLAIN, DATA], {"count": 3}),
    ("zip64_without_its_end", [PLAIN, DATA], {"count": 0xFFFF}),
    ("packed_a_million_times", [PLAIN, {**DATA, "method": 8, "size": 1 << 31}], {}),
    ("packed_structure", [{**PLAIN, "method": 8, "data": bytes(1 << 21), "size": 1 << 31}, DATA], {}),
    ("packed_garbage", [{**PLAIN, "method": 8, "data": b"\xff" * 64, "size": 128}, DATA], {}),
):
    ATTACKS[_title] = lambda entries=_entries, lies=_lies: raw_zip(entries, **lies)


ATTACKS.update(
    {
        "cut_off": lambda: with_tensor()[:-40],
        "torchscript": lambda: zipped(b"N", {"constants.pkl": b"\x80\x02N."}),
    }
)


# ---- the older format ------------------------------------------------------------------------------------------------
def legacy(structure, keys=("0",), sizes=(4,), data=bytes(16), magic=0x1950A86A20F9469CFC6C):
    parts = [value(magic), value(1001), value({"little_endian": True}), structure, value(list(keys))]
    written = b"".join(b"\x80\x02" + part + b"." for part in parts)
    return written + b"".join(struct.pack("<q", size) for size in sizes) + data


OLD = Raw(value(("storage", Raw(name("torch", "FloatStorage")), "0", "cpu", 4, None)) + b"Q")
ATTACKS.update(
    {
        "legacy_runs": lambda: legacy(call("os", "system", COMMAND).code),
        "legacy_magic_runs": lambda: b"\x80\x02" + call("os", "system", COMMAND).code + b".",
        "legacy_other_magic": lambda: legacy(tensor(stored=OLD).code, magic=7),
        "legacy_keys_run": lambda: legacy(tensor(stored=OLD).code, keys=(call("os", "system", COMMAND),)),
        "legacy_storage_missing": lambda: legacy(tensor(stored=OLD).code, keys=()),
        "legacy_other_key": lambda: legacy(tensor(stored=OLD).code, keys=("1",)),
        "legacy_other_size": lambda: legacy(tensor(stored=OLD).code, sizes=(1 << 60,)),
        "legacy_cut_off": lambda: legacy(tensor(stored=OLD).code, data=bytes(15)),
        "legacy_tensor_outside": lambda: legacy(tensor(stored=OLD, offset=1).code),
        "empty": lambda: b"",
        "text": lambda: b"version https://git-lfs.github.com/spec/v1\n",
        "tar": lambda: b"sys_info".ljust(512, b"\0") * 4,
    }
)


# ---- reading them ----------------------------------------------------------------------------------------------------
class OwnSay(dict):
    """Plain data but for one method."""

    def __setstate__(self, state):
        open(MARK, "w").close()


class Freed(dict):
    def __del__(self):
        open(MARK, "w").close()


LOUD = ("exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen",
        "ctypes.dlopen", "socket.connect", "urllib.Request", "pickle.find_class", "import", "marshal.loads",
        "shutil.rmtree", "os.remove", "os.rename")  # fmt: skip


def main(paths):
    sys.path.insert(0, os.environ["DS_PYTHON"])
    import deepspeed.runtime.fp16.loss_scaler  # noqa: PLC0415
    import deepspeed.runtime.zero.config  # noqa: F401, PLC0415
    from deepspeed.formats import standalone_reader, torch_archive  # noqa: PLC0415

    lazy = type(sys)("lazy_module")
    lazy.__getattr__ = lambda key: open(MARK, "w")
    sys.modules["lazy_module"] = lazy
    torch_archive.load(paths[0])  # what is imported and compiled on first use is not the attack's
    b"x".decode("cp437")  # zipfile's
    heard, listening = [], [False]

    def hear(event, arguments):
        if listening[0] and (
            event in LOUD or event == "open" and arguments[1] and set(str(arguments[1])) & set("wax+")
        ):
            heard.append(f"{event} {arguments!r}"[:200])

    sys.addaudithook(hear)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    standalone_reader.load(paths[0], True, False)
    for path in paths[1:]:
        for reader, lazily in (("package", False), ("package", True), ("standalone", True)):
            heard.clear()
            start, listening[0] = time.process_time(), True
            try:
                if reader == "package":
                    found = torch_archive.load(path, lazy=lazily)
                else:
                    found = standalone_reader.load(path, lazily, False)
                outcome = f"loaded {type(found).__name__}"
                del found
            except BaseException as error:  # noqa: B036
                outcome = " < ".join(cls.__module__ + "." + cls.__name__ for cls in type(error).__mro__)
                said = str(error)
            else:
                said = ""
            listening[0] = False
            print(json.dumps({"path": path, "reader": reader, "lazy": lazily, "outcome": outcome, "said": said,
                              "heard": heard, "seconds": time.process_time() - start}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
