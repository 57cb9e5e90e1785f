"""`tinyvllm top`: what a server's engine does, in a terminal."""

from __future__ import annotations

import argparse
import os

from tinyvllm.cli.options import Commands
from tinyvllm.config import check_number


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("top", help="watch a server: blocks, requests, speed")
    parser.add_argument("--url", default="http://localhost:8000", help="where the server listens")
    parser.add_argument("--api-key", help="its key (default: $TINYVLLM_API_KEY)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line")
    parser.set_defaults(run=run_top)


def run_top(args: argparse.Namespace) -> int:
    """Shows a server's figures until it is told to end."""
    from tinyvllm.cli.top_client import Server, show  # what it needs of HTTP takes time to load

    check_number("interval", args.interval, 0.1, 3600)
    key = os.environ.get("TINYVLLM_API_KEY") if args.api_key is None else args.api_key
    show(Server(args.url, key), args.interval, once=args.once, as_json=args.json)
    return 0
