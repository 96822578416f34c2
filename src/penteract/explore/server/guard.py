"""Who may ask: this machine, from the page itself, with the cookie that the opened address gave.

Host and Origin are checked, so that no other page can ask through a browser, under whatever name it reaches us.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NAMES = ("127.0.0.1", "localhost", "[::1]")
_CLOSED = "/api/"  # paths that need the cookie; the others are files of the package
_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(slots=True)
class Keys:
    """The token of the opened address, which opens once, and the session that it becomes."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    used: bool = False

    def open(self, token: str) -> bool:
        """Whether this is the token, and for the first time."""
        if self.used or not secrets.compare_digest(token.encode(), self.token.encode()):
            return False
        self.used = True
        return True

    def is_session(self, session: str) -> bool:
        """Whether this is the session."""
        return secrets.compare_digest(session.encode(), self.session.encode())


@dataclass(slots=True)
class Guard:
    """Refuses what is not from the page, and adds the headers of a closed page to every response."""

    app: ASGIApp
    keys: Keys
    port: int

    @property
    def cookie(self) -> str:
        """The cookie's name: cookies of all ports of a host are sent to each, so each explorer has its own."""
        return f"penteract_{self.port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI asks."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def closed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope) if scope["type"] == "http" else PlainTextResponse("no such protocol", 400)
        await (refusal or self.app)(scope, receive, closed)

    def _refusal(self, scope: Scope) -> Response | None:
        """The response to what is refused, or to the opened address; None: the page may ask."""
        headers = Headers(scope=scope)
        host, origin, site = (headers.get(name, "") for name in ("host", "origin", "sec-fetch-site"))
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name.lower() not in _NAMES:
            return PlainTextResponse("this explorer answers this machine only", 403)
        post = scope["method"] == "POST"
        if (post or origin) and origin != f"http://{host}":
            return PlainTextResponse("this explorer answers its own page only", 403)
        navigates = scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
        if site not in ("", "same-origin", "none") and not navigates:
            return PlainTextResponse("this explorer answers its own page only", 403)
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("no such method", 405)
        if scope["path"] == "/" and (token := parse_qs(scope["query_string"].decode("latin-1")).get("token")):
            return self._opened(token[0])
        if scope["path"].startswith(_CLOSED) and not self.keys.is_session(self._session(headers)):
            return PlainTextResponse("start `penteract explore` again, and open the address that it prints", 403)
        return None

    def _opened(self, token: str) -> Response:
        if not self.keys.open(token):
            return PlainTextResponse(
                "This address has been opened already, or is of another explorer.\n"
                "Start `penteract explore` again, and open the address that it prints.", 403,
            )  # fmt: skip
        response = RedirectResponse("/", 303)
        response.set_cookie(self.cookie, self.keys.session, httponly=True, samesite="strict", path="/")
        return response

    def _session(self, headers: Headers) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return found.value if found else ""
