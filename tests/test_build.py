import importlib.util
import sys
from pathlib import Path

import pytest

from tinyvllm.driver.cache import CompiledKernel, Resources
from tinyvllm.driver.spec import Kernel

SPEC = Kernel("scale.cu", "scale", "ptr x, i32 n")(64)


@pytest.fixture(scope="module")
def build():
    path = Path(__file__).parents[1] / "build.py"
    spec = importlib.util.spec_from_file_location("tinyvllm_build", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def compiled(stack=0, spills=0, static=0):
    return CompiledKernel(b"", "scale", Resources(40, static, stack, spills, spills))


@pytest.mark.parametrize(
    "kernel, dynamic, problems",
    [
        (compiled(), 0, 0),
        (compiled(spills=8), 0, 1),
        (compiled(stack=16), 0, 1),
        (compiled(stack=16, spills=8), 0, 2),
        (compiled(static=1024), 98 * 1024, 0),
        (compiled(static=1024), 98 * 1024 + 1, 1),
    ],
)
def test_problems_of_a_kernel(build, kernel, dynamic, problems):
    assert len(build.inspect("sm_86", SPEC, kernel, dynamic).problems) == problems


def test_shared_memory_limit_is_that_of_the_architecture(build):
    limits = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376}
    limits |= {"sm_90a": 232448, "sm_100": 232448, "sm_120": 101376}
    assert {arch: info.smem_per_block for arch, info in build.DEVICES.items()} == limits
    for arch, limit in limits.items():
        assert not build.inspect(arch, SPEC, compiled(), limit).problems
        assert build.inspect(arch, SPEC, compiled(), limit + 1).problems


def test_explained_kernels_pass(build, monkeypatch):
    monkeypatch.setitem(build.EXPLAINED, ("sm_86", "scale<"), "a table indexed at run time")
    assert not build.inspect("sm_86", SPEC, compiled(stack=16), 0).problems
    assert build.inspect("sm_80", SPEC, compiled(stack=16), 0).problems


def test_largest_dynamic_shared_memory_counts(build):
    launches = [SPEC.launch((1,), 64, smem=size, x=0, n=1) for size in (100, 300, 200)]
    assert build.dynamic_smem(launches) == {SPEC: 300}


def test_check_fails_on_a_spill(build, monkeypatch, tmp_path, capsys):
    source = """
    __global__ void __launch_bounds__(1024, 2) spills(float* x, int n) {
      float v[64];
      for (int i = 0; i < 64; ++i) v[i] = x[i * n + threadIdx.x];
      __syncthreads();
      for (int i = 0; i < 64; ++i) x[i * n + threadIdx.x] = v[i] * v[(i * 7 + 3) % 64];
    }"""
    (tmp_path / "spills.cu").write_text(source)
    spec = Kernel(str(tmp_path / "spills.cu"), "spills", "ptr x, i32 n")()
    monkeypatch.setenv("TINYVLLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "all_launches", lambda info: [spec.launch((1,), 64, x=0, n=1)])
    assert build.main(["--arch", "sm_80"]) == 0
    assert build.main(["--arch", "sm_80,sm_90a", "--check"]) == 1
    assert "spills" in capsys.readouterr().out


def test_unknown_architecture_is_an_error(build, capsys):
    with pytest.raises(SystemExit):
        build.main(["--arch", "sm_75"])
    assert "sm_75" in capsys.readouterr().err
