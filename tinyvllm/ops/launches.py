"""The launches of a program at any sizes: worked out for one layer, moved for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tinyvllm.driver.device import Stream
from tinyvllm.driver.kernel import KernelLoader
from tinyvllm.driver.repeated import RepeatedLaunch, moved
from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import Op, Program, Shape, concrete, role_of
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType

Dims = Mapping[str, int]


@dataclass(frozen=True)
class Place:
    """Where an array lies and what it is, but for the sizes of a run."""

    ptr: int
    shape: Shape
    dtype: DType
    row_stride: int = 0
    max_rows: int = 0  # 0: as `shape` says

    def array(self, dims: Dims) -> DeviceArray:
        """The array in a run of these sizes."""
        shape = concrete(self.shape, dims)
        return DeviceArray(self.ptr, shape, self.dtype, self.row_stride, self.max_rows)

    def columns(self, start: int, width: int) -> Place:
        """The view of `width` elements of each row, from `start` on."""
        stride = self.row_stride or self.shape[-1]
        assert isinstance(stride, int) and 0 <= start < start + width <= stride, (start, width)
        ptr = self.ptr + start * self.dtype.itemsize
        return Place(ptr, (*self.shape[:-1], width), self.dtype, stride, self.max_rows)


class SizesRead(Mapping[str, int]):
    """A run's sizes, with a record of those that were looked at."""

    def __init__(self, dims: Dims) -> None:
        self._dims = dims
        self.read: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        size = self.read[name] = self._dims[name]
        return size

    def __iter__(self) -> Iterator[str]:
        raise TypeError("an op may look at sizes by name only")

    def __len__(self) -> int:
        return len(self._dims)


class BoundOp:
    """An op whose operands have their places: from sizes to launches, and to nothing else.

    `place` finds the place of a buffer, weight or constant by its name; `scratch` is an address.
    """

    def __init__(
        self,
        program: Program,
        op: Op,
        place: Callable[[str], Place | DeviceArray],
        *,
        act: DType,
        info: DeviceInfo,
        scratch: int,
    ) -> None:
        self.op, self._info = op, info
        self._def = op_def(op.kind)
        self._fixed = dict.fromkeys((*self._def.reads, *self._def.writes))
        self._fixed |= {**op.attrs, "act": act, "scratch": scratch}
        self._sized: list[tuple[str, Place]] = []
        for operand, name in op.operands.items():
            found = place(name)
            if isinstance(found, Place):
                if any(isinstance(size, str) for size in found.shape):
                    self._sized.append((operand, found))
                    continue
                found = found.array({})
            self._fixed[operand] = found
        written = [op.operands[w] for w in self._def.writes if w in op.operands]
        self._written = [program.buffers[name].shape for name in written]

    def launches(self, dims: Dims) -> list[Launch]:
        """The op's launches in a run of these sizes; none if all that it writes is empty."""
        if all(0 in concrete(shape, dims) for shape in self._written):
            return []
        arrays = {operand: place.array(dims) for operand, place in self._sized}
        return self._def.launches(Operands(**{**self._fixed, **arrays, "dims": dims}), self._info)


class _Layers:
    """An op of each layer, alike but for addresses; `ready` are its launches, ready to run."""

    def __init__(self, ops: list[BoundOp], loader: KernelLoader, stream: Stream) -> None:
        self.ops = ops
        self.ready: list[RepeatedLaunch] = []
        self._loader, self._stream = loader, stream
        self._read: dict[str, int] | None = None  # the sizes that decided what is ready
        self._repeated: dict[tuple[int, Kernel], RepeatedLaunch] = {}

    def fit(self, dims: Dims) -> None:
        """Makes the launches of all layers ready for these sizes, unless they are."""
        read = self._read
        if read is not None and all(dims[name] == size for name, size in read.items()):
            return
        sizes = SizesRead(dims)
        self._read, self.ready = None, []
        launches = self.ops[0].launches(sizes)
        self.ready = [self._repeat(n, launch, dims) for n, launch in enumerate(launches)]
        self._read = sizes.read

    def _repeat(self, n: int, launch: Launch, dims: Dims) -> RepeatedLaunch:
        key = n, launch.spec.kernel
        repeated = self._repeated.get(key)
        if repeated is None:
            moves = [self._moves(op, n, launch, dims) for op in self.ops]
            repeated = self._repeated[key] = RepeatedLaunch(self._loader, launch, moves)
        repeated.set(launch, self._stream)
        return repeated

    def _moves(self, op: BoundOp, n: int, first: Launch, dims: Dims) -> list[int]:
        other = op.launches(dims)[n]
        moves = moved(first, other)
        assert moves is not None, f"layers differ in more than addresses: {first} and {other}"
        return moves


class ProgramLaunches:
    """A program's launches, kept from run to run and made to fit the sizes of each.

    Steps with prompts have other sizes each time. But the layers' launches differ in addresses
    alone, of weights and in the KV cache, and these do not depend on sizes. So an op's launches
    are worked out for one layer, if a size that they depend on has changed; those of the others
    are the same, moved by what was found when they were first compared.

    ops: one for each of the program's, in order.
    """

    def __init__(
        self, program: Program, ops: list[BoundOp], loader: KernelLoader, stream: Stream
    ) -> None:
        self.ops = ops
        self._loader = loader
        self._fresh = True
        self._layers: list[_Layers] = []
        order: dict[int, tuple[_Layers, int]] = {}
        for group in alike(program):
            layers = _Layers([ops[i] for i in group], loader, stream)
            self._layers.append(layers)
            order |= {i: (layers, k) for k, i in enumerate(group)}
        self._order = [order[i] for i in range(len(ops))]

    def prepare(self, dims: Dims) -> None:
        """Makes all launches ready for these sizes; kernels not there yet compile side by side."""
        firsts = [layers.ops[0].launches(dims) for layers in self._layers]
        self._loader.load_all(launch.spec for launches in firsts for launch in launches)
        for layers in self._layers:
            layers.fit(dims)
        self._fresh = False

    def run(self, dims: Dims) -> None:
        """Runs all launches, for these sizes, in their order.

        Each is worked out when its turn comes, so that the device begins with the first at once.
        """
        if self._fresh:
            self.prepare(dims)
        for layers, k in self._order:
            if k == 0:
                layers.fit(dims)
            for repeated in layers.ready:
                repeated.run(k)


def alike(program: Program) -> list[list[int]]:
    """The numbers of the ops that are the same but for their layer, in groups, in order."""
    groups: dict[object, list[int]] = {}
    for i, op in enumerate(program.ops):
        groups.setdefault(likeness(program, op), []).append(i)
    return list(groups.values())


def likeness(program: Program, op: Op) -> object:
    """Equal for ops, of any programs, whose launches differ in addresses alone.

    The kind, the attributes without the layer, and the roles and shapes of the operands.
    """
    attrs = {name: value for name, value in op.attrs.items() if name != "layer"}
    operands = tuple(
        (operand, _role(program, name), program.shape_of(name))
        for operand, name in op.operands.items()
    )
    return op.kind, tuple(sorted(attrs.items())), operands


def _role(program: Program, name: str) -> str:
    """What an operand is in any layer; of weights the shape says enough."""
    return "weight" if name in program.weights else role_of(name)
