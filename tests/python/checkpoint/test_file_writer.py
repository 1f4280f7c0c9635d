"""Files of torch.save: what torch.load gives back, on both torches, and what lies in the file."""

import collections
import dataclasses
import io
import itertools
import json
import os
import pickletools
import subprocess
import sys
import zipfile
import zlib

import pytest
import torch

from deepspeed.checkpoint.write import file_writer, verify
from deepspeed.checkpoint.write.file_writer import PreparedBytes, PreparedSafetensors, PreparedTorch, WriterOptions
from places import ROOT
from processes import run_after_torch, run_python
from refusals import refused

DTYPES = [
    getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 uint16 uint32 uint64 "
        "float8_e4m3fn float8_e5m2"
    ).split()
    if hasattr(torch, name)
]
NEW_DTYPES = {"uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"}
SMALL = WriterOptions(io_buffer_size=8192)


def random_tensor(dtype, *shape):
    """Random bits; of bool, random truths."""
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def assert_same_bits(found, expected):
    """The tensors of both tables have the same bits."""
    assert [name for name, tensor in expected.items() if not same_bits(tensor, found[name])] == []


def round_trip(value, path, options=None):
    PreparedTorch(value).write(path, options)
    return torch.load(path, weights_only=False)


def other_pythons():
    """Those of the environments of this checkout that have another torch."""
    found = (os.path.join(ROOT, name, "bin", "python") for name in (".venv", ".venv-torch2"))
    return [path for path in found if os.path.exists(path) and not sys.executable.startswith(os.path.dirname(path))]


# ---- what comes back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [None, SMALL], ids=["default", "small buffers"])
def test_every_dtype(tmp_path, dtype, options):
    value = {shape: random_tensor(dtype, *shape) for shape in [(1,), (3, 5), (70, 333), (0,), (2, 0, 3)]}
    value["scalar"] = random_tensor(dtype, 1)[0]
    value["columns"], value["transposed"] = value[(70, 333)][:, 3:7], value[(3, 5)].t()
    back = round_trip(value, tmp_path / "x.pt", options)
    assert list(back) == list(value) and back["transposed"].stride() == value["transposed"].stride()
    assert_same_bits(back, value)


def test_a_view_takes_its_own_elements_only(tmp_path):
    flat = torch.arange(1_000_000.0)
    views = {"piece": flat[5:15], "matrix": flat[100:112].view(3, 4), "one": flat[7], "steps": flat[::100_000]}
    record = PreparedTorch(views).write(tmp_path / "x.pt")
    sizes = {"piece": 40, "matrix": 48, "one": 4, "steps": 40}
    assert {tensor["name"]: tensor["bytes"] for tensor in record["tensors"]} == sizes
    assert_same_bits(torch.load(tmp_path / "x.pt"), views)


def test_an_expanded_tensor_stays_small(tmp_path):
    value = {"wide": torch.ones(3, 1).expand(3, 1 << 20), "windows": torch.arange(10.0).as_strided((6, 5), (1, 1))}
    assert PreparedTorch(value).write(tmp_path / "x.pt")["bytes"] < 4096
    assert_same_bits(torch.load(tmp_path / "x.pt"), value)


def test_same_address_other_elements_are_told_apart(tmp_path):
    flat = torch.arange(100.0)
    value = {
        "a": flat[:10],
        "b": flat[:20],
        "c": flat[:64].view(8, 8)[:, :3],
        "d": flat.as_strided((3, 8), (8, 1))[:, ::1][:, :4],
        "e": flat.as_strided((4, 6), (8, 1)),
        "bits": flat[:10].view(torch.int32),
    }
    assert_same_bits(round_trip(value, tmp_path / "x.pt"), value)


def test_tied_weights_stay_tied(tmp_path):
    w = torch.randn(40, 30)
    one = torch.nn.Parameter(torch.randn(9, 3))
    value = {
        "a": w,
        "same object": w,
        "other object": w.view(40, 30),
        "transposed": w.t(),
        "flat": w.view(-1),
        "columns": w[:, 2:5],
        "columns again": w[:, 2:5],
        "p": one,
        "p again": one,
        "its data": one.data,
    }
    record = PreparedTorch(value).write(tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt", weights_only=False)
    assert back["same object"] is back["a"] and back["p again"] is back["p"]
    assert len({back[name].data_ptr() for name in ("a", "other object", "transposed", "flat")}) == 1
    back["a"].zero_()
    assert not back["flat"].any() and not back["transposed"].any()
    assert back["columns"].data_ptr() == back["columns again"].data_ptr() != back["a"].data_ptr()
    assert back["p"].data_ptr() == back["its data"].data_ptr()
    assert isinstance(back["p"], torch.nn.Parameter) and back["p"].requires_grad
    assert sum({t["offset"]: t["bytes"] for t in record["tensors"]}.values()) == (40 * 30 + 40 * 3 + 27) * 4


def test_parameters_and_flags(tmp_path):
    value = [
        torch.nn.Parameter(torch.randn(3)),
        torch.nn.Parameter(torch.randn(3), requires_grad=False),
        torch.randn(3, requires_grad=True),
        torch.randn(3, requires_grad=True) * 2,
    ]
    for before, after in zip(value, round_trip(value, tmp_path / "x.pt")):
        assert type(after) is type(before) and same_bits(before, after)


def test_conjugate_and_negative_views(tmp_path):
    z = torch.randn(5, 6, dtype=torch.complex64)
    back = round_trip({"z": z, "conj": z.conj(), "imag of conj": z.conj().imag}, tmp_path / "x.pt")
    assert torch.equal(back["conj"], z.conj().resolve_conj()) and torch.equal(back["z"], z)
    assert torch.equal(back["imag of conj"], z.conj().imag)


class Doubled(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:.*(TypedStorage|Sparse)")
def test_tensors_that_torch_takes_apart(tmp_path):
    eye = torch.eye(4)
    value = {
        "sparse": eye.to_sparse(),
        "csr": eye.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(4, 5), 0.1, 3, torch.qint8),
        "meta": torch.empty(3, 4, device="meta"),
        "subclass": torch.randn(6).as_subclass(Doubled),
    }
    value["subclass"].note = "kept"  # torch 1.13 cannot load one without, on Python 3.11
    back = round_trip(value, tmp_path / "x.pt")
    assert back["subclass"].note == "kept"
    assert torch.equal(back["sparse"].to_dense(), eye) and torch.equal(back["csr"].to_dense(), eye)
    assert torch.equal(back["quantized"].int_repr(), value["quantized"].int_repr())
    assert back["meta"].device.type == "meta" and back["meta"].shape == (3, 4)
    assert type(back["subclass"]) is Doubled and torch.equal(back["subclass"], value["subclass"])


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages(tmp_path):
    value = {"typed": torch.randn(7).storage(), "bytes": torch.arange(3.0).storage().untyped()}
    back = round_trip(value, tmp_path / "x.pt")
    assert list(back["typed"]) == list(value["typed"])
    assert list(back["bytes"]) == list(value["bytes"]) and len(back["bytes"]) == 12


Point = collections.namedtuple("Point", "x y")


def test_other_objects(tmp_path):
    shared = [1, 2]
    value = collections.OrderedDict(
        number=3,
        big=1 << 100,
        text="é\n",
        bytes=b"\0\xff",
        none=None,
        size=torch.Size([1, 2]),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        set={1},
        point=Point(1, torch.ones(2)),
        shared=[shared, shared],
        nested={"a": [{"b": (torch.zeros(2),)}]},
    )
    value._metadata = {"version": 2}
    back = round_trip(value, tmp_path / "x.pt")
    assert back._metadata == {"version": 2} and type(back) is collections.OrderedDict
    assert back["shared"][0] is back["shared"][1]
    assert all(back[name] == value[name] for name in "number big text bytes none size dtype device set".split())
    assert back["point"].y.tolist() == [1, 1] and back["nested"]["a"][0]["b"][0].tolist() == [0, 0]


def test_what_cannot_be_pickled_leaves_no_file(tmp_path):
    refused(Exception, "lambda|pickle", lambda: PreparedTorch({"f": lambda: 0}).write(tmp_path / "x.pt"))
    assert not list(tmp_path.iterdir())


def test_the_value_is_not_touched(tmp_path):
    w = torch.randn(3, requires_grad=True)
    value = {"w": w}
    PreparedTorch(value).write(tmp_path / "x.pt")
    assert value == {"w": w} and w.requires_grad and w.grad is None


# ---- every torch reads it ------------------------------------------------------------------------------------------

CHECK = """
import sys, torch
files = sys.argv[1:]
kw = {"weights_only": True} if int(torch.__version__.split(".")[0]) >= 2 else {}
a = torch.load(files[0], map_location="cpu", **kw)
b = torch.load(files[1], map_location="cpu", **kw)
assert list(a) == list(b), (list(a), list(b))
for name in a:
    assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name
    assert type(a[name]) is type(b[name])
assert a["tied"].data_ptr() == a["w"].data_ptr()
if kw:
    c = torch.load(files[0], mmap=True, **kw)
    assert all(torch.equal(c[name], a[name]) for name in a)
print("same", len(a))
"""


@pytest.mark.parametrize("python", [sys.executable, *other_pythons()], ids=lambda path: path.split(os.sep)[-3])
def test_loads_under_every_torch(tmp_path, python):
    value = {str(dtype): random_tensor(dtype, 5, 7) for dtype in DTYPES if str(dtype).split(".")[1] not in NEW_DTYPES}
    for name in [name for name in value if value[name].is_floating_point() or value[name].is_complex()]:
        value[name] = value[name].nan_to_num() if "bfloat16" not in name and "complex" not in name else torch.ones(3)
    w = torch.randn(40, 3)
    value.update(
        w=w, tied=w.view(-1), p=torch.nn.Parameter(w.clone()), empty=torch.zeros(0, 4), row=w[3:5], gap=w[:, 1:]
    )
    files = [tmp_path / "ours.pt", tmp_path / "torchs.pt"]
    PreparedTorch(value).write(files[0])
    torch.save(value, files[1])
    done = subprocess.run([python, "-c", CHECK, *files], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.split() == ["same", str(len(value))], done.stderr


def test_the_pickle_is_that_of_torch_save(tmp_path):
    """The pickle of a value without views, instruction by instruction."""
    value = {"w": torch.randn(3, 4), "p": torch.nn.Parameter(torch.ones(2).bfloat16()), "n": [1, "x"]}
    PreparedTorch(value).write(tmp_path / "ours.pt")
    torch.save(value, tmp_path / "torchs.pt")
    instructions = []
    for name in ("ours.pt", "torchs.pt"):
        with zipfile.ZipFile(tmp_path / name) as archive:
            entry = next(entry for entry in archive.namelist() if entry.endswith("/data.pkl"))
            text = io.StringIO()
            pickletools.dis(pickletools.optimize(archive.read(entry)), out=text)
            instructions.append(text.getvalue())
    assert instructions[0] == instructions[1]


def test_the_archive_is_that_of_torch_save(tmp_path):
    """The same records at the same places: readers that compute offsets find them."""
    value = {"w": torch.randn(30, 4), "z": torch.zeros(0), "b": torch.ones(3).bool()}
    PreparedTorch(value).write(tmp_path / "archive.pt")
    with open(tmp_path / "torchs.pt", "wb") as file:
        torch.save(value, file)
    with zipfile.ZipFile(tmp_path / "archive.pt") as ours, zipfile.ZipFile(tmp_path / "torchs.pt") as theirs:
        assert ours.testzip() is None
        mine = {entry.filename: entry for entry in ours.infolist()}
        for entry in theirs.infolist():
            if not entry.filename.endswith("data.pkl"):
                assert mine[entry.filename].file_size == entry.file_size
            if not entry.filename.endswith(("data.pkl", "serialization_id")):
                assert mine[entry.filename].CRC == entry.CRC, entry.filename
            if hasattr(torch, "compile") and len(ours.read("archive/data.pkl")) == len(theirs.read("archive/data.pkl")):
                assert mine[entry.filename].header_offset == entry.header_offset
        assert ours.read("archive/byteorder") == b"little" and ours.read("archive/version") == b"3\n"
        assert len(ours.read("archive/.data/serialization_id")) == 40


# ---- records -------------------------------------------------------------------------------------------------------


def test_the_record_says_what_is_in_the_file(tmp_path):
    value = {"module": {"fc.weight": torch.randn(300, 40)}, "states": [{"step": torch.tensor(3.0)}, (torch.ones(2),)]}
    value["gap"] = value["module"]["fc.weight"][:, :7]
    record = PreparedTorch(value).write(tmp_path / "x.pt", SMALL)
    content = (tmp_path / "x.pt").read_bytes()
    assert (record["name"], record["bytes"], record["crc32"]) == ("x.pt", len(content), zlib.crc32(content))
    names = ["module.fc.weight", "states[0].step", "states[1][0]", "gap"]
    assert sorted(tensor["name"] for tensor in record["tensors"]) == sorted(names)
    for tensor in record["tensors"]:
        assert tensor["offset"] % 64 == 0
        assert zlib.crc32(content[tensor["offset"] : tensor["offset"] + tensor["bytes"]]) == tensor["crc32"]
    gap = next(tensor for tensor in record["tensors"] if tensor["name"] == "gap")
    assert (gap["dtype"], gap["shape"]) == ("float32", [300, 7])
    assert content[gap["offset"] :][: gap["bytes"]] == value["gap"].contiguous().numpy().tobytes()
    assert json.loads(json.dumps(record)) == record


def test_equal_values_give_equal_files(tmp_path):
    for name in "ab":
        torch.manual_seed(0)
        PreparedTorch({"w": torch.randn(100)}).write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_records_name_the_damaged_tensor(tmp_path):
    path = tmp_path / "x.pt"
    record = PreparedTorch({name: torch.randn(5000) for name in "abc"}).write(path)
    (tmp_path / verify.NAME).write_text(verify.text_of({}, {"x.pt": record}))
    assert file_writer.file_crc32(path) == record["crc32"]
    assert verify.verify_folder(str(tmp_path)) == []
    b = next(tensor for tensor in record["tensors"] if tensor["name"] == "b")
    content = bytearray(path.read_bytes())
    content[b["offset"] + 777] ^= 4
    path.write_bytes(content)
    assert [problem.tensor for problem in verify.verify_folder(str(tmp_path))] == ["b"]
    assert file_writer.file_crc32(path) != record["crc32"]
    os.truncate(path, b["offset"] + 10)
    (problem,) = verify.verify_folder(str(tmp_path))
    assert problem.text == "is damaged: it has {} bytes, {} were saved".format(b["offset"] + 10, record["bytes"])
    refused(FileNotFoundError, "", file_writer.file_crc32, tmp_path / "none")


# ---- bytes, safetensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"abc", bytes(3_000_000), bytearray(5), memoryview(b"12345678").cast("I")], ids=len
)
def test_bytes(tmp_path, data):
    record = PreparedBytes(data).write(tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    assert content == bytes(data) and record == file_writer.file_record("x", len(content), zlib.crc32(content))


def read_safetensors(path):
    """By the published format."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    data, end, tensors = content[8 + length :], 0, {}
    codes = {code: getattr(torch, name, None) for name, code in file_writer.SAFETENSORS_NAMES.items()}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, stop = entry["data_offsets"]
        assert begin == end, "the format allows no holes"
        end = stop
        dtype = codes[entry["dtype"]]
        assert begin % torch.empty(0, dtype=dtype).element_size() == 0
        tensors[name] = torch.tensor(list(data[begin:stop]), dtype=torch.uint8).view(dtype).reshape(entry["shape"])
    assert end == len(data)
    return tensors, header.get("__metadata__")


def test_safetensors(tmp_path):
    dtypes = [dtype for dtype in DTYPES if dtype is not torch.complex128]
    value = {f"{dtype} é": random_tensor(dtype, 3, 5) for dtype in dtypes}
    w = torch.randn(90, 70)
    value.update(
        w=w, tied=w, t=w.t(), gap=w[:, 3:9], scalar=torch.tensor(2), empty=torch.zeros(0, 3), wide=w[:1].expand(3, 70)
    )
    record = PreparedSafetensors(value, {"format": "pt"}).write(tmp_path / "x.safetensors", SMALL)
    back, metadata = read_safetensors(tmp_path / "x.safetensors")
    assert metadata == {"format": "pt"} and set(back) == set(value)
    assert_same_bits(back, value)
    content = (tmp_path / "x.safetensors").read_bytes()
    assert record["crc32"] == zlib.crc32(content) and record["bytes"] == len(content)
    for tensor in record["tensors"]:
        assert zlib.crc32(content[tensor["offset"] :][: tensor["bytes"]]) == tensor["crc32"]
        assert tuple(tensor["shape"]) == value[tensor["name"]].shape
    library = pytest.importorskip("safetensors.torch", reason="the package is not installed")
    assert_same_bits(library.load_file(tmp_path / "x.safetensors"), value)


def test_safetensors_without_tensors(tmp_path):
    PreparedSafetensors({}).write(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"\x08\0\0\0\0\0\0\0{}      "


@pytest.mark.parametrize(
    "tensors, metadata, match",
    [
        ({"a": torch.zeros(2, dtype=torch.complex128)}, None, "'a' is torch.complex128"),
        ({"a": torch.eye(2).to_sparse()}, None, "'a'.*not a dense tensor"),
        ({"a": torch.empty(2, device="meta")}, None, "'a'.*not a dense tensor"),
        ({"__metadata__": torch.zeros(2)}, None, "needs a name"),
        ({3: torch.zeros(2)}, None, "needs a name"),
        ({"a": torch.zeros(2)}, {"step": 3}, "'step'"),
    ],
)
def test_safetensors_refuses(tmp_path, tensors, metadata, match):
    refused(ValueError, match, lambda: PreparedSafetensors(tensors, metadata).write(tmp_path / "x"))
    assert not list(tmp_path.iterdir())


# ---- memory, GPU ---------------------------------------------------------------------------------------------------

MEMORY = """
import resource, sys, torch
from deepspeed.checkpoint.write.file_writer import PreparedSafetensors, PreparedTorch, WriterOptions
w = torch.zeros(8000, 10000)
w += 1
value = {"w": w, "half": w[:, :5000]}
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
PreparedTorch({"a": torch.ones(3)}).write(sys.argv[1])
before = used()
options = WriterOptions(io_buffer_size=8 << 20, sync=False)
PreparedTorch(value).write(sys.argv[1], options)
PreparedSafetensors(value).write(sys.argv[1], options)
print(used() - before)
"""


@pytest.mark.slow
def test_no_second_copy_of_the_state(tmp_path):
    """480 MB are written, a third of them with gaps; the memory that this takes is that of the buffers."""
    done = run_python(MEMORY, tmp_path / "x")
    assert done.returncode == 0 and int(done.stdout) < 64, (done.stdout, done.stderr)


@pytest.mark.parametrize("options", [None, SMALL], ids=["default", "small buffers"])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
        ),
    ],
)
def test_tensors_that_pass_through_the_staging_memory(tmp_path, options, device):
    """Those of a GPU do, and those of the CPU where it is asked for."""
    options = dataclasses.replace(options or WriterOptions(), staged=device == "cpu")
    w = torch.randn(300 if device == "cpu" else 3000, 70, device=device)
    value = {
        "w": w, "t": w.t(), "tall": w[:, :1], "gap": w[:, 3:9], "half": w.bfloat16(), "scalar": w[0, 0],
        "z": torch.zeros(0, 3, device=device), "p": torch.nn.Parameter(w),
    }  # fmt: skip
    back = round_trip(value, tmp_path / "x.pt", options)
    assert {tensor.device.type for tensor in back.values()} == {"cpu"}
    assert_same_bits(back, {name: tensor.cpu() for name, tensor in value.items()})
    assert back["w"].data_ptr() == back["t"].data_ptr() == back["p"].data_ptr()
    PreparedSafetensors(value).write(tmp_path / "x.safetensors", options)
    read, _ = read_safetensors(tmp_path / "x.safetensors")
    assert_same_bits(read, {name: tensor.detach().cpu() for name, tensor in value.items()})


# ---- faults --------------------------------------------------------------------------------------------------------


def writers(folder):
    big = {"w": torch.ones(300_000), "v": torch.zeros(5)}
    options = WriterOptions(io_buffer_size=1 << 19)
    yield lambda: PreparedTorch(big).write(folder / "x", options)
    yield lambda: PreparedSafetensors(big).write(folder / "x", options)
    yield lambda: PreparedBytes(b"x" * 100).write(folder / "x")


@pytest.mark.parametrize("action, code", [("enospc", 28), ("eio", 5)])
def test_every_fault_is_an_error_and_no_file(tmp_path, inject, action, code):
    for write in writers(tmp_path):
        for call in ("open", "write", "fsync"):
            for n in itertools.count(1):
                inject(f"{call}:{n}:{action}")
                try:
                    write()
                    break
                except OSError as error:
                    assert error.errno == code and str(tmp_path / "x") in str(error) and not list(tmp_path.iterdir())
            assert n > 1, f"no {call} was counted"
            os.unlink(tmp_path / "x")


def test_names(tmp_path, inject):
    for name in "ab":
        PreparedBytes(name.encode()).write(tmp_path / name)
    inject("rename:2:eio")
    assert file_writer.exchange(str(tmp_path / "a"), str(tmp_path / "b")) in (True, False)
    assert (tmp_path / "a").read_bytes() == b"b"
    refused(OSError, r"(?s)rename of .*/a to .*/b failed", file_writer.rename, str(tmp_path / "a"), str(tmp_path / "b"))
    file_writer.rename(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == b"b" and not (tmp_path / "a").exists()
    inject("fsync:1:eio")
    refused(OSError, "fsync of", file_writer.sync_directory, str(tmp_path))
    file_writer.sync_directory(str(tmp_path))
    refused(FileNotFoundError, "none", file_writer.rename, str(tmp_path / "none"), str(tmp_path / "b"))
    refused(ValueError, "DS_IO_FAULT='nonsense'.*write:3:kill", inject, "nonsense")


def test_the_environment_arms_a_fault(tmp_path):
    code = (
        "import sys; from deepspeed.checkpoint.write.file_writer import PreparedBytes; "
        "PreparedBytes(b'x' * 99).write(sys.argv[1])"
    )
    for order, expected in (("write:1:kill", -9), ("fsync:2:kill", 0)):
        assert run_after_torch(code, tmp_path / "x", DS_IO_FAULT=order).returncode == expected
    assert (tmp_path / "x").read_bytes() == b"x" * 99


def test_options_out_of_range(tmp_path):
    for options in (WriterOptions(io_buffer_size=0), WriterOptions(io_buffer_size=1 << 40), WriterOptions(threads=-1)):
        refused((ValueError, TypeError), "", PreparedBytes(b"x").write, tmp_path / "x", options)
    refused(FileNotFoundError, "Make the folder", PreparedBytes(b"x").write, tmp_path / "no" / "x")
    assert not list(tmp_path.iterdir())
