"""Weights to the device: threads fill pinned slots while the copies of other slots run."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from tinyvllm.driver.calls import phase
from tinyvllm.driver.device import Stream
from tinyvllm.driver.memory import copy_2d_to_device, copy_to_device
from tinyvllm.memory.staging import Slot, StagingRing
from tinyvllm.util import Closing

SLOT_BYTES = 8 << 20  # pinning costs 0.5 ms a MiB, so the ring is no larger than speed needs


@dataclass(frozen=True)
class CopyJob:
    """`num_bytes` for the device, at most one slot of them.

    `fill` writes them into a uint8 array of that length, in a reader thread. On the device, rows
    of `row_bytes` start `dst_pitch` bytes apart from address `dst` on; equal values mean one
    contiguous piece.
    """

    fill: Callable[[np.ndarray], None]
    num_bytes: int
    dst: int
    row_bytes: int
    dst_pitch: int


@dataclass(frozen=True)
class UploadResult:
    """What was copied and how long it took, from the first read to the end of the last copy."""

    num_bytes: int
    seconds: float


class Uploader(Closing):
    """Runs copy jobs on `stream` through `slots` pinned slots, filled by `readers` threads.

    `readers` defaults to the number of cores, at most 8; two thirds of the slots are being
    filled while the others are being copied.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        slots: int = 12,
        slot_bytes: int = SLOT_BYTES,
        readers: int | None = None,
    ) -> None:
        assert slots >= 2, slots
        self.stream = stream
        self._ring = StagingRing(slots, slot_bytes)
        self._lookahead = max(1, slots * 2 // 3)
        self._readers = ThreadPoolExecutor(readers or min(8, os.cpu_count() or 1), "reader")

    def upload(self, jobs: Iterable[CopyJob]) -> UploadResult:
        """Runs all jobs and waits for the last copy.

        The first error of a `fill` is raised here, after the jobs already begun have ended; the
        uploader can be used again.
        """
        pending: deque[tuple[CopyJob, Slot, Future[None]]] = deque()
        start = time.perf_counter()
        total = 0
        with phase("weights"):
            try:
                for job in jobs:
                    self._check(job)
                    if len(pending) == self._lookahead:
                        self._copy(*pending.popleft())
                    slot = self._ring.acquire()
                    filled = self._readers.submit(job.fill, slot.array[: job.num_bytes])
                    pending.append((job, slot, filled))
                    total += job.num_bytes
                while pending:
                    self._copy(*pending.popleft())
            finally:
                # Not empty after an error only: no thread may still write into a free slot.
                wait(filled for _, _, filled in pending if not filled.cancel())
                for _, slot, _ in pending:
                    self._ring.release(slot, self.stream)
                self.stream.synchronize()
        return UploadResult(total, time.perf_counter() - start)

    def _check(self, job: CopyJob) -> None:
        assert 0 < job.num_bytes <= self._ring.slot_bytes, (job.num_bytes, self._ring.slot_bytes)
        assert job.num_bytes % job.row_bytes == 0 and job.row_bytes <= job.dst_pitch, job

    def _copy(self, job: CopyJob, slot: Slot, filled: Future[None]) -> None:
        """Gives a job's copy to the stream once its slot is filled."""
        try:
            filled.result()
            source = slot.array[: job.num_bytes]
            if job.row_bytes == job.dst_pitch:
                copy_to_device(job.dst, source, self.stream)
            else:
                rows = job.num_bytes // job.row_bytes
                copy_2d_to_device(
                    job.dst, job.dst_pitch, source, job.row_bytes, job.row_bytes, rows, self.stream
                )
        finally:
            self._ring.release(slot, self.stream)

    def close(self) -> None:
        self._readers.shutdown()
        self._ring.close()
