"""What an operation is: shape contract, cost, CUDA launches and NumPy reference in one class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from tinyvllm.driver.spec import DeviceInfo, Launch
from tinyvllm.util import DType

if TYPE_CHECKING:
    from tinyvllm.ops.program import Op, Program, Shape


@dataclass(frozen=True)
class Cost:
    """What an op must do at the least: bytes through device memory, floating-point operations."""

    bytes: int
    flops: int = 0


class Operands(SimpleNamespace):
    """The operands of one op at run time, by the names of its declaration.

    Each is an array with `.shape` and `.dtype`: a float32/int32 ndarray for the reference, a
    DeviceArray (`.ptr`, `.row_stride`) for launches; an absent optional operand is None.
    Attributes of the op are here too, and `dims` (sizes bound for this run) and, for launches,
    `act` (the DType of activations) and `scratch` (a device address).
    """

    dims: Mapping[str, int]
    act: DType
    scratch: int

    def __getattr__(self, name: str) -> Any:  # only for mypy: operands are dynamic
        raise AttributeError(name)


class OpDef:
    """Declaration of an op; subclasses set the tables and override the three methods.

    Shape symbols (upper-case strings) must bind to the same size in all operands of one op. In
    `reads` stand buffers, weights and constants alike. State that an op changes stands in
    `writes` (and in `reads` where it is read as well).
    """

    name: ClassVar[str]
    reads: ClassVar[Mapping[str, Shape]]
    writes: ClassVar[Mapping[str, Shape]]
    optional: ClassVar[frozenset[str]] = frozenset()
    attrs: ClassVar[frozenset[str]] = frozenset()
    # dtype of outputs that are not activations
    out_dtypes: ClassVar[Mapping[str, DType]] = {}
    # False: how a row is reduced may depend on how many rows share the step.
    batch_invariant: ClassVar[bool] = True

    def reference(self, a: Operands) -> None:
        """Computes the op on NumPy arrays in float32, writing into the output arrays in place."""
        raise NotImplementedError(f"{self.name} is a fused op: its parts are its reference")

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        """The kernel launches that compute the op: a pure function of shapes and addresses."""
        raise NotImplementedError

    def cost(self, a: Operands) -> Cost:
        """Fewest bytes and operations for these shapes (each input once, each output once)."""
        raise NotImplementedError

    def scratch(self, a: Operands, device: DeviceInfo) -> int:
        """Bytes of device memory that the launches need beside the operands (at `a.scratch`).

        Called with the largest shapes that a plan is made for: must bound all smaller ones.
        """
        return 0

    def bind(self, program: Program, names: Mapping[str, str]) -> dict[str, Any]:
        """Sizes of the contract's symbols from the given operands; ValueError where they differ."""
        sizes: dict[str, Any] = {}
        for operand, contract in {**self.reads, **self.writes}.items():
            if operand not in names:
                if operand in self.optional or operand in self.writes:
                    continue
                raise ValueError(f"{self.name}: operand {operand} is missing")
            shape = program.shape_of(names[operand])
            if len(shape) != len(contract):
                raise ValueError(
                    f"{self.name}: {operand}={names[operand]} has shape {shape}, must be {contract}"
                )
            for want, have in zip(contract, shape, strict=True):
                size = sizes.setdefault(want, have) if isinstance(want, str) else want
                if size != have:
                    raise ValueError(
                        f"{self.name}: {operand}={names[operand]} has shape {shape}, must be "
                        f"{contract} with {want}={size}"
                    )
        return sizes

    def check(self, program: Program, op: Op) -> None:
        """ValueError unless operands and attributes are those declared and their shapes fit."""
        known = {*self.reads, *self.writes}
        if unknown := set(op.operands) - known:
            raise ValueError(f"{self.name}: unknown operands {sorted(unknown)}")
        if set(op.attrs) != set(self.attrs):
            raise ValueError(
                f"{self.name}: attributes {sorted(op.attrs)}, not {sorted(self.attrs)}"
            )
        self.bind(program, op.operands)
