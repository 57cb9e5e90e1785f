"""GgufFile: metadata and tensors of valid files, and files that lie."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyvllm.model.gguf import GgufSource
from tinyvllm.model.gguf_file import GgufFile
from tinyvllm.util import InputError


def head(num_tensors: int = 0, num_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor(name: bytes, dims: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    return (
        string(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", type_id, offset)
    )


def key(name: bytes, type_id: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", type_id) + value


def array(item_type: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IQ", item_type, count) + data


def parse(tmp_path: Path, data: bytes) -> GgufFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return GgufFile.parse(path)


def test_same_as_the_packages_reader(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(quantize={"token_embd.weight": gguf.GGMLQuantizationType.Q4_1})
    ours, theirs = GgufFile.parse(path), gguf.GGUFReader(path)
    assert [*ours.tensors] == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        mine = ours.tensors[t.name]
        assert mine.shape == tuple(reversed(t.shape.tolist()))
        assert (mine.offset, mine.quantization) == (t.data_offset, t.tensor_type)
    for name, field in theirs.fields.items():
        if name.startswith("GGUF."):
            continue
        value = field.contents()
        if isinstance(value, float):
            assert ours.metadata[name] == pytest.approx(value, rel=1e-7)
        else:
            assert ours.metadata[name] == value


def test_values_of_every_type(tmp_path: Path) -> None:
    keys = [
        key(b"u8", 0, b"\xff"), key(b"i8", 1, b"\xff"), key(b"u16", 2, b"\1\2"),
        key(b"f32", 6, struct.pack("<f", 1e-5)), key(b"bool", 7, b"\1"),
        key(b"s", 8, string("Ġ".encode())), key(b"a", 9, array(5, 2, struct.pack("<2i", -1, 7))),
        key(b"as", 9, array(8, 2, string(b"x") + string(b""))),
        key(b"i64", 11, struct.pack("<q", -5)), key(b"f64", 12, struct.pack("<d", 0.1)),
    ]  # fmt: skip
    file = parse(tmp_path, head(0, len(keys)) + b"".join(keys))
    assert file.metadata == {
        "u8": 255, "i8": -1, "u16": 513, "f32": 1e-5, "bool": True, "s": "Ġ", "a": [-1, 7],
        "as": ["x", ""], "i64": -5, "f64": 0.1,
    }  # fmt: skip
    assert file.get("u8", int) == 255 and file.get("absent", int, 3) == 3
    with pytest.raises(InputError, match="bool is of type bool: must be int"):
        file.get("bool", int)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin"),
        (b"GGUF", "does not begin"),
        (b"GGML" + bytes(40), "does not begin"),
        (head(version=1), "version 1"),
        (head(version=3 << 24), "version"),
        (head(1 << 60) + bytes(64), "tensors: .* do not fit"),
        (head(0, 1 << 60) + bytes(64), "metadata keys: .* do not fit"),
        (head(0, 1) + struct.pack("<Q", 1 << 62) + bytes(64), "wants"),
        (head(0, 1) + key(b"a", 8, string(b"\xff\xfe")) + bytes(9), "not UTF-8"),
        (head(0, 1) + key(b"a", 13, bytes(9)), "unknown type 13"),
        (head(0, 1) + key(b"a", 9, array(9, 1, bytes(20))), "unsupported type 9"),
        (head(0, 1) + key(b"a", 9, array(4, 1 << 61, bytes(20))), "do not fit"),
        (head(0, 1) + key(b"a", 9, array(8, 1 << 61, bytes(20))), "do not fit"),
        (head(0, 2) + key(b"a", 7, b"\1") * 2, "stands there twice"),
        (head(0, 1) + key(b"general.alignment", 4, bytes(4)), "alignment=0"),
        (head(0, 1) + key(b"general.alignment", 8, string(b"32")), "alignment='32'"),
        (head(1) + tensor(b"t", [80]) + bytes(40), "ends at byte"),
        (head(1) + tensor(b"t", [1 << 62, 1 << 62]) + bytes(40), "ends at byte"),
        (head(1) + tensor(b"t", [8], offset=1 << 63) + bytes(64), "ends at byte"),
        (head(1) + tensor(b"t", [0]) + bytes(64), "above 0"),
        (head(1) + tensor(b"t", [8] * 5) + bytes(64), "5 dimensions"),
        (head(1) + tensor(b"t", []) + bytes(64), "0 dimensions"),
        (head(1) + tensor(b"t", [33], type_id=8) + bytes(99), "multiple of 32"),
        (head(1) + tensor(b"t", [8], type_id=999) + bytes(64), "unknown type 999"),
        (head(2) + tensor(b"t", [1]) * 2 + bytes(64), "stands there twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lying_files(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        parse(tmp_path, data)
    assert "x.gguf" in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        GgufFile.parse(tmp_path / "none.gguf")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(InputError, match="pip install gguf"):
        parse(tmp_path, head())


def use(path: Path) -> None:
    """Everything that a start of the engine does with a file."""
    source = GgufSource(path)
    try:
        source.tokenizer().encode("hello 12")
    finally:
        source.close()


def test_truncated_at_every_place(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    data = write_gguf().read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 400, 7), *range(400, len(data), 4099), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(InputError, match=r"cut\.gguf"):
            use(path)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes(
    write_gguf: Callable[..., Path], tmp_path: Path, flips: list[tuple[float, int]]
) -> None:
    data = bytearray(valid(write_gguf))
    end = data.index(b"blk.0.ffn_down.weight") + 60  # the end of the descriptions
    for where, mask in flips:
        data[int(where * (end - 1))] ^= mask
    path = tmp_path / "flipped.gguf"
    path.write_bytes(data)
    try:
        use(path)
    except InputError as error:
        assert "flipped.gguf" in str(error)


_VALID: dict[str, Any] = {}


def valid(write_gguf: Callable[..., Path]) -> bytes:
    if not _VALID:
        _VALID["data"] = write_gguf().read_bytes()
    data: bytes = _VALID["data"]
    return data
