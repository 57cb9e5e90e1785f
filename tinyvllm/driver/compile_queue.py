"""Kernels compiled in threads beside what else happens, those first that somebody waits for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from tinyvllm.driver.cache import CompiledKernel, KernelCache
from tinyvllm.driver.compiler import compile_spec
from tinyvllm.driver.spec import KernelSpec
from tinyvllm.util import Closing, logger


class CompileQueue(Closing):
    """Compiles what was `put` into it, in that order, on all cores.

    Threads of its own compile, and touch no device. An error is logged when it happens and raised
    where the kernel is asked for. To be used by one thread at a time.
    """

    def __init__(self, arch: str, kernel_cache: KernelCache, jobs: int | None = None) -> None:
        self._arch, self._cache = arch, kernel_cache
        self._threads = ThreadPoolExecutor(jobs or os.cpu_count(), "compile")
        self._lock = threading.Lock()
        self._waiting: dict[KernelSpec, None] = {}  # in the order in which they will be compiled
        self._results: dict[KernelSpec, Future[CompiledKernel]] = {}

    def __contains__(self, spec: KernelSpec) -> bool:
        return spec in self._results

    def pending(self) -> list[KernelSpec]:
        """What was put in and not taken out yet, in this order."""
        return list(self._results)

    def put(self, spec: KernelSpec) -> None:
        """Has a kernel compiled, after all that wait already."""
        self._results[spec] = Future()
        with self._lock:
            self._waiting[spec] = None
        self._threads.submit(self._compile_next)

    def get(self, specs: Iterable[KernelSpec]) -> dict[KernelSpec, CompiledKernel]:
        """Waits for kernels that were put in, and takes them out. Those not begun go before all
        others. Raises what their compilation raised, CompileError for example.
        """
        wanted = list(specs)
        with self._lock:
            first = {spec: None for spec in wanted if spec in self._waiting}
            self._waiting = first | self._waiting
        done = {spec: self._results[spec].result() for spec in wanted}
        for spec in wanted:
            del self._results[spec]
        return done

    def close(self) -> None:
        """Drops what has not begun, and waits for what has."""
        with self._lock:
            self._waiting.clear()
        self._threads.shutdown(cancel_futures=True)

    def _compile_next(self) -> None:
        with self._lock:
            spec = next(iter(self._waiting), None)
            if spec is None:  # closed meanwhile
                return
            del self._waiting[spec]
        result = self._results[spec]
        try:
            result.set_result(compile_spec(spec, self._arch, self._cache))
        except BaseException as error:  # it belongs to whoever asks for the kernel
            logger.error("%s could not be compiled; steps that need it will fail", spec.name)
            result.set_exception(error)
