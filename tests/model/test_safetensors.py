"""SafetensorsSource: values against the library, conversions, and files that lie."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tinyvllm.model.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsSource
from tinyvllm.util import DType, InputError, bf16_to_float32


def read_all(directory: Path) -> dict[str, np.ndarray]:
    source = SafetensorsSource(directory)
    values = {}
    for name in source.names():
        out = np.empty(int(np.prod(source.shape(name))), np.float32)
        source.read(name, DType.F32, out)
        values[name] = out.reshape(source.shape(name))
    source.close()
    return values


def write(directory: Path, header: dict[str, Any] | bytes, data: bytes) -> Path:
    """A safetensors file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / SINGLE_FILE).write_bytes(len(text).to_bytes(8, "little") + text + data)
    return directory


@pytest.mark.parametrize(
    ("name", "count"), [("llama3_rope", 38), ("llama_sharded", 21), ("mistral", 21)]
)
def test_golden_models(golden: Path, name: str, count: int) -> None:
    values = read_all(golden / name)
    assert len(values) == count
    embedding = values["model.embed_tokens.weight"]
    assert embedding.shape[0] == 512 and 0 < np.abs(embedding).max() < 100
    assert all(np.isfinite(v).all() for v in values.values())


def test_pieces_and_conversions(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays = {
        "f32": rng.standard_normal((700, 1000)).astype(np.float32),
        "f16": rng.standard_normal((3, 5)).astype(np.float16),
        "empty": np.empty((0, 4), np.float32),
        "scalar": np.array(2.5, np.float32),
    }
    save_file(arrays, tmp_path / SINGLE_FILE)
    source = SafetensorsSource(tmp_path)
    assert set(source.names()) == set(arrays)
    for name, array in arrays.items():
        flat = array.reshape(-1)
        assert source.shape(name) == array.shape
        for start, end in ((0, flat.size), (flat.size // 3, flat.size // 2)):
            for dtype in (DType.F32, DType.FP16, DType.BF16):
                out = np.zeros(end - start, dtype.storage)
                source.read(name, dtype, out, start)
                expected = dtype.encode(flat[start:end].astype(np.float32))
                np.testing.assert_array_equal(out, expected)
    source.close()


def test_bfloat16_is_read_bit_for_bit(golden: Path) -> None:
    path = golden / "mistral" / SINGLE_FILE
    data = path.read_bytes()
    header_size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + header_size])["model.norm.weight"]
    start, end = (8 + header_size + offset for offset in entry["data_offsets"])
    source = SafetensorsSource(path.parent)
    out = np.empty(256, np.uint16)
    source.read("model.norm.weight", DType.BF16, out)
    assert out.tobytes() == data[start:end]
    wide = np.empty(256, np.float32)
    source.read("model.norm.weight", DType.F32, wide)
    np.testing.assert_array_equal(wide, bf16_to_float32(out))


def test_float16_overflow_is_an_error(tmp_path: Path) -> None:
    save_file({"big": np.array([1.0, 1e6], np.float32)}, tmp_path / SINGLE_FILE)
    source = SafetensorsSource(tmp_path)
    with pytest.raises(InputError, match=r"'big' holds 1e\+06.*65504.*bfloat16"):
        source.read("big", DType.FP16, np.empty(2, np.float16))
    with pytest.raises(InputError, match="no tensor named 'small'"):
        source.shape("small")


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TWICE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":' + json.dumps(ENTRY).encode()


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": ENTRY}, b"\0" * 7),  # truncated
        ({"a": ENTRY}, b"\0" * 9),  # too long
        ({"a": {**ENTRY, "shape": [3]}}, b"\0" * 8),
        ({"a": {**ENTRY, "shape": [2**63, 2**63]}}, b"\0" * 8),
        ({"a": {**ENTRY, "shape": [-2]}}, b"\0" * 8),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, b"\0" * 8),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, b"\0" * 12),
        ({"a": ENTRY, "b": ENTRY}, b"\0" * 8),  # overlapping
        ({"a": {**ENTRY, "dtype": "F8_E4M3", "shape": [8]}}, b"\0" * 8),
        ({"a": {**ENTRY, "dtype": "I8", "shape": [8]}}, b"\0" * 8),
        ({"a": {**ENTRY, "dtype": "X9"}}, b"\0" * 8),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8),
        ({"a": 5}, b""),
        (TWICE + b"}", b"\0" * 8),
        (b"[]", b""),
        (b"{", b""),
        (b"\xff\xfe", b""),
        (b"[" * 10000, b""),
    ],
)
def test_lying_headers(tmp_path: Path, header: Any, data: bytes) -> None:
    with pytest.raises(InputError, match=r"model\.safetensors"):
        SafetensorsSource(write(tmp_path, header, data))


@pytest.mark.parametrize("content", [b"", b"\1\2", b"\xff" * 8, b"\xff" * 64, b"\0" * 8])
def test_no_room_for_a_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        SafetensorsSource(tmp_path)


def test_file_cut_after_opening(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1000, np.float32)}, tmp_path / SINGLE_FILE)
    source = SafetensorsSource(tmp_path)
    with open(tmp_path / SINGLE_FILE, "r+b") as file:
        file.truncate(2000)
    with pytest.raises(InputError, match="inside tensor 'a'"):
        source.read("a", DType.F32, np.empty(1000, np.float32))


def test_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match="safetensors files only"):
        SafetensorsSource(tmp_path)


@pytest.fixture
def sharded(golden: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "sharded"
    shutil.copytree(golden / "llama_sharded", directory)
    return directory


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../outside.safetensors", "not the name"),
        ("/etc/passwd", "not the name"),
        ("..", "not the name"),
        ("pytorch_model.bin", "not the name"),
        ("", "not the name"),
        ("a\0b", "not the name"),
        (7, "not the name"),
        ("model-00009-of-00003.safetensors", "does not exist"),
        ("model-00002-of-00003.safetensors", "does not hold"),
    ],
)
def test_lying_index(sharded: Path, file: Any, message: str) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    name = next(n for n, f in index["weight_map"].items() if f.startswith("model-00001"))
    index["weight_map"][name] = file
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(InputError, match=message):
        SafetensorsSource(sharded)


def test_index_that_leaves_out_or_repeats_tensors(sharded: Path) -> None:
    text = (sharded / INDEX_FILE).read_text()
    index = json.loads(text)
    name = next(iter(index["weight_map"]))
    del index["weight_map"][name]
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(InputError, match="does not list"):
        SafetensorsSource(sharded)
    (sharded / INDEX_FILE).write_text(text)
    first, second = (sharded / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    shutil.copy(first, second)
    with pytest.raises(InputError, match=r"stands in .* too"):
        SafetensorsSource(sharded)
    (sharded / INDEX_FILE).write_text('{"weight_map": []}')
    with pytest.raises(InputError, match="weight_map"):
        SafetensorsSource(sharded)


@settings(max_examples=300, deadline=None)
@given(flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=6))
def test_flipped_bytes(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[float, int]]
) -> None:
    directory = tmp_path_factory.mktemp("flip")
    names = {f"t{i}": np.zeros((i, 3), np.float32) for i in range(4)}
    save_file(names, directory / SINGLE_FILE)
    data = bytearray((directory / SINGLE_FILE).read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    for where, mask in flips:
        data[int(where * (header - 1))] ^= mask
    (directory / SINGLE_FILE).write_bytes(data)
    try:
        read_all(directory)
    except InputError as error:
        assert SINGLE_FILE in str(error)
