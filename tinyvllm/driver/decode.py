"""Recorded calls in plain values: arguments by parameter name, a launch by its kernel's own."""

from __future__ import annotations

import ctypes
import enum
import inspect
import re
import struct
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from tinyvllm.driver.calls import driver_api, function
from tinyvllm.driver.spec import PARAM_FORMATS, KernelSpec
from tinyvllm.driver.tensor_map import described

LONGEST_TEXT = 300  # bytes that are shown as text; longer ones by their length
LONGEST_LIST = 16  # items that are shown

# Types of the bindings that are handles, and what they are called.
_HANDLES = {
    "CUcontext": "context",
    "CUstream": "stream",
    "CUevent": "event",
    "CUmemoryPool": "pool",
    "CUmodule": "module",
    "CUfunction": "function",
    "CUgraph": "graph",
    "CUgraphExec": "graph exec",
    "CUgraphNode": "node",
    "nvrtcProgram": "program",
}
# Host and device addresses that arguments are, where the bindings take a plain number.
_ADDRESSES = {"dptr", "dstDevice", "srcDevice", "dstHost", "srcHost", "p"}
_ADDRESS_RESULTS = {"cuMemHostAlloc", "cuMemAllocFromPoolAsync"}
# Numbers that stand for an enumeration.
_FLAGS = {"cuStreamCreate": "CUstream_flags", "cuEventCreate": "CUevent_flags"}
# A handle that one of these returns is new, whatever had its address before.
_MAKES_NEW = re.compile(r"Create|Instantiate|EndCapture|ModuleLoad|GetFunction")

# Loaded functions by their handles: the driver knows no parameter names.
_kernels: dict[int, KernelSpec] = {}


def name_kernel(handle: Any, spec: KernelSpec) -> None:
    """Says which kernel a function handle stands for, until `forget_kernel`."""
    _kernels[int(handle)] = spec


def forget_kernel(handle: Any) -> None:
    """The handle's module has been unloaded."""
    _kernels.pop(int(handle), None)


class Decoder:
    """Gives handles numbers in the order in which they appear: "event 3". One a recording."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], str] = {}
        self._counts: Counter[str] = Counter()

    def arguments(self, name: str, args: tuple[Any, ...]) -> dict[str, Any]:
        """The arguments of a call by the names that CUDA's documentation gives them."""
        if name == "cuLaunchKernelEx" and int(args[1]) in _kernels:
            return self._launch(args[0], _kernels[int(args[1])], args[2])
        names = _parameters(function(name))
        if len(names) < len(args):  # not the bindings' own: a test's, for example
            names = tuple(str(i) for i in range(len(args)))
        return {n: self._value(name, n, arg) for n, arg in zip(names, args, strict=False)}

    def result(self, name: str, values: tuple[Any, ...]) -> Any:
        """What a call returned besides its status: None, one value or a tuple."""
        decoded = tuple(self._result(name, value) for value in values)
        return decoded[0] if len(decoded) == 1 else decoded or None

    def _result(self, name: str, value: Any) -> Any:
        kind = _HANDLES.get(type(value).__name__)
        if kind is not None and _MAKES_NEW.search(name):
            self._numbers.pop((kind, int(value)), None)
        if name in _ADDRESS_RESULTS and value is not None:
            return hex(int(value))
        return self._value(name, "", value)

    def _value(self, call: str, param: str, value: Any) -> Any:
        if call in _FLAGS and param == "Flags":
            return getattr(driver_api(), _FLAGS[call])(value).name
        if isinstance(value, enum.Enum):
            return value.name
        if param in _ADDRESSES:
            return hex(int(value))
        if value is None or isinstance(value, (bool, int, float, str)):
            return getattr(value, "name", value)  # the bindings have int enumerations of their own
        if isinstance(value, bytearray):  # for the call to write into
            return f"<{len(value)} bytes>"
        if isinstance(value, bytes):
            return _text(value)
        if isinstance(value, (tuple, list)):
            shown = [self._value(call, "", item) for item in value[:LONGEST_LIST]]
            more = len(value) - len(shown)
            return [*shown, f"... {more} more"] if more else shown
        return self._object(call, value)

    def _object(self, call: str, value: Any) -> Any:
        """A handle, a number that the bindings wrap, or a structure."""
        kind = type(value).__name__
        if kind == "CUdeviceptr":
            return hex(int(value))
        if kind == "CUfunction" and int(value) in _kernels:
            return _kernels[int(value)].name
        if kind in _HANDLES:
            return self._number(_HANDLES[kind], int(value))
        if hasattr(value, "__int__"):
            return int(value)
        fields = {n: self._value(call, n, item) for n, item in _fields(value)}
        return {n: item for n, item in fields.items() if item not in (0, "0x0", [], {}, "", None)}

    def _number(self, kind: str, handle: int) -> str:
        if (kind, handle) not in self._numbers:
            self._counts[kind] += 1
            self._numbers[kind, handle] = f"{kind} {self._counts[kind]}"
        return self._numbers[kind, handle]

    def _launch(self, config: Any, spec: KernelSpec, pointers: int) -> dict[str, Any]:
        """A launch as the driver gets it: the arguments are read from the memory it reads."""
        return {
            "kernel": spec.name,
            "grid": [config.gridDimX, config.gridDimY, config.gridDimZ],
            "block": [config.blockDimX, config.blockDimY, config.blockDimZ],
            "sharedMemBytes": config.sharedMemBytes,
            "hStream": self._value("", "hStream", config.hStream),
            "attributes": [attribute.id.name for attribute in config.attrs],
            "arguments": _kernel_arguments(spec, pointers),
        }


def _kernel_arguments(spec: KernelSpec, pointers: int) -> dict[str, Any]:
    params = spec.kernel.params
    values = (ctypes.c_uint64 * len(params)).from_address(pointers)
    found: dict[str, Any] = {}
    for (kind, name), address in zip(params, values, strict=True):
        form = "<" + PARAM_FORMATS[kind]
        (value,) = struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))
        if kind == "f32":
            value = float(f"{value:.7g}")  # its digits: 1e-05, not 9.999999747378752e-06
        elif kind == "ptr":
            value = hex(value)
        elif kind == "map":
            value = described(value)
        found[name] = value
    return found


@cache
def _parameters(call: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(
        name
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    )


def _fields(structure: Any) -> list[tuple[str, Any]]:
    """The public fields of a structure that the bindings can read."""
    found = []
    for name, _ in inspect.getmembers(type(structure), inspect.isdatadescriptor):
        if not name.startswith("_"):
            try:
                found.append((name, getattr(structure, name)))
            except ValueError:  # an enumeration that was left at no member of it
                continue
    return found


def _text(value: bytes) -> str:
    """Bytes as text where they are text and short, else their number; a closing zero is cut."""
    text = value.rstrip(b"\0")
    if len(text) <= LONGEST_TEXT and text.isascii() and text.decode().isprintable():
        return text.decode()
    return f"<{len(value)} bytes>"
