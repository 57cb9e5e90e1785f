"""The dashboard's page: files that are sent as they are, to anybody."""

from __future__ import annotations

from importlib.resources import files

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def _load() -> dict[str, tuple[str, bytes]]:
    found = {}
    for file in files(__name__).iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = "/dashboard" if file.name == "index.html" else f"/dashboard/{file.name}"
            found[path] = kind, file.read_bytes()
    return found


# By path: media type and content.
FILES = _load()
