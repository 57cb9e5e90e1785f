"""`tinyvllm kernel`: finds the ops of a kernel, shows what it uses, compares with the reference."""

from dataclasses import replace

import pytest

from tinyvllm.bench import kernel
from tinyvllm.bench.synthetic import decode_dims
from tinyvllm.cli.main import main
from tinyvllm.driver.compiler import cuda_src_dir
from tinyvllm.driver.devices import DEVICES
from tinyvllm.model.presets import PRESETS
from tinyvllm.model.programs import step_program
from tinyvllm.ops.lower import lower
from tinyvllm.util import DType, InputError

LIMITS = {"SLOTS": 4, "MB": 32, "NB": 64, "E": 4, "B": 8}


def uses_of(name, phase="decode"):
    config = replace(PRESETS["llama-3.2-1b"], num_hidden_layers=3)
    program = lower(step_program(config, "step", block_size=16, phase=phase), phase)
    dims = LIMITS | decode_dims(2, 300) | {"CP": 0}
    return kernel.find_uses(program, dims, DType.BF16, DEVICES["sm_90a"], name)


def test_ops_of_a_kernel():
    (use,) = uses_of("attention_decode")
    assert (use.label, use.count, len(use.launches)) == ("rope_attention", 3, 1)
    (use,) = uses_of("attention_decode.cu", "prefill")
    assert use.label == "attention"
    assert {u.label: u.count for u in uses_of("rms_norm", "prefill")} == {"rms_norm": 7}
    assert {u.label: u.count for u in uses_of("matmul_few_rows")} == {
        "norm_matmul q_proj+": 3,
        "matmul_add o_proj": 3,
        "norm_matmul_silu_mul gate_proj+": 3,
        "matmul_add down_proj": 3,
        "norm_matmul_sample embed_tokens": 1,
    }
    assert uses_of("no such kernel") == []


def test_resources_are_shown_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(kernel, "cuda_unavailable", lambda: "no GPU here")
    assert main(["kernel", "gather_rows"]) == 0
    out = capsys.readouterr().out
    assert "gather_rows_kernel<__nv_bfloat16, 8> (gather_rows.cu, sm_90a)" in out
    assert "registers, 0 + 0 bytes of shared memory, 0 of stack, 0 spilled" in out
    assert "neither checked nor timed: no GPU here" in out


def test_another_source_is_compiled_in_its_place(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel, "cuda_unavailable", lambda: "no GPU here")
    changed = tmp_path / "mine.cu"
    text = (cuda_src_dir() / "gather_rows.cu").read_text()
    changed.write_text(text)
    assert main(["kernel", "gather_rows", "--source", str(changed)]) == 0
    assert "(mine.cu, sm_90a)" in capsys.readouterr().out
    changed.write_text(text.replace("start_next();", "start_nxt();"))
    assert main(["kernel", "gather_rows", "--source", str(changed)]) == 1
    assert "start_nxt" in capsys.readouterr().err


def test_a_kernel_that_no_step_has(capsys):
    assert main(["kernel", "sing"]) == 1
    message = capsys.readouterr().err
    assert "sing: no kernel of a decode.plain step" in message
    assert "it has advance_rows_kernel," in message and "matmul_few_rows_kernel" in message


@pytest.mark.parametrize(
    ("option", "limit"), [("--batch", "from 1 to 4096"), ("--context", "from 1 to 1048576")]
)
def test_a_step_without_rows_or_tokens_is_refused(capsys, option, limit):
    assert main(["kernel", "rms", option, "0"]) == 1
    assert f"{option[2:]}=0: must be {limit}" in capsys.readouterr().err


def test_machine_code_needs_the_toolkit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="cuobjdump"):
        kernel.disassembled(b"")


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize(
    ("name", "batch"), [("attention_decode", "9"), ("rms_norm", "9"), ("matmul", "1")]
)
def test_kernels_are_right_and_timed(capsys, device, name, batch):
    assert main(["kernel", name, "--batch", batch]) == 0
    out = capsys.readouterr().out
    assert "ratio" in out and ": right" in out and "WRONG" not in out
