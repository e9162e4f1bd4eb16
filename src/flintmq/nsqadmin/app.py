"""The application: the routes of all who have some, behind the guard; and logging in and out.

Rules of this file: whoever handles a request finds the visitor in ``request.state.visitor``; errors go to the guard;
pages are in :mod:`flintmq.nsqadmin.pages`, the JSON APIs in ``api`` and ``exports``.
"""

from __future__ import annotations

from dataclasses import replace

from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from flintmq.net.origin import Origins
from flintmq.nsqadmin.access import COOKIE, NAME_SIZE_MAX
from flintmq.nsqadmin.admin import Admin
from flintmq.nsqadmin.api import Api
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.exports import Exports
from flintmq.nsqadmin.guard import Guard
from flintmq.nsqadmin.pages.routes import routes as page_routes

_COMPRESSED_FROM_BYTES = 1024


class _LogIn:
    """The routes of logging in and out."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    def routes(self) -> list[Route]:
        return [
            Route("/login", self._show),
            Route("/login", self._log_in, methods=["POST"]),
            Route("/logout", self._log_out, methods=["POST"]),
        ]

    async def _show(self, request: Request) -> Response:
        return self._page(request, request.query_params.get("next", "/"), "")

    def _page(self, request: Request, wanted: str, failed: str, status: int = 200) -> Response:
        return self._admin.render(request, "login.html", None, status, next=_local(wanted), failed=failed)

    async def _log_in(self, request: Request) -> Response:
        form, visitor = request.state.form, request.state.visitor
        name, wanted = form.get("name", "")[:200], form.get("next", "/")
        try:
            cookie = await self._admin.access.log_in(name, form.get("password", ""), visitor.source)
        except Refused as refused:
            shown = name[:NAME_SIZE_MAX]
            self._admin.audit.note(visitor, "log_in_failed", shown, "refused", [refused.text], who=shown)
            return self._page(request, wanted, refused.text, refused.status)
        self._admin.audit.note(replace(visitor, is_known=True), "log_in", name, "done", who=name)
        response = RedirectResponse(self._admin.options.base + _local(wanted), 303)
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=self._admin.options.session_lifetime_ns // 1_000_000_000,
            path=self._admin.options.base or "/",
            secure=is_secured(request),
            httponly=True,
            samesite="strict",
        )
        return response

    async def _log_out(self, request: Request) -> Response:
        visitor = request.state.visitor
        self._admin.access.log_out(request.cookies.get(COOKIE, ""))
        self._admin.audit.note(visitor, "log_out", visitor.name, "done")
        response = RedirectResponse(f"{self._admin.options.base}/login", 303)
        response.delete_cookie(COOKIE, path=self._admin.options.base or "/")
        return response


def is_secured(request: Request) -> bool:
    """Whether the browser speaks HTTPS, to us or to a proxy that says so; a lie only hurts whoever tells it."""
    headers = request.headers
    return "https" in (request.url.scheme, headers.get("x-forwarded-proto", ""), headers.get("x-scheme", ""))


def _local(path: str) -> str:
    """Return a path of ours to go to; anything that a browser could take for another host is ``/``."""
    is_ours = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if is_ours and len(path) < 2000 else "/"


def create_app(admin: Admin) -> ASGIApp:
    """Return the application that a server runs."""
    routes = [*Api(admin).routes(), *Exports(admin).routes(), *_LogIn(admin).routes(), *page_routes(admin)]
    app = Router(routes, redirect_slashes=False)  # the guard does, to where the visitor is and not where a proxy asks
    origins = Origins(admin.options.http_allow_origin, (admin.env.hostname, *admin.env.local_names))
    return Guard(GZipMiddleware(app, _COMPRESSED_FROM_BYTES), admin, origins, routes)


__all__ = ["Admin", "create_app"]
