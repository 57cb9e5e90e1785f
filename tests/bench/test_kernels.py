"""`bench kernels`: floors, labels, what it prints and draws; on a GPU, all of it."""

import json
import math
from xml.etree import ElementTree

import pytest

from tinyvllm.bench import kernels
from tinyvllm.bench.roofline import roofline_svg
from tinyvllm.cli.main import main
from tinyvllm.model.presets import PRESETS
from tinyvllm.model.programs import step_program
from tinyvllm.ops.lower import lower

PRODUCT = kernels.OpTime("matmul o_proj", 16, 1, 4.0, 2.0, 8_000_000, 16_000_000, 0.64)
NORM = kernels.OpTime("rms_norm", 36, 2, 1.0, 0.5, 8192, 0, 0.36)


def test_ops_of_all_layers_share_a_label_and_products_are_told_apart():
    program = step_program(PRESETS["llama-3.2-1b"], "step", block_size=16, phase="decode")
    labels = [kernels.op_label(op) for op in lower(program, "decode").ops]
    products = {label for label in labels if "matmul" in label}
    assert products == {
        "norm_matmul q_proj+",
        "matmul_add o_proj",
        "norm_matmul_silu_mul gate_proj+",
        "matmul_add down_proj",
        "norm_matmul_sample embed_tokens",
    }
    assert labels.count("rope_attention") == labels.count("matmul_add o_proj") == 16


def test_a_step_is_printed_with_rates_and_ratios(capsys):
    step = kernels.StepTime("decode.plain", 2, 300, (PRODUCT, NORM), 0.1, 0.08, 0.05)
    kernels.print_step(step)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "decode.plain, batch 2, context 300"
    assert out[2].split()[2:] == ["16", "1", "4.00", "2.00", "2.00", "2.00", "4.0", "64.0%"]
    assert "one graph of 88 kernels 0.080 ms, floor 0.050 ms, graph / floor 1.60" in out[4]


def test_the_worst_row_counts_are_printed(capsys):
    kernels._print_rows(256, [(n, 16, 1 + n / 100) for n in range(1, 17)])
    out = capsys.readouterr().out
    assert "above 1.10 for 6 of 16, at most 16 in 16: 1.160, 15 in 16: 1.150" in out
    assert "8 in 16" not in out


@pytest.mark.parametrize("flops", [8e14, math.inf])
def test_roofline_has_a_circle_for_each_op_that_computes(flops):
    points = [
        (op.op, op.flops, op.bytes, op.us / 1e6, op.share)
        for op in (PRODUCT, NORM, kernels.OpTime("<b>", 1, 1, 1.0, 1.0, 1, 10**15, 0.0))
    ]
    svg = ElementTree.fromstring(roofline_svg("a < b", 4e12, flops, points))
    space = "{http://www.w3.org/2000/svg}"
    circles = svg.findall(f"{space}circle")
    names = [c.find(f"{space}title").text.partition(":")[0] for c in circles]
    assert names == ["matmul o_proj", "<b>"]
    (line,) = svg.findall(f"{space}polyline")
    assert len(line.get("points").split()) == (3 if flops < math.inf else 2)
    assert all(0 < float(c.get("cx")) < 960 and 0 < float(c.get("cy")) < 560 for c in circles)


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "cuda_unavailable", lambda: "no driver")
    assert main(["bench", "kernels"]) == 1
    assert "bench kernels needs a GPU: no driver" in capsys.readouterr().err


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_bench_kernels(device, capsys, tmp_path, phase):
    svg = tmp_path / "roofline.svg"
    options = ["--phase", phase, "--batch", "2", "--context", "300", "--svg", str(svg), "--json"]
    assert main(["bench", "kernels", *options]) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert 0 < step["floor_ms"] < step["graph_ms"] < 2 * step["sum_ms"]
    assert sum(op["share"] for op in step["ops"]) == pytest.approx(1)
    assert all(op["us"] > 0.9 * op["floor_us"] for op in step["ops"] if op["share"] > 0.1)
    ElementTree.parse(svg)
