"""`tinyvllm kernel`: what a kernel uses, whether it is right, and its time next to its floor."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from tinyvllm.bench.floors import device_rates
from tinyvllm.bench.kernel_errors import reference_errors
from tinyvllm.bench.kernels import KernelBench, op_label
from tinyvllm.bench.synthetic import check_steps, decode_dims, prefill_dims
from tinyvllm.config import EngineConfig
from tinyvllm.driver.cache import CompiledKernel
from tinyvllm.driver.compiler import compile_all
from tinyvllm.driver.device import cuda_unavailable
from tinyvllm.driver.devices import DEVICES
from tinyvllm.driver.spec import DeviceInfo, KernelSpec, Launch
from tinyvllm.engine.sizing import engine_limits, engine_programs, model_dtype
from tinyvllm.model.hub import resolve_model
from tinyvllm.ops.executor import described, writes_nothing
from tinyvllm.ops.program import Op, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType, InputError, ceil_div

HEADROOM = 64  # tokens of a row beyond its context, while it is timed


@dataclass(frozen=True)
class Use:
    """An op of a step that launches the kernel, with all its launches; `count` such are run."""

    label: str
    op: Op
    launches: list[Launch]
    count: int


def find_uses(
    program: Program, dims: Mapping[str, int], act: DType, info: DeviceInfo, name: str
) -> list[Use]:
    """The ops of a program whose launches have `name` in the kernel's name or file, one of each
    kind and role."""
    uses: dict[str, Use] = {}
    for op in program.ops:
        if writes_nothing(program, op, dims):
            continue
        launches = op_def(op.kind).launches(described(program, op, dims, act), info)
        if any(name in one.spec.name or name in one.spec.kernel.file for one in launches):
            label = op_label(op)
            before = uses.get(label)
            uses[label] = Use(label, op, launches, before.count + 1 if before else 1)
    return list(uses.values())


def show_kernel(
    config: EngineConfig,
    name: str,
    *,
    source: str | None,
    phase: str,
    sampler: str,
    batch: int,
    context: int,
    arch: str,
    sass: bool,
) -> bool:
    """Prints it all for each op of a step that launches the kernel; False if one is wrong.

    Without a GPU: what the kernels use on `arch`. `source` is compiled in place of their file.
    """
    config = _for_step(config, phase, batch, context)
    model = resolve_model(config.model, config.load_format, config.revision)
    program = next(
        p
        for p in engine_programs(config, model.config, primitive=False)
        if p.name == f"{phase}.{sampler}"
    )
    longest = context + HEADROOM
    sizes = decode_dims(batch, longest) if phase == "decode" else prefill_dims(batch, context)
    assert config.max_model_len is not None and config.num_gpu_blocks_override is not None
    limits = engine_limits(config, config.max_model_len, config.num_gpu_blocks_override)
    act = model_dtype(config, model.config)
    dims, info = {**limits, **sizes}, DEVICES[arch]
    uses = find_uses(program, dims, act, info, name)
    if not uses:
        launched = [one for use in find_uses(program, dims, act, info, "") for one in use.launches]
        names = ", ".join(sorted({one.spec.kernel.entry for one in launched}))
        raise InputError(
            f"{name}: no kernel of a {program.name} step has this in its name or file; it has "
            f"{names} (other steps: --phase, --sampler, --batch, --model)"
        )
    change = _changed(source)
    specs = {change(one).spec: one.smem for use in uses for one in use.launches}
    for spec, compiled in compile_all(specs, arch).items():
        _print_resources(spec, compiled, specs[spec], arch)
        if sass:
            print(disassembled(compiled.image))
    if reason := cuda_unavailable():
        print(f"neither checked nor timed: {reason}")
        return True
    _, rates = device_rates(config)
    right = True
    with closing(KernelBench(replace(config, device="cuda"), rates)) as bench:
        for use in uses:
            right &= _measure(bench, use, change, (phase, sampler, batch, context))
    return right


def disassembled(image: bytes) -> str:
    """The machine code as text; InputError where CUDA's `cuobjdump` is missing."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        raise InputError("--sass needs cuobjdump, of the CUDA toolkit, on the PATH")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        run = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True)
    if run.returncode:
        raise InputError(f"{tool}: {run.stderr.strip()}")
    return run.stdout


def _for_step(config: EngineConfig, phase: str, batch: int, context: int) -> EngineConfig:
    """With room for the step, and no more KV blocks than it needs: they are read back.

    InputError for a step without rows or tokens.
    """
    check_steps([batch], [context])
    longest = context + HEADROOM
    tokens = batch * context if phase == "prefill" else batch
    return replace(
        config,
        max_model_len=longest,
        max_num_seqs=max(config.max_num_seqs, batch),
        max_num_batched_tokens=max(config.max_num_batched_tokens, tokens),
        num_gpu_blocks_override=batch * ceil_div(longest, config.block_size),
    )


def _changed(source: str | None) -> Callable[[Launch], Launch]:
    """Launches of the kernel in another file, which must declare it alike."""
    if source is None:
        return lambda launch: launch
    path = str(Path(source).resolve())

    def change(launch: Launch) -> Launch:
        kernel = replace(launch.spec.kernel, file=path)
        return replace(launch, spec=replace(launch.spec, kernel=kernel))

    return change


def _print_resources(spec: KernelSpec, compiled: CompiledKernel, smem: int, arch: str) -> None:
    print(f"{spec.name} ({Path(spec.kernel.file).name}, {arch})")
    if used := compiled.resources:
        spills = used.spill_stores + used.spill_loads
        print(
            f"  {used.registers} registers, {used.static_smem} + {smem} bytes of shared memory, "
            f"{used.stack} of stack, {spills} spilled; {len(compiled.image)} bytes of cubin"
        )


def _measure(
    bench: KernelBench,
    use: Use,
    change: Callable[[Launch], Launch],
    step: tuple[str, str, int, int],
) -> bool:
    """Checks and times one op of the step; prints what it found."""
    phase, sampler, _, context = step
    batch = bench.set_step(*step)
    program, executor = bench.programs[f"{phase}.{sampler}"], bench.executor
    act = executor.array("kv_cache").dtype
    by_op = executor.launches_by_op(program.name, batch.dims)
    alike = [(op, ready) for op, ready in by_op if op_label(op) == use.label]
    changed = [executor.prepare(change(one.launch) for one in ready) for _, ready in alike]
    first = alike[0][0]
    for op, launches in by_op:
        if op is first:
            break
        for launch in launches:
            launch.run(executor.stream)
    inside = [n for part in (first, *first.parts) for n in part.operands.values()]
    local = {b.name for b in first.local}
    held = [n for n in inside if n in program.buffers and n not in local]
    names = {program.root(n) for n in held} | {n for n in inside if n in program.weights}
    before = {n: executor.read(program.name, batch.dims, n) for n in names}
    for launch in changed[0]:
        launch.run(executor.stream)
    written = program.accesses(first)[1]
    after = {n: executor.read(program.name, batch.dims, n) for n in written}
    sizes = {**bench.limits, **batch.dims}
    errors = reference_errors(program, first, sizes, before, after, act)
    cost, floor = bench.floor(program, first, batch, context)
    us = bench.cycle_seconds([one for ready in changed for one in ready]) / len(alike) * 1e6
    print(f"{use.label}: {len(alike)} in a step, grid {changed[0][0].launch.grid}")
    print(
        f"  {us:.2f} us, floor {floor * 1e6:.2f} us, ratio {us / floor / 1e6:.2f}; "
        f"{cost.bytes / us / 1e6:.2f} TB/s, {cost.flops / us / 1e6:.1f} TFLOP/s"
    )
    for e in errors:
        print(
            f"  {e.output}: error {e.error:.2e} where values reach {e.scale:.2e}, rounding alone "
            f"{e.rounded:.2e}: {'right' if e.ok else 'WRONG'}"
        )
    return all(e.ok for e in errors)
