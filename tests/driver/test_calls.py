import re
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm.driver import calls
from tinyvllm.driver.calls import CudaError, call, plain, succeeds

pytestmark = pytest.mark.usefixtures("few_functions")


class Handle:
    def __int__(self):
        return 4096


def test_results_come_bare():
    assert call("cuNothing") is None
    assert call("cuOne", 4) == 5
    assert call("cuTwo") == (3, 4)


def test_failure_says_function_arguments_name_and_explanation():
    with pytest.raises(CudaError) as caught:
        call("cuBusy", Handle())
    assert str(caught.value) == "cuBusy(4096) failed: NOT_READY: the device is busy"
    assert (caught.value.status, caught.value.name) == (600, "NOT_READY")
    assert "; loading k" in str(caught.value.with_detail("loading k"))


def test_expected_status_is_an_answer():
    assert succeeds("cuNothing", unless="NOT_READY")
    assert not succeeds("cuBusy", Handle(), unless="NOT_READY")
    with pytest.raises(CudaError):
        succeeds("cuBusy", Handle(), unless="OTHER")


def test_plain_values(few_functions):
    assert plain(few_functions.NOT_READY) == "NOT_READY"
    assert plain(b"x" * 100) == "<100 bytes>"
    assert plain([b"ab", Handle(), None, 2.5]) == ("ab", 4096, None, 2.5)


def test_bindings_are_imported_on_first_use_only():
    code = (
        "import sys, tinyvllm.driver.kernel, tinyvllm.driver.graph, tinyvllm.memory.upload\n"
        "sys.exit(any(m.startswith('cuda') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_bindings_are_imported_in_one_place():
    package = Path(calls.__file__).parents[1]
    pattern = re.compile(r"^\s*(from|import) cuda[. ]", re.MULTILINE)
    importers = [p.name for p in package.rglob("*.py") if pattern.search(p.read_text())]
    assert importers == ["calls.py"]
