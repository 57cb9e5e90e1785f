"""`tinyvllm serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket

from tinyvllm.api.engine_process import EngineProcess
from tinyvllm.cli.options import Commands, add_options, from_args
from tinyvllm.config import EngineConfig
from tinyvllm.serve.config import ServeConfig
from tinyvllm.util import InputError, logger

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("serve", help="serve OpenAI's API over HTTP")
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    add_options(parser, ServeConfig)
    add_options(parser, EngineConfig)
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Serves until a signal; the exit status is 1 when the engine dies."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"serve needs {', '.join(missing)}: pip install 'tinyvllm[serve]'")
    if args.model_tag and args.model:
        raise InputError(f"MODEL={args.model_tag} and --model={args.model}: give one of them")
    args.model = args.model_tag or args.model
    if not args.model:
        from tinyvllm.model.hub import default_model
        from tinyvllm.model.smollm2 import HUB_NAME

        args.model = default_model()
        # Not by the file's path, which is nobody's business.
        args.served_model_name = args.served_model_name or [HUB_NAME.split("/")[1], HUB_NAME]
    if args.api_key is None:  # an empty one is refused: it was meant to close the door
        args.api_key = os.environ.pop("TINYVLLM_API_KEY", None)  # no business of the engine
    config = from_args(EngineConfig, args)
    serve_config = from_args(ServeConfig, args)
    if not (serve_config.is_local or serve_config.api_key):
        logger.warning("host=%s without an API key: who reaches it may use it", serve_config.host)
    sock = bind(serve_config)  # before the model is loaded: a port in use is an error at once

    # The engine's process loads the model while this one imports FastAPI.
    process = EngineProcess(config)
    from tinyvllm.api.async_llm import AsyncLLM
    from tinyvllm.serve.server import run

    return run(AsyncLLM.from_process(process), sock, serve_config, verbose=args.verbose)


def bind(config: ServeConfig) -> socket.socket:
    """A socket at the configured address; InputError if it cannot be had."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise InputError(
            f"host={config.host}, port={config.port}: cannot listen there: {error.strerror}"
        ) from None
    return sock
