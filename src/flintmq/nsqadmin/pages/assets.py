"""Static files: their bytes, types and the mark in their address that lets browsers keep them for good.

Rules of this file: only what is in the folder ``static`` when nsqadmin starts is served, from memory; a name of a
request is a key of a dict and never a path, also where ``--dev-static-dir`` has other bytes for that name.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "json": "application/json",
}
_FOR_GOOD = "public, max-age=31536000, immutable"
_MARK_SIZE = 12


class Assets:
    """All static files.

    Attributes:
        marks: by name such as ``vendor/htmx.js``: a piece of the hash, different for different bytes.
    """

    def __init__(self) -> None:
        self._bodies = dict(_read(files("flintmq.nsqadmin") / "static", ""))
        self.marks = {name: hashlib.sha256(body).hexdigest()[:_MARK_SIZE] for name, body in self._bodies.items()}

    def path(self, name: str) -> str:
        """The address below the base path, with the mark.

        Raises:
            KeyError: there is no such file: a template is wrong.
        """
        return f"/static/{name}?v={self.marks[name]}"

    def answer(self, request: Request, instead: str = "") -> Response:
        """Answer ``/static/{path}``.

        Args:
            instead: a directory whose files come first, read anew each time; empty: none.
        """
        name = request.path_params["path"]
        body = self._bodies.get(name)
        if body is None:
            return PlainTextResponse("there is no such file\n", 404)
        media_type = _TYPES[name.rpartition(".")[2]]
        if instead and (path := Path(instead) / name).is_file():
            return Response(path.read_bytes(), media_type=media_type, headers={"Cache-Control": "no-store"})
        is_marked = request.query_params.get("v") == self.marks[name]
        headers = {"Cache-Control": _FOR_GOOD if is_marked else "no-cache", "ETag": f'"{self.marks[name]}"'}
        if request.headers.get("If-None-Match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media_type, headers=headers)


def _read(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _read(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in _TYPES:
            found.append((prefix + entry.name, entry.read_bytes()))
    return found


@cache
def assets() -> Assets:
    """The static files of this installation, read once."""
    return Assets()
