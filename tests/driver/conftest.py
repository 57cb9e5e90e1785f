"""A few functions in place of the driver's, for tests of what surrounds every call."""

import enum

import pytest

from tinyvllm.driver import calls


class Status(enum.IntEnum):
    SUCCESS = 0
    NOT_READY = 600


@pytest.fixture
def few_functions(monkeypatch):
    """Puts them in the driver's place; their status codes."""
    functions = {
        "cuNothing": lambda: (Status.SUCCESS,),
        "cuOne": lambda x: (Status.SUCCESS, x + 1),
        "cuTwo": lambda: (Status.SUCCESS, 3, 4),
        "cuBusy": lambda hEvent: (Status.NOT_READY, None),
        "cuGetErrorName": lambda status: (Status.SUCCESS, status.name.encode()),
        "cuGetErrorString": lambda status: (Status.SUCCESS, b"the device is busy"),
    }
    monkeypatch.setattr(calls, "_functions", calls._Functions(functions))
    return Status
