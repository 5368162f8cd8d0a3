"""Files that claim more than they hold: refused with exit code 4 before memory is allocated."""

import gzip
import json
import struct
import tracemalloc
import zipfile
from zlib import compress, crc32

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from lipaudit.data.loading import find_data_forms
from lipaudit.errors import InputError
from lipaudit.models.sources.weights import read_weights
from tests.commands import invoke

MEMORY = 48 << 20
"""Bytes that Python and NumPy may allocate to refuse a file of a few."""
HUGE = (2**40, 3, 8, 8)


def npy(shape, kind="|u1", body=bytes(64), header=None):
    text = header or repr({"descr": kind, "fortran_order": False, "shape": shape})
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + f"{text}\n".encode() + body


def npz(path, data, method=zipfile.ZIP_STORED, name="x.npy"):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(name, data)


def npz_that_lies(path, size):
    """Write an entry whose directory claims `size` bytes, packed and unpacked."""
    npz(path, npy((size - 100,)))
    whole = bytearray(path.read_bytes())
    entry = whole.find(b"PK\x01\x02")
    whole[entry + 20 : entry + 28] = struct.pack("<II", size, size)
    path.write_bytes(whole)


def npz_changed(path, at, value):
    """Write an entry, and change a byte of its data, or a flag (encrypted, method) of it."""
    npz(path, npy((8, 8), body=np.random.default_rng(0).bytes(64)), zipfile.ZIP_DEFLATED)
    whole = bytearray(path.read_bytes())
    entry = whole.find(b"PK\x01\x02")
    for place in {"data": [60], "flag": [6, entry + 8], "method": [8, entry + 10]}[at]:
        whole[place] ^= value
    path.write_bytes(whole)


def tensors(path, header, body=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps({"x": header}).encode()
    path.write_bytes(struct.pack("<Q", length or len(text)) + text + body)


def entry(shape, end, kind="U8"):
    return {"dtype": kind, "shape": shape, "data_offsets": [0, end]}


def idx(path, shape, body=b"1234", kind=8):
    head = struct.pack(f">BBBB{len(shape)}i", 0, 0, kind, len(shape), *shape)
    path.write_bytes(gzip.compress(head + body) if path.suffix == ".gz" else head + body)


def png(path, width, height):
    path.mkdir()

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    data = chunk(b"IDAT", compress(bytes(1000))) + chunk(b"IEND", b"")
    (path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + head + data)


def narrow(path):
    path.mkdir()
    Image.new("L", (1, 60_000)).save(path / "a.png")


def table(path, text, rows):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is optional")
    import pyarrow as pa

    values = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, "i4")), pa.array([text]))
    parquet.write_table(pa.table({"text": values}), path, compression="zstd")


FILES = {
    "npz": ("a.npz", lambda p: npz(p, npy(HUGE)), "1099511627776 x 3 x 8 x 8 values"),
    "npz packed": ("a.npz", lambda p: npz(p, npy(HUGE), zipfile.ZIP_DEFLATED), "at most"),
    "npz overflow": ("a.npz", lambda p: npz(p, npy((2**62, 2**62))), "at most"),
    "npz negative": ("a.npz", lambda p: npz(p, npy((-8, -8))), "-8 x -8"),
    "npz no rows": ("a.npz", lambda p: npz(p, npy((0, 2**70), body=b"")), "too large"),
    "npz labels": ("a.npz", lambda p: npz(p, npy(HUGE), name="y.npy"), "at most"),
    "npz directory": ("a.npz", lambda p: npz_that_lies(p, 2**31), "not a readable"),
    "npz signs": ("a.npz", lambda p: npz(p, npy((), header="-" * 9000 + "1")), "not a readable"),
    "npz brackets": ("a.npz", lambda p: npz(p, npy((), header="(" * 9000)), "not a readable"),
    "npz long header": ("a.npz", lambda p: npz(p, npy((), header="1" * 60_000)), "not a readable"),
    "npz data": ("a.npz", lambda p: npz_changed(p, "data", 255), "not a readable"),
    "npz encrypted": ("a.npz", lambda p: npz_changed(p, "flag", 1), "encrypted"),
    "npz method": ("a.npz", lambda p: npz_changed(p, "method", 90), "not a readable"),
    "npz objects": ("a.npz", lambda p: npz(p, npy((8,), "|O")), "Python objects"),
    "npy as npz": ("a.npz", lambda p: p.write_bytes(npy(HUGE)), "not a zip file"),
    "npy": ("a.npy", lambda p: p.write_bytes(npy(HUGE)), "an unsupported format"),
    "safetensors offsets": (
        "a.safetensors", lambda p: tensors(p, entry([2**40], 2**40)), "not fully covered",
    ),
    "safetensors shape": (
        "a.safetensors", lambda p: tensors(p, entry([2**40], 4), b"1234"), "invalid shape",
    ),
    "safetensors no rows": (
        "a.safetensors", lambda p: tensors(p, entry([0, 2**63], 0)), "not a readable",
    ),
    "safetensors header": (
        "a.safetensors", lambda p: tensors(p, b"{}", length=2**60), "header too large",
    ),
    "safetensors nested": (
        "a.safetensors", lambda p: tensors(p, b'{"x":' * 100_000), "recursion",
    ),
    "idx": ("a-idx3-ubyte", lambda p: idx(p, (2**31 - 1,) * 3), "at most 20 bytes"),
    "idx negative": ("a-idx3-ubyte", lambda p: idx(p, (-1, -1, 4)), "-1 x -1 x 4"),
    "idx packed": ("a-idx3-ubyte.gz", lambda p: idx(p, (2**31 - 1,) * 3), "at most"),
    "idx bomb": ("a-idx3-ubyte.gz", lambda p: idx(p, (1, 2, 2), bytes(10**8)), "not a readable"),
    "image": ("images", lambda p: png(p, 2**31 - 1, 2**31 - 1), "exceeds limit"),
    "image warned of": ("images", lambda p: png(p, 10_000, 10_000), "exceeds limit"),
    "image narrow": ("images", narrow, "too narrow"),
    "parquet rows": ("a.parquet", lambda p: table(p, "good", 10**6), "1000000 values"),
    "parquet cells": ("a.parquet", lambda p: table(p, "good" * 2**18, 500), "1032 times"),
    "json": ("a.jsonl", lambda p: p.write_text('{"text":' * 100_000), "is not JSON"),
}  # fmt: skip


@pytest.fixture
def allocated():
    """Return the most bytes that Python and NumPy held, from the start of the test."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.parametrize("case", FILES)
def test_claims_are_checked_before_memory_is_allocated(
    tmp_path, case, image_taker, text_taker, refused, allocated
):
    name, write, message = FILES[case]
    write(tmp_path / name)
    taker = text_taker() if name.endswith(("jsonl", "parquet")) else image_taker((1, 60, 60))
    tracemalloc.reset_peak()
    said = refused(tmp_path / name, taker)
    assert message in said
    assert "memory" not in said or "signs" in case
    assert allocated() < MEMORY


@pytest.mark.parametrize(
    "case", ["npz", "npy as npz", "npz signs", "safetensors no rows", "idx", "image warned of"]
)
def test_a_command_ends_with_exit_code_4(tmp_path, case):
    name, write, _ = FILES[case]
    write(tmp_path / name)
    line = ["bounds", "demo", "-n", "1", "--data", str(tmp_path / name)]
    done = invoke(*line, code=4)
    assert "--batch-size" not in done.stderr


def test_images_too_large_to_open_have_no_form(tmp_path):
    png(tmp_path / "images", 10_000, 10_000)
    assert find_data_forms(str(tmp_path / "images")) == ()


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_weights_that_claim_more_than_their_file_are_refused(tmp_path, name):
    torch.save({"a": torch.zeros(4)}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "w.pt").read_bytes()
    size = whole.rfind(b"K\x04N")  # the length of the storage
    longer = whole[:size] + b"\x8a\x06" + (2**46).to_bytes(6, "little") + whole[size + 2 :]
    (tmp_path / "w.pt").write_bytes(longer)
    tensors(tmp_path / "w.safetensors", entry([0, 2**63], 0))
    with pytest.raises(InputError, match=f"{name} is not a complete"):
        read_weights(tmp_path / name)


def test_deep_names_of_adversarial_examples_are_left_out(tmp_path, image_taker):
    from lipaudit.data.loading import load_data

    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(1, 3, 8, 8)}, path, metadata={"made_of": "[" * 100_000})
    assert load_data(str(path), image_taker()).origins[0].place == "index 0"
