"""The server's options: where it listens, who may call it, and how much it takes on."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinyvllm.config import check_bool, check_int, check_number, option
from tinyvllm.util import InputError


@dataclass(frozen=True)
class ServeConfig:
    """Every option of `tinyvllm serve` besides the engine's.

    Raises InputError, naming the option, the value and the limit, for a value out of range.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines in")
    port: int = option(8000, "port to listen on; 0: any free one")
    served_model_name: Sequence[str] = option((), "names that requests may use (default: MODEL)")
    # Never shown: not in the repr, which may be logged.
    api_key: str | None = field(
        default=None,
        repr=False,
        metadata={
            "help": "key that callers must send (default: $TINYVLLM_API_KEY, else none)",
            "choices": None,
            "cli": True,
        },
    )
    dashboard: bool = option(True, "show what the engine does at /dashboard")
    max_waiting_requests: int = option(1024, "requests that may wait; more are told to come back")
    max_body_bytes: int = option(4 << 20, "most bytes of a request")
    body_timeout: float = option(30.0, "most seconds for a request to arrive")
    request_timeout: float = option(3600.0, "most seconds for a request to be answered")
    shutdown_timeout: float = option(30.0, "most seconds after SIGTERM for requests to end")

    def __post_init__(self) -> None:
        check_bool("dashboard", self.dashboard)
        check_int("port", self.port, 0, 65535)
        check_int("max_waiting_requests", self.max_waiting_requests, 0, 1 << 20)
        check_int("max_body_bytes", self.max_body_bytes, 1, 1 << 30)
        for name in ("body_timeout", "request_timeout", "shutdown_timeout"):
            check_number(name, getattr(self, name), 0, 1e6)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InputError("api_key: must be printable ASCII characters")
        if self.api_key is not None and not self.api_key.strip():
            raise InputError("api_key is empty: leave it out to let everybody in")
        object.__setattr__(self, "served_model_name", tuple(self.served_model_name))
        if not all(self.served_model_name):
            raise InputError("served_model_name: a name is empty")

    @property
    def is_local(self) -> bool:
        """True when only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
