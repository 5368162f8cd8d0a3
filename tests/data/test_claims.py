"""Files that claim more than they hold, or are damaged: refused with exit code 4."""

import gzip
import json
import struct
import zipfile
from zlib import compress, crc32

import numpy as np
import pytest
from PIL import Image

from lipaudit.data.loading import find_data_forms
from lipaudit.errors import InputError
from lipaudit.models.sources.weight_files import read_weights
from tests.commands import invoke

HUGE = (2**40, 3, 8, 8)


def npy(shape, kind="|u1", body=bytes(64), header=None):
    text = header or repr({"descr": kind, "fortran_order": False, "shape": shape})
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + f"{text}\n".encode() + body


def npz(path, data, method=zipfile.ZIP_STORED, name="x.npy"):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(name, data)


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


def cut(write, length=None):
    """Write a file, and keep the beginning of it: half, or some bytes."""

    def damage(path):
        write(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2 if length is None else length])

    return damage


def picture(path, size=(64, 64), length=2**30):
    """Write a folder with a picture of noise, or its beginning (None: half of it)."""
    path.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    cut(Image.fromarray(pixels).save, length)(path / "broken.png")


FILES = {
    "npz cut": ("a.npz", cut(lambda p: npz(p, npy((8, 8)))), "File is not a zip file"),
    "npz": ("a.npz", lambda p: npz(p, npy(HUGE)), "not a readable"),
    "npz packed": ("a.npz", lambda p: npz(p, npy(HUGE), zipfile.ZIP_DEFLATED), "not a readable"),
    "npz negative": ("a.npz", lambda p: npz(p, npy((-8, -8))), "not a readable"),
    "npz brackets": ("a.npz", lambda p: npz(p, npy((), header="(" * 9000)), "not a readable"),
    "npz data": ("a.npz", lambda p: npz_changed(p, "data", 255), "not a readable"),
    "npz encrypted": ("a.npz", lambda p: npz_changed(p, "flag", 1), "encrypted"),
    "npz method": ("a.npz", lambda p: npz_changed(p, "method", 90), "not a readable"),
    # An object array is unpickled where it is opened, and pickles run code.
    "npz objects": ("a.npz", lambda p: npz(p, npy((8,), "|O")), "not a readable"),
    "npy as npz": ("a.npz", lambda p: p.write_bytes(npy((2, 3))), "not a readable"),
    "npy": ("a.npy", lambda p: p.write_bytes(npy(HUGE)), "an unsupported format"),
    "safetensors offsets": (
        "a.safetensors", lambda p: tensors(p, entry([2**40], 2**40)), "not fully covered",
    ),
    "safetensors no rows": (
        "a.safetensors", lambda p: tensors(p, entry([0, 2**63], 0)), "not a readable",
    ),
    "safetensors cut": (
        "a.safetensors", cut(lambda p: tensors(p, entry([8], 8), bytes(8))), "not a readable",
    ),
    "safetensors nested": (
        "a.safetensors", lambda p: tensors(p, b'{"x":' * 100_000), "recursion",
    ),
    **{
        f"idx {end} {length}": (
            f"a-idx3-ubyte{end}", cut(lambda p: idx(p, (1, 2, 2)), length), "not a readable IDX",
        )
        for end in ("", ".gz")
        for length in (0, 2, 9, -1)
    },
    "idx": ("a-idx3-ubyte", lambda p: idx(p, (2**31 - 1,) * 3), "not a readable"),
    "idx negative": ("a-idx3-ubyte", lambda p: idx(p, (-1, -1, 4)), "not a readable"),
    **{
        f"image {length}": (
            "images", lambda p, n=length: picture(p, length=n), "broken.png is not a readable",
        )
        for length in (0, 6, None)
    },
    "image": ("images", lambda p: png(p, 2**31 - 1, 2**31 - 1), "exceeds limit"),
    "image warned of": ("images", lambda p: png(p, 10_000, 10_000), "exceeds limit"),
    "image narrow": ("images", lambda p: picture(p, (1, 60_000)), "too narrow"),
    "json": ("a.jsonl", lambda p: p.write_text('{"text":' * 100_000), "is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_files_that_claim_too_much_are_refused(tmp_path, case, image_taker, text_taker, refused):
    name, write, message = FILES[case]
    write(tmp_path / name)
    taker = text_taker() if name.endswith("jsonl") else image_taker((1, 60, 60))
    assert message in refused(tmp_path / name, taker)


def test_a_command_ends_with_exit_code_4_and_images_too_large_to_open_have_no_form(tmp_path):
    npz(tmp_path / "a.npz", npy(HUGE))
    done = invoke("bounds", "demo", "-n", "1", "--data", str(tmp_path / "a.npz"), code=4)
    assert "--batch-size" not in done.stderr
    png(tmp_path / "images", 10_000, 10_000)
    assert find_data_forms(str(tmp_path / "images")) == ()
    # Nor have weights that claim more than their file.
    tensors(tmp_path / "w.safetensors", entry([0, 2**63], 0))
    with pytest.raises(InputError, match=r"w\.safetensors is not a complete"):
        read_weights(tmp_path / "w.safetensors")
