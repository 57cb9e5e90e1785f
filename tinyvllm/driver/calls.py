"""The one checked path to every function of the CUDA driver and of NVRTC.

`call("cuMemGetInfo")` checks the status and returns the bare result. The bindings are imported
on first use, so that importing tinyvllm needs neither them nor a driver. `recorder.py` listens.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

PHASES = (
    "start-up",
    "weights",
    "compile",
    "capture",
    "prefill",
    "decode",
    "swap",
    "shut-down",
)


@cache
def driver_api() -> Any:
    """The `cuda.bindings.driver` module: its structures and constants; functions go by `call`."""
    from cuda.bindings import driver

    return driver


@cache
def nvrtc_api() -> Any:
    """The `cuda.bindings.nvrtc` module."""
    from cuda.bindings import nvrtc

    return nvrtc


class _Functions(dict[str, Callable[..., tuple[Any, ...]]]):
    """Function by name, looked up in the bindings once. Tests put their own functions in."""

    def __missing__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        module = nvrtc_api() if name.startswith("nvrtc") else driver_api()
        function: Callable[..., tuple[Any, ...]] = getattr(module, name)
        self[name] = function
        return function


_functions = _Functions()
# While calls are recorded: what calls a function instead (see recorder.py).
_recorder: Callable[[str, tuple[Any, ...]], tuple[Any, ...]] | None = None
_phase: ContextVar[str] = ContextVar("phase", default="start-up")


class CudaError(RuntimeError):
    """A CUDA or NVRTC function failed.

    `function` was called with `arguments` and returned `status` (int), which CUDA calls `name`
    and explains by `explanation`. `detail` says what was being done (a kernel, for example).
    """

    def __init__(
        self,
        function: str,
        status: int,
        name: str,
        explanation: str,
        arguments: tuple[Any, ...],
        detail: str = "",
    ) -> None:
        self.function, self.status = function, status
        self.name, self.explanation, self.arguments = name, explanation, arguments
        shown = ", ".join(str(plain(a)) for a in arguments)
        suffix = f"; {detail}" if detail else ""
        super().__init__(f"{function}({shown}) failed: {name}: {explanation}{suffix}")

    def with_detail(self, detail: str) -> CudaError:
        """The same error, saying in addition what was being done."""
        return CudaError(
            self.function, self.status, self.name, self.explanation, self.arguments, detail
        )


class CompileError(RuntimeError):
    """NVRTC refused a kernel; `log` is the compiler's output, which the message carries too."""

    def __init__(self, what: str, log: str) -> None:
        self.log = log
        super().__init__(f"{what} does not compile:\n{log}")


def call(name: str, *args: Any) -> Any:
    """Calls a driver or NVRTC function; raises CudaError unless it succeeds.

    Returns what the function returns besides its status: nothing, one value or a tuple.
    """
    # One comparison is all that recording costs while it is off: launches come through here.
    if _recorder is None:
        result = _functions[name](*args)
    else:
        result = _recorder(name, args)
    if result[0]:
        raise _error(name, result[0], args)
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


def succeeds(name: str, *args: Any, unless: str) -> bool:
    """Like `call` for a function where the error `unless` is an answer: then it returns False."""
    try:
        call(name, *args)
    except CudaError as error:
        if error.name == unless:
            return False
        raise
    return True


def _error(function: str, status: Any, args: tuple[Any, ...]) -> CudaError:
    if function.startswith("nvrtc"):
        _, text = _functions["nvrtcGetErrorString"](status)
        return CudaError(function, int(status), _text(text), "NVRTC", args)
    name_code, name = _functions["cuGetErrorName"](status)
    text_code, text = _functions["cuGetErrorString"](status)
    known = not name_code and not text_code
    return CudaError(
        function,
        int(status),
        _text(name) if known else f"status {int(status)}",
        _text(text) if known else "unknown to this driver",
        args,
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def set_recorder(
    recorder: Callable[[str, tuple[Any, ...]], tuple[Any, ...]] | None,
) -> None:
    """Has every call go through `recorder`, which makes it and returns its result; None: none."""
    global _recorder
    _recorder = recorder


def function(name: str) -> Callable[..., tuple[Any, ...]]:
    """The function of that name, unchecked: for a recorder."""
    return _functions[name]


def current_phase() -> str:
    """The phase that this thread's calls belong to."""
    return _phase.get()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Calls of this thread belong to phase `name` (one of PHASES) while the context is open."""
    assert name in PHASES, name
    token = _phase.set(name)
    try:
        yield
    finally:
        _phase.reset(token)


def plain(value: Any) -> Any:
    """A value as a message shows it: handles as int, enumerations by name, long bytes by length."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return getattr(value, "name", value)  # the bindings have int enumerations of their own
    if isinstance(value, (bytes, bytearray)):
        return value.decode("latin-1") if len(value) <= 64 else f"<{len(value)} bytes>"
    if isinstance(value, (tuple, list)):
        return tuple(plain(item) for item in value)
    if hasattr(value, "__int__"):
        return int(value)
    return f"{type(value).__name__}({', '.join(str(value).splitlines())})"  # a structure
