"""`tinyvllm bench matmul`: products alone, next to their floor and to a rival."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tinyvllm.bench.floors import Rates, device_rates
from tinyvllm.bench.op_bench import OpBench, opened_device
from tinyvllm.bench.rivals import Rival, in_turns, load_rival
from tinyvllm.config import EngineConfig, check_int
from tinyvllm.driver.device import Device
from tinyvllm.model.config import ModelConfig
from tinyvllm.model.hub import resolve_model
from tinyvllm.ops.executor import described
from tinyvllm.ops.program import OUTPUT, STATE, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType, InputError

PAST_L2 = 256 << 20  # bytes of weights that are taken in turn: none is still in L2
MAX_WEIGHTS = 16
ROUNDS, REPLAYS = 9, 3
# Beyond the rows of x, as it has in an engine: where it has none, copies by TMA reach beyond the
# array's end, which takes longer (K = 8192, N = 2048, 288 rows: 35 us instead of 28).
ROOM = 256


@dataclass(frozen=True)
class ProductTime:
    """x [rows, k] times weight [n, k] transposed; `rival_us`: by the rival, if there is one."""

    rows: int
    n: int
    k: int
    kernel: str
    us: float
    floor_us: float
    tflops: float
    rival_us: float | None = None


def model_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """(N, K) of a layer's products: QKV, output, gate and up, down."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    return [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]


def bench_matmul(
    config: EngineConfig,
    rows: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    *,
    rival: str | None,
    as_json: bool,
) -> None:
    """Times products of each number of rows with weights of each shape (N, K).

    Without shapes, those of the model's layers. With a `rival`, the path of a file, in turns with
    it on the same arrays. InputError for sizes that no model or step has.
    """
    if not shapes:
        model = resolve_model(config.model, config.load_format, config.revision)
        shapes = model_shapes(model.config)
    for count in rows:
        check_int("rows", count, 1, 1 << 20)
    for n, k in shapes:
        check_int("N", n, 1, 1 << 22)
        check_int("K", k, 8, 1 << 20)
        if k % 8:
            raise InputError(f"K={k}: must be a multiple of 8")
    found = []
    with opened_device(config, "bench matmul") as (device, dtype):
        name, rates = device_rates(config)
        other = load_rival(rival, device.index) if rival else None
        if not as_json:
            print(f"{name}, {dtype.value}, copies at {rates.copy / 1e12:.2f} TB/s")
            print(_head(rival is not None))
        for count, (n, k) in itertools.product(rows, shapes):
            with ProductBench(device, dtype, count, n, k) as bench:
                found.append(bench.measure(rates, other))
            if not as_json:
                print(_line(found[-1]), flush=True)
        if as_json:
            head = {"device": name, "dtype": dtype.value, **rates.figures()}
            print(json.dumps({**head, "rows": [asdict(row) for row in found]}))


def product_program(n: int, k: int, count: int) -> Program:
    """Products of the same x with `count` weights."""
    p = Program("matmul")
    p.buffer("x", ("T", k), None, STATE)
    p.buffer("y", ("T", n), None, OUTPUT)
    for i in range(count):
        p.buffer(f"weight_{i}", (n, k), None, STATE)
        p.emit("matmul", x="x", weight=f"weight_{i}", y="y")
    return p


class ProductBench(OpBench):
    """Weights of one shape, as many as do not fit into L2, and x."""

    def __init__(self, device: Device, dtype: DType, rows: int, n: int, k: int) -> None:
        count = max(1, min(MAX_WEIGHTS, PAST_L2 // (n * k * dtype.itemsize)))
        self._program = product_program(n, k, count)
        super().__init__(device, self._program, {"T": rows}, dtype, {"x": ROOM})
        self._weights = [f"weight_{i}" for i in range(count)]
        self._shape, self._dtype = (rows, n, k), dtype
        self.fill("x")
        for weight in self._weights:
            self.fill(weight, scale=k**-0.5)

    def measure(self, rates: Rates, rival: Rival | None) -> ProductTime:
        """The product's time, and the rival's."""
        rows, n, k = self._shape
        launches = self.launches()
        graph = self.graph(launches)
        runs = [lambda: self.seconds(graph, REPLAYS) / len(launches)]
        if rival:
            weights = [self.executor.array(weight) for weight in self._weights]
            runs.append(rival.products(self.executor.array("x"), weights, REPLAYS))
        us, *others = (seconds * 1e6 for seconds in in_turns(runs, ROUNDS))
        op = self._program.ops[0]
        cost = op_def(op.kind).cost(described(self._program, op, self.dims, self._dtype))
        return ProductTime(
            rows,
            n,
            k,
            kernel=launches[0].launch.spec.name,
            us=us,
            floor_us=rates.floor(cost.bytes, cost.flops) * 1e6,
            tflops=cost.flops / us / 1e6,
            rival_us=others[0] if others else None,
        )


def _head(rival: bool) -> str:
    head = f"{'rows':>6} {'N':>7} {'K':>6} {'us':>9} {'floor':>8} {'ratio':>6} {'TFLOP/s':>8}"
    return f"{head} {'rival':>8} {'times':>6}  kernel" if rival else f"{head}  kernel"


def _line(row: ProductTime) -> str:
    line = (
        f"{row.rows:>6} {row.n:>7} {row.k:>6} {row.us:>9.2f} {row.floor_us:>8.2f} "
        f"{row.us / row.floor_us:>6.2f} {row.tflops:>8.1f}"
    )
    if row.rival_us is not None:
        line += f" {row.rival_us:>8.2f} {row.rival_us / row.us:>6.3f}"
    return f"{line}  {row.kernel}"
