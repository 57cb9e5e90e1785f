"""Skips GPU tests where CUDA cannot be used, and opens the device once for those that run."""

from collections.abc import Iterator

import pytest

from tinyvllm.driver.device import Device, Stream, cuda_unavailable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := cuda_unavailable()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    with Device(0) as opened:
        yield opened


@pytest.fixture(scope="session")
def stream(device: Device) -> Iterator[Stream]:
    with Stream() as opened:
        yield opened
