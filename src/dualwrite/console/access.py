"""Who may see the page, and who may do something on it: roles, a token for the command, protection against forged forms."""

from __future__ import annotations

import hmac
import inspect
import secrets
from collections.abc import Awaitable, Callable, Collection
from enum import Enum
from typing import Final
from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request
from starlette.responses import Response

from dualwrite.console.actions import Form

FORM_TOKEN: Final = "token"  # noqa: S105  (the name of a field)
FORM_COOKIE: Final = "dualwrite_console_form"
SESSION_COOKIE: Final = "dualwrite_console"
_FORM_BYTES: Final = 256 * 1024


class Role(Enum):
    """What a visitor may do."""

    VIEWER = "viewer"
    """See everything."""

    OPERATOR = "operator"
    """Also recover, publish again, acknowledge, drain, replay and drop."""


Authorize = Callable[[Request], Role | Awaitable[Role | None] | None]
"""Returns the role of whoever has sent a request; None: no access. It may set `request.state.who` to a name for the log."""


def everybody_may_look(request: Request) -> Role:
    """The default of a mounted console: whoever reaches it is a viewer."""
    del request
    return Role.VIEWER


class TokenAccess:
    """Gives a role to whoever has opened an address with the token once: a cookie keeps it until the process ends.

    Args:
        role: The role.
    """

    def __init__(self, role: Role) -> None:
        self.token = secrets.token_urlsafe(24)
        self._session = secrets.token_urlsafe(24)
        self._role = role

    def __call__(self, request: Request) -> Role | None:
        """The role, if the request has the session's cookie."""
        return self._role if _same(request.cookies.get(SESSION_COOKIE, ""), self._session) else None

    def opens(self, request: Request) -> bool:
        """Whether the address has the token."""
        return _same(request.query_params.get("token", ""), self.token)

    def remember(self, request: Request, response: Response) -> None:
        """Set the cookie."""
        set_cookie(request, response, SESSION_COOKIE, self._session)


async def role_of(request: Request, authorize: Authorize) -> Role | None:
    """The visitor's role."""
    found = authorize(request)
    return await found if inspect.isawaitable(found) else found


def who(request: Request) -> str:
    """The visitor's name for the log: what `authorize` has set, the authenticated user's, or the network address."""
    named = getattr(request.state, "who", None)
    if named is None and "user" in request.scope and getattr(request.scope["user"], "is_authenticated", False):
        named = getattr(request.scope["user"], "display_name", None)
    return str(named or (request.client.host if request.client is not None else "somebody"))


# --- forms --------------------------------------------------------------------------------------------------------------------


def form_token(request: Request) -> str:
    """The token for the forms of this browser: that of its cookie, or a new one, which `remember_forms` makes its own."""
    known = request.cookies.get(FORM_COOKIE, "")
    token = known if len(known) >= 32 else secrets.token_urlsafe(32)  # noqa: PLR2004  (shorter ones are not from us)
    request.state.form_token = token
    return token


def remember_forms(request: Request, response: Response) -> None:
    """Set the cookie of the forms' token, if the browser has none."""
    token: str | None = getattr(request.state, "form_token", None)
    if token is not None and request.cookies.get(FORM_COOKIE) != token:
        set_cookie(request, response, FORM_COOKIE, token)


async def read_form(request: Request) -> Form | None:
    """The fields of a form; None if it is too long."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _FORM_BYTES:
            return None
    return parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)


def forgery(request: Request, form: Form, origins: Collection[str]) -> str | None:
    """Why a form is not one of our own pages'; None if it is.

    The browser says from which page it comes (Origin), and it must have the token of our cookie, which other pages can neither
    read nor set.
    """
    origin = request.headers.get("origin")
    if origin is None:
        if request.headers.get("sec-fetch-site") != "same-origin":
            return "the browser has not said from which page it comes"
    elif origin not in origins and urlsplit(origin).netloc != request.headers.get("host"):
        proxy = "if that is your proxy, name it with --origin, or console(…, origins=[…])"
        return f"it comes from a page of {origin}, and the request is for {request.headers.get('host')} ({proxy})"
    cookie, given = request.cookies.get(FORM_COOKIE, ""), form.get(FORM_TOKEN, ("",))[0]
    if not cookie or not _same(cookie, given):
        return "it has no valid token"
    return None


def set_cookie(request: Request, response: Response, name: str, value: str) -> None:
    """A cookie that scripts can't read, and that is not sent with requests of other sites."""
    path = request.scope.get("root_path", "") or "/"
    is_secure = request.url.scheme == "https"
    response.set_cookie(name, value, path=path, httponly=True, samesite="strict", secure=is_secure)


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
