"""A page from its template and a view.

Rules of this file: templates are in ``templates/``; every value is escaped, and a name that is not there is an error,
not an empty place. What every page needs is handed to it here. Paths in links go through ``url``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from flintmq.nsqadmin.pages import prepare
from flintmq.version import __version__


class Render:
    """Renders.

    Args:
        base: path that all pages are below, without a slash at its end.
        warnings: called for the sentences that every page shows.
    """

    def __init__(self, base: str, warnings: Callable[[], list[str]]) -> None:
        self._base = base
        self._warnings = warnings
        self.environment = Environment(
            loader=PackageLoader("flintmq.nsqadmin"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.environment.globals.update(url=self.url, version=__version__)
        prepare(self.environment)

    def url(self, path: str, *words: str, **query: object) -> str:
        """Return a path below the base path; further words are quoted and joined, a query is added."""
        parts = "".join("/" + quote(word, safe="") for word in words)
        target = f"{self._base}{path}".rstrip("/") + parts if parts else f"{self._base}{path}"
        shown = {name: value for name, value in query.items() if value is not None}
        return f"{target}?{urlencode(shown)}" if shown else target

    def __call__(self, request: Request, name: str, view: Any = None, status: int = 200, **extra: Any) -> HTMLResponse:
        """Return the answer with a page."""
        visitor = getattr(request.state, "visitor", None)
        text = self.environment.get_template(name).render(
            view=view,
            status=status,
            visitor=visitor,
            path=request.url.path.removeprefix(self._base) or "/",
            warnings=self._warnings(),
            **extra,
        )
        return HTMLResponse(text, status, {"Cache-Control": "no-store"})


__all__ = ["Render"]
