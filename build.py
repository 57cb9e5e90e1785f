"""Compiles every kernel specialisation ahead of time and reports what each one uses.

    python build.py [--arch sm_80,sm_90a] [--check] [--jobs N]

It needs no GPU. What it compiles goes into the same disk cache that the engine reads. `--check`
fails on a spill, on a stack frame, and on more shared memory than the architecture has.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tinyvllm.driver.cache import CompiledKernel, Resources
from tinyvllm.driver.calls import CompileError
from tinyvllm.driver.compiler import compile_all, nvrtc_version
from tinyvllm.driver.devices import DEVICES
from tinyvllm.driver.spec import KernelSpec, Launch
from tinyvllm.model.catalog import all_launches
from tinyvllm.util import InputError

# Kernels that may spill or have a stack frame: (architecture, start of the name) -> why.
EXPLAINED: dict[tuple[str, str], str] = {}


@dataclass(frozen=True)
class Row:
    """One line of the table: a specialisation on an architecture, and what is wrong with it."""

    arch: str
    name: str
    resources: Resources
    dynamic_smem: int
    problems: tuple[str, ...]


def dynamic_smem(launches: Iterable[Launch]) -> dict[KernelSpec, int]:
    """The specialisations among `launches`, each with its largest dynamic shared memory."""
    sizes: dict[KernelSpec, int] = {}
    for launch in launches:
        sizes[launch.spec] = max(sizes.get(launch.spec, 0), launch.smem)
    return sizes


def inspect(arch: str, spec: KernelSpec, kernel: CompiledKernel, dynamic: int) -> Row:
    """Judges one compiled specialisation by the limits of its architecture."""
    used = kernel.resources
    if used is None:
        return Row(arch, spec.name, Resources(0, 0, 0, 0, 0), dynamic, ("no report from NVRTC",))
    problems = []
    if not any(a == arch and spec.name.startswith(start) for a, start in EXPLAINED):
        if used.spill_stores or used.spill_loads:
            problems.append("spills")
        if used.stack:
            problems.append("stack frame")
    limit = DEVICES[arch].smem_per_block
    if used.static_smem + dynamic > limit:
        problems.append(f"{used.static_smem + dynamic} B of shared memory, the limit is {limit}")
    return Row(arch, spec.name, used, dynamic, tuple(problems))


def build(arch: str, jobs: int | None) -> list[Row]:
    """Compiles all specialisations for one architecture, on each of its kernel paths."""
    device = DEVICES[arch]
    infos = dict.fromkeys((device, replace(device, kernel_path="portable")))
    sizes = dynamic_smem(launch for info in infos for launch in all_launches(info))
    compiled = compile_all(sizes, arch, jobs)
    return [inspect(arch, spec, compiled[spec], size) for spec, size in sizes.items()]


def print_rows(rows: list[Row]) -> None:
    print(
        f"{'arch':<7} {'regs':>4} {'static':>7} {'dynamic':>8} {'stack':>6} {'spills':>7}  kernel"
    )
    for row in rows:
        used = row.resources
        spills = used.spill_stores + used.spill_loads
        problems = f"  <- {', '.join(row.problems)}" if row.problems else ""
        print(
            f"{row.arch:<7} {used.registers:>4} {used.static_smem:>7} {row.dynamic_smem:>8} "
            f"{used.stack:>6} {spills:>7}  {row.name}{problems}"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", default=",".join(DEVICES), help="architectures, with commas")
    parser.add_argument("--check", action="store_true", help="exit with 1 if there is a problem")
    parser.add_argument("--jobs", type=int, help="kernels compiled at a time (default: cores)")
    options = parser.parse_args(arguments)
    archs = options.arch.split(",")
    if unknown := [arch for arch in archs if arch not in DEVICES]:
        parser.error(f"--arch {unknown[0]}: must be among {', '.join(DEVICES)}")
    start = time.perf_counter()
    rows: list[Row] = []
    try:
        for arch in archs:  # minutes, with an empty cache
            new = build(arch, options.jobs)
            rows += new
            print(f"{arch}: {len(new)} kernels", file=sys.stderr)
    except (CompileError, InputError) as error:
        print(error, file=sys.stderr)
        return 1
    print_rows(rows)
    bad = sum(1 for row in rows if row.problems)
    print(
        f"{len(rows)} kernels for {len(archs)} architectures, {bad} with problems, "
        f"NVRTC {'.'.join(map(str, nvrtc_version()))}, {time.perf_counter() - start:.1f} s"
    )
    return 1 if options.check and bad else 0


if __name__ == "__main__":
    sys.exit(main())
