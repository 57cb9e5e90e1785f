"""Kernels compiled in threads beside what else happens, those first that somebody waits for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future

from tinyvllm.driver.cache import CompiledKernel, KernelCache
from tinyvllm.driver.compiler import compile_spec
from tinyvllm.driver.spec import KernelSpec
from tinyvllm.util import Closing, logger


class CompileQueue(Closing):
    """Compiles what was `put` into it, in that order, on all cores.

    Threads of its own compile, and touch no device. An error is logged when it happens and raised
    where the kernel is asked for. Once the main thread has ended they compile only what somebody
    waits for, so that the process ends. To be used by one thread at a time.
    """

    def __init__(self, arch: str, kernel_cache: KernelCache, jobs: int | None = None) -> None:
        self._arch, self._cache = arch, kernel_cache
        self._jobs = jobs or os.cpu_count() or 1
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()  # they end when nothing waits
        # In the order in which they will be compiled, and whether somebody waits for them.
        self._waiting: dict[KernelSpec, bool] = {}
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
            self._waiting[spec] = False
            self._start_thread()

    def get(self, specs: Iterable[KernelSpec]) -> dict[KernelSpec, CompiledKernel]:
        """Waits for kernels that were put in, and takes them out. Those not begun go before all
        others. Raises what their compilation raised, CompileError for example.
        """
        wanted = list(specs)
        with self._lock:
            first = {spec: True for spec in wanted if self._waiting.pop(spec, None) is not None}
            self._waiting = first | self._waiting
            if first:
                self._start_thread()
        done = {spec: self._results[spec].result() for spec in wanted}
        for spec in wanted:
            del self._results[spec]
        return done

    def close(self) -> None:
        """Drops what has not begun, and waits for what has."""
        with self._lock:
            self._waiting.clear()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _start_thread(self) -> None:
        """One more, if there may be more. The lock is held, so that none is just ending."""
        if len(self._threads) < self._jobs:
            name = f"compile_{len(self._threads)}"
            thread = threading.Thread(target=self._compile, name=name)
            thread.start()
            self._threads.add(thread)

    def _compile(self) -> None:
        while (spec := self._next()) is not None:
            result = self._results[spec]
            try:
                result.set_result(compile_spec(spec, self._arch, self._cache))
            except BaseException as error:  # it belongs to whoever asks for the kernel
                logger.error("%s could not be compiled; steps that need it will fail", spec.name)
                result.set_exception(error)

    def _next(self) -> KernelSpec | None:
        """What is compiled next; None ends the thread."""
        with self._lock:
            spec = next(iter(self._waiting), None)
            if spec is not None and (self._waiting[spec] or threading.main_thread().is_alive()):
                del self._waiting[spec]
                return spec
            self._threads.discard(threading.current_thread())
            return None
