"""Lowering: a small table of fusion rules that turns primitive ops into the kernels' ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tinyvllm.ops.program import OUTPUT, TEMP, Buffer, Op, Program, Weight
from tinyvllm.util import DType

# Rows of gate and up that alternate in the packed weight: one n8 column tile of an mma holds
# eight of them, so that a thread finds a gate value and its up value in neighbouring tiles.
GATE_UP_INTERLEAVE = 8

# How many ops read each buffer; an output of the program counts as read once more.
Readers = Counter[str]
# A rule looks at ops[i:] and returns (number of ops replaced, their replacement) or None.
Rule = Callable[[Program, list[Op], int, Readers], tuple[int, Op] | None]


def lower(program: Program, phase: str) -> Program:
    """The program with every match of the phase's rules replaced by a fused op.

    A fused op keeps the primitives it replaced as its reference. Phases: "primitive" (no rule),
    "prefill" and "decode".
    """
    ops = program.ops
    lowered = replace(program, buffers=dict(program.buffers), weights=dict(program.weights))
    for rule in RULES[phase]:
        readers = Counter(name for op in ops for name in lowered.accesses(op)[0])
        readers.update(b.name for b in lowered.of_kind(OUTPUT))
        result, i = [], 0
        while i < len(ops):
            match = rule(lowered, ops, i, readers)
            count, op = match if match else (1, ops[i])
            result.append(op)
            i += count
        ops = result
    return lowered.with_ops(ops)


def merge_qkv(p: Program, ops: list[Op], i: int, readers: Readers) -> tuple[int, Op] | None:
    """Products of one input that follow each other become one product with stacked weights.

    Their outputs turn into column views of the joint output.
    """
    parts = []
    for op in ops[i:]:
        if op.kind != "matmul" or op.operands["x"] != ops[i].operands["x"]:
            break
        if p.buffers[op.operands["y"]].kind != TEMP:
            break  # an output of the program cannot be a view
        parts.append(op)
    if len(parts) < 2 or len({"bias" in op.operands for op in parts}) > 1:
        return None
    first = p.buffers[parts[0].operands["y"]]
    widths = [int(p.buffers[op.operands["y"]].shape[-1]) for op in parts]
    y = p.buffer(f"{first.name}+", (first.shape[0], sum(widths)), first.dtype)
    column = 0
    for op, width in zip(parts, widths, strict=True):
        name = op.operands["y"]
        p.buffers[name] = replace(p.buffers[name], parent=y, column=column)
        column += width
    return len(parts), Op("matmul", {**_packed(p, parts), "y": y}, {}, tuple(parts))


def fuse_rope_kv_write(
    p: Program, ops: list[Op], i: int, readers: Readers
) -> tuple[int, Op] | None:
    """RoPE of q and k and the KV write, where q, k and v are columns of one buffer in order."""
    if [op.kind for op in ops[i : i + 3]] != ["rope", "rope", "kv_write"]:
        return None
    rope_q, rope_k, write = ops[i : i + 3]
    columns = [
        p.buffers[n] for n in (rope_q.operands["x"], rope_k.operands["x"], write.operands["v"])
    ]
    joint = columns[0].parent
    adjacent = joint is not None and all(
        c.parent == joint and c.column == sum(int(b.shape[-1]) for b in columns[:n])
        for n, c in enumerate(columns)
    )
    k_roped = rope_k.operands["y"]
    alike = (
        all(rope_k.operands[n] == rope_q.operands[n] for n in ("positions", "inv_freq"))
        and write.operands["positions"] == rope_q.operands["positions"]
    )
    if not (adjacent and alike) or write.operands["k"] != k_roped or readers[k_roped] != 1:
        return None
    operands = {
        "qkv": str(joint),
        "q": rope_q.operands["y"],
        "inv_freq": rope_q.operands["inv_freq"],
        **{n: write.operands[n] for n in ("positions", "token_slots", "block_tables", "kv_cache")},
    }
    fused = Op(
        "rope_kv_write", operands, write.attrs, (rope_q, rope_k, write), (p.buffers[k_roped],)
    )
    return 3, fused


def fuse_rope_attention(
    p: Program, ops: list[Op], i: int, readers: Readers
) -> tuple[int, Op] | None:
    """RoPE and KV write in the attention that follows them; for rows of one token each."""
    if [op.kind for op in ops[i : i + 2]] != ["rope_kv_write", "attention"]:
        return None
    write, attention = ops[i : i + 2]
    q = write.operands["q"]
    same = all(
        attention.operands[n] == write.operands[n] for n in ("kv_cache", "block_tables")
    ) and all(attention.attrs[n] == write.attrs[n] for n in ("layer", "group"))
    if not same or attention.operands["q"] != q or readers[q] != 1:
        return None
    operands = {**write.operands, **attention.operands}
    del operands["q"]
    local = (*write.local, p.buffers[q])
    fused = Op("rope_attention", operands, attention.attrs, (*write.parts, attention), local)
    return 2, fused


def fuse_qkv(p: Program, ops: list[Op], i: int, readers: Readers) -> tuple[int, Op] | None:
    """RoPE and KV write in the product that makes q, k and v."""
    if [op.kind for op in ops[i : i + 2]] != ["matmul", "rope_kv_write"]:
        return None
    matmul, write = ops[i : i + 2]
    qkv = matmul.operands["y"]
    if write.operands["qkv"] != qkv or readers[qkv] != 1:
        return None
    operands = {**matmul.operands, **write.operands}
    del operands["y"], operands["qkv"]
    local = (*(b for b in p.buffers.values() if b.parent == qkv), *write.local)
    parts = (*matmul.parts, *write.parts)
    return 2, Op("matmul_rope_kv_write", operands, write.attrs, parts, local)


def fuse_silu_mul(p: Program, ops: list[Op], i: int, readers: Readers) -> tuple[int, Op] | None:
    """Gate and up products with the SiLU product in the epilogue, weight rows interleaved."""
    if [op.kind for op in ops[i : i + 3]] != ["matmul", "matmul", "silu_mul"]:
        return None
    gate, up, act = ops[i : i + 3]
    products = [gate.operands["y"], up.operands["y"]]
    if (
        gate.operands["x"] != up.operands["x"]
        or [act.operands["gate"], act.operands["up"]] != products
        or ("bias" in gate.operands) != ("bias" in up.operands)
        or any(readers[n] != 1 for n in products)
        or p.weights[gate.operands["weight"]].shape[0] % GATE_UP_INTERLEAVE
    ):
        return None
    operands = {**_packed(p, [gate, up], GATE_UP_INTERLEAVE), "y": act.operands["y"]}
    return 3, Op("matmul_silu_mul", operands, {}, (gate, up, act), _locals(p, products))


def fuse_matmul_add(p: Program, ops: list[Op], i: int, readers: Readers) -> tuple[int, Op] | None:
    """Residual add in the epilogue of the product."""
    if [op.kind for op in ops[i : i + 2]] != ["matmul", "add"]:
        return None
    matmul, add = ops[i : i + 2]
    product = matmul.operands["y"]
    others = [n for n in (add.operands["a"], add.operands["b"]) if n != product]
    if len(others) != 1 or readers[product] != 1:
        return None
    operands = {**matmul.operands, "residual": others[0], "y": add.operands["y"]}
    return 2, Op("matmul_add", operands, {}, (matmul, add), _locals(p, [product]))


def fuse_norm(p: Program, ops: list[Op], i: int, readers: Readers) -> tuple[int, Op] | None:
    """Norm in the one product that reads it."""
    if len(ops) < i + 2 or ops[i].kind != "rms_norm":
        return None
    norm, product = ops[i : i + 2]
    normed = norm.operands["y"]
    if product.kind not in ("matmul", "matmul_silu_mul") or readers[normed] != 1:
        return None
    if product.operands["x"] != normed or p.buffers[normed].kind != TEMP:
        return None
    operands = {
        **product.operands,
        "x": norm.operands["x"],
        "norm_weight": norm.operands["weight"],
    }
    parts = (norm, *(product.parts or (product,)))
    local = (p.buffers[normed], *product.local)
    return 2, Op(f"norm_{product.kind}", operands, norm.attrs, parts, local)


def fuse_sample(p: Program, ops: list[Op], i: int, readers: Readers) -> tuple[int, Op] | None:
    """Plain sampling in the product that makes the logits for it alone."""
    if len(ops) < i + 2 or ops[i].kind not in ("matmul", "norm_matmul"):
        return None
    product, sample = ops[i : i + 2]
    logits = product.operands["y"]
    if sample.kind != "sample" or sample.attrs["filtered"] or sample.operands["logits"] != logits:
        return None
    if readers[logits] != 1 or "bias" in product.operands or p.buffers[logits].dtype != DType.F32:
        return None
    operands = {**product.operands, **sample.operands}
    del operands["y"], operands["logits"]
    parts = (*(product.parts or (product,)), sample)
    local = (*product.local, p.buffers[logits])
    return 2, Op(f"{product.kind}_sample", operands, product.attrs, parts, local)


def name_ahead(p: Program, ops: list[Op], i: int, readers: Readers) -> tuple[int, Op] | None:
    """Attention learns which large weights are next but one, so that it can bring them to L2: the
    output product between them is short."""
    if ops[i].kind != "rope_attention":
        return None
    gated = next((op for op in ops[i + 1 : i + 4] if op.kind.endswith("matmul_silu_mul")), None)
    if gated is None:
        return None
    return 1, replace(ops[i], operands={**ops[i].operands, "ahead": gated.operands["weight"]})


# The residual is added in the product's epilogue, where the sums are at hand.
COMMON: list[Rule] = [fuse_silu_mul, merge_qkv, fuse_rope_kv_write, fuse_matmul_add]
RULES: dict[str, list[Rule]] = {
    "primitive": [],
    "prefill": [*COMMON, fuse_qkv, fuse_sample],
    "decode": [*COMMON, fuse_rope_attention, fuse_norm, fuse_sample, name_ahead],
}


def _locals(p: Program, names: list[str]) -> tuple[Buffer, ...]:
    return tuple(p.buffers[n] for n in names)


def _packed(p: Program, matmuls: list[Op], interleave: int = 0) -> dict[str, str]:
    """Operands of the product that stands for all `matmuls`, its weights (and biases) packed."""
    operands = {"x": matmuls[0].operands["x"]}
    for operand in ("weight", "bias"):
        if operand not in matmuls[0].operands:
            continue
        parts = [p.weights[op.operands[operand]] for op in matmuls]
        rows = sum(w.shape[0] for w in parts)
        packed = Weight(
            "+".join(w.name for w in parts),
            (rows, *parts[0].shape[1:]),
            tuple(w.name for w in parts),
            interleave,
            parts[0].split_axis,
            parts[0].scheme,
        )
        p.weights[packed.name] = packed
        operands[operand] = packed.name
    return operands
