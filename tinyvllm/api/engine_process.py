"""The engine's process as its caller sees it: started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref

from tinyvllm.api.wire import frame
from tinyvllm.config import EngineConfig
from tinyvllm.util import Closing, logger

_END_S = 5.0  # for an engine that was asked to end
_SOCKET_BYTES = 1 << 20
# The path's first entry is the working directory, where a file might hide a module. The driver
# starts beside the imports of the engine.
_PROGRAM = """
import sys; del sys.path[0]
from tinyvllm.driver.device import open_ahead; open_ahead({index!r}, {kernel_path!r})
from tinyvllm.api.engine_loop import main; main({socket}, {lifeline})
"""


class EngineDeadError(RuntimeError):
    """The engine's process has ended; no request can be served any more."""


class EngineProcess(Closing):
    """A new interpreter that runs an engine; it ends with this process, however that ends.

    `socket` is this process's end of the channel (see `wire`).
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.socket, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        search_path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        try:
            for end in (self.socket, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self.process = subprocess.Popen(
                [sys.executable, "-c", program(config, theirs.fileno(), lifeline)],
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__ or subprocess.DEVNULL,  # the caller's is for its results
                env={**os.environ, "PYTHONPATH": search_path},
                start_new_session=True,  # Ctrl-C and signals to the group are the caller's
            )
        finally:
            theirs.close()
            os.close(lifeline)
        self._end = weakref.finalize(self, _end, self.process, self.socket, self._lifeline)
        self.socket.sendall(frame((config, logger.getEffectiveLevel())))

    def kill(self) -> None:
        """Ends the engine at once, whatever it is doing."""
        self._end()

    def close(self) -> None:
        """Asks the engine to end, and waits for it; one that does not listen is killed."""
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        self._end()


def program(config: EngineConfig, socket_fd: int, lifeline_fd: int) -> str:
    """What the engine's interpreter runs."""
    return _PROGRAM.format(
        index=config.gpu_index,
        kernel_path=config.kernel_path,
        socket=socket_fd,
        lifeline=lifeline_fd,
    )


def _end(process: subprocess.Popen[bytes], sock: socket.socket, lifeline: int) -> None:
    process.kill()
    process.wait()
    sock.close()
    os.close(lifeline)
