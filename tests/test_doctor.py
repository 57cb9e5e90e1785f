import json

import pytest

from tinyvllm import doctor
from tinyvllm.doctor import run_doctor


def lines_of(**kwargs):
    lines = []
    status = run_doctor(write=lines.append, **kwargs)
    return status, lines


def test_without_a_gpu_a_kernel_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TINYVLLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "cuda_unavailable", lambda: "The NVIDIA driver sees no GPU.")
    status, lines = lines_of()
    assert status == 0
    assert any(line.startswith("none") and "runs on the CPU" in line for line in lines)
    assert any("compiled for sm_90a" in line for line in lines)


def test_a_driver_that_cannot_be_used_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setenv("TINYVLLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "cuda_unavailable", lambda: "Driver 580 is needed.")
    status, lines = lines_of()
    assert status == 1
    assert any(line.startswith("problem") and "Driver 580" in line for line in lines)


def test_problems_are_counted_and_explained(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TINYVLLM_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(doctor, "cuda_unavailable", lambda: "The NVIDIA driver sees no GPU.")
    status, lines = lines_of()
    assert status == 1
    (problem,) = [line for line in lines if line.startswith("problem")]
    assert "kernel cache" in problem and "set TINYVLLM_CACHE_DIR" in problem


@pytest.mark.gpu
def test_on_the_gpu_a_kernel_runs():
    status, lines = lines_of()
    assert status == 0, lines
    assert any("run and checked" in line for line in lines)


def test_json_has_every_check(monkeypatch, tmp_path):
    monkeypatch.setenv("TINYVLLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "cuda_unavailable", lambda: "Driver 580 is needed.")
    status, lines = lines_of(as_json=True)
    (line,) = lines
    result = json.loads(line)
    assert status == 1 and result["problems"] == 1
    (gpu,) = [check for check in result["checks"] if check["name"] == "GPU"]
    assert gpu["state"] == "problem" and "Driver 580" in gpu["text"]
