"""The console's ASGI application: addresses, roles, and the headers that keep a page from doing anything else."""

from __future__ import annotations

import math
import os
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualwrite.aio.async_pool import AsyncWriterPool
from dualwrite.console.access import (
    FORM_TOKEN,
    Authorize,
    Role,
    TokenAccess,
    everybody_may_look,
    forgery,
    form_token,
    read_form,
    remember_forms,
    role_of,
    who,
)
from dualwrite.console.actions import Actions
from dualwrite.console.detail import Detail, read_detail
from dualwrite.console.pages import ASSETS, rendered
from dualwrite.console.recent import Recent
from dualwrite.console.sections import EVERY_SECONDS, Sections
from dualwrite.console.shared_read import SharedRead
from dualwrite.console.subject import LIMIT_SECONDS, Subject
from dualwrite.console.verdict import verdict
from dualwrite.console.waiting import History
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.observability import add_observer, remove_observer
from dualwrite.pool.pool import WriterPool
from dualwrite.relay import Relay
from dualwrite.settings import Settings

TABS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "overview": ("Overview", ("todo", "waiting")),
    "ids": ("Ids", ("lost", "ids")),
    "stuck": ("Stuck", ("stuck",)),
    "journals": ("Journals, relays", ("journals", "relays")),
    "letters": ("Dead letters", ("letters", "topics")),
    "consumers": ("Consumers", ("consumers",)),
    "jobs": ("Jobs", ("jobs",)),
    "rates": ("Rates", ("rates",)),
    "doctor": ("Doctor", ("doctor",)),
    "actions": ("Actions", ("carried",)),
}
"""The tabs: the last part of each address, except of the first; its title, and its sections in their order."""

SECTIONS: Final = ("verdict", *(section for _, sections in TABS.values() for section in sections))
"""All sections. The verdict is on each page."""

_AT_ONCE: Final = ("verdict", "todo", "waiting")
"""What shows what is known now, without waiting for a side that does not answer."""

FIRST_SECONDS: Final = 1.0
"""Seconds that a page waits for what is not known yet; its sections ask again by themselves."""

_MAX_DETAILS: Final = 20
_BUSY: Final = "Too many ids are being read at the moment. Load the page again later."
_YEAR_SECONDS: Final = 31_536_000
_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # with no-referrer, browsers would hide the origin of our own forms
    (b"cross-origin-opener-policy", b"same-origin"),
)

Handler = Callable[[Request, Role], Awaitable[Response]]


class Console:
    """The application; mount it, or serve it. See `console` for the arguments."""

    def __init__(
        self,
        subject: Subject,
        *,
        recent: Recent | None,
        authorize: Authorize = everybody_may_look,
        topics: Iterable[str] = (),
        origins: Collection[str] = (),
    ) -> None:
        self._subject = subject
        self._recent = recent
        self._authorize = authorize
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._sections = Sections(subject, recent, topics)
        self._history = History(self._sections, self._begin_to_read)
        self._actions = Actions(subject, self._read_again)
        self._details: OrderedDict[str, SharedRead[Detail]] = OrderedDict()
        self._app: ASGIApp = Starlette(
            routes=[
                Route("/", self._for(self._page)),
                Route("/section/{name}", self._for(self._section)),
                Route("/id/{name:path}", self._for(self._id)),
                Route("/detail/{name:path}", self._for(self._detail)),
                Route("/act/{name}", self._for(self._act, needs=Role.OPERATOR), methods=["POST"]),
                Route("/static/{name:path}", _static),
                Route("/{tab}", self._for(self._page)),
            ]
        )
        if recent is not None:
            add_observer(recent)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        await self._app(_placed(scope) if "path" in scope else scope, receive, with_headers)

    def close(self) -> None:
        """Observe and read nothing any more, and close the database if the console has opened it."""
        if self._recent is not None:
            remove_observer(self._recent)
        self._history.close()
        self._subject.close()

    # --- roles ------------------------------------------------------------------------------------------------------------

    def _for(self, handler: Handler, *, needs: Role = Role.VIEWER) -> Callable[[Request], Awaitable[Response]]:
        """The handler for those who have the role."""

        async def checked(request: Request) -> Response:
            if isinstance(self._authorize, TokenAccess) and request.method == "GET" and self._authorize.opens(request):
                opened = RedirectResponse(request.scope["path"], status_code=303)  # the token disappears from the address
                self._authorize.remember(request, opened)
                return _private(opened)
            role = await role_of(request, self._authorize)
            if role is None:
                return self._refused(request, "You have no access to this page.", 401)
            if needs is Role.OPERATOR and role is not Role.OPERATOR:
                return self._refused(request, "Only operators may do this; you may look.", 403)
            self._history.look()
            response = await handler(request, role)
            remember_forms(request, response)
            return _private(response)

        return checked

    def _refused(self, request: Request, why: str, status: int) -> Response:
        has_token = isinstance(self._authorize, TokenAccess)
        values = {"base": _base(request), "why": why, "has_token": has_token}
        return _private(HTMLResponse(rendered("refused.html", **values), status))

    # --- pages ------------------------------------------------------------------------------------------------------------

    async def _page(self, request: Request, role: Role) -> Response:
        tab = request.path_params.get("tab", "overview")
        if tab not in TABS or ("tab" in request.path_params and tab == "overview"):
            return self._refused(request, "There is no such page.", 404)
        self._look_again(request, tab)
        title, sections = TABS[tab]
        await _all(self._reads("verdict", *sections), FIRST_SECONDS)
        values = self._values(request, role) | {"tab": tab, "title": title, "sections": sections}
        return HTMLResponse(rendered("page.html", **values))

    async def _section(self, request: Request, role: Role) -> Response:
        name = request.path_params["name"]
        if name not in SECTIONS:
            return self._refused(request, "There is no such section.", 404)
        self._look_again(request, name)
        await _all(self._reads(name), FIRST_SECONDS if name in _AT_ONCE else None)
        values = self._values(request, role) | {"tab": request.query_params.get("tab", "")}
        return HTMLResponse(rendered(f"{name}.html", **values))

    def _look_again(self, request: Request, name: str) -> None:
        if name == "doctor" and "again" in request.query_params:
            self._sections.doctor.again()

    async def _id(self, request: Request, role: Role) -> Response:
        return await self._of_id("id.html", FIRST_SECONDS, request, role)

    async def _detail(self, request: Request, role: Role) -> Response:
        return await self._of_id("detail.html", None, request, role)

    async def _of_id(self, template: str, wait: float | None, request: Request, role: Role) -> Response:
        detail = self._detail_of(request)
        if detail is None:
            return self._refused(request, _BUSY, 503)
        answer = await detail.answer(wait)
        values = self._values(request, role) | {"answer": answer, "name": request.path_params["name"], "tab": "ids"}
        return HTMLResponse(rendered(template, **values))

    async def _act(self, request: Request, role: Role) -> Response:
        del role
        name = request.path_params["name"]
        form = await read_form(request)
        if name not in self._actions.names or form is None:
            return self._refused(request, "There is no such action.", 404)
        why = forgery(request, form, self._origins)
        if why is not None:
            return self._refused(request, f"The form was not accepted: {why}. Load the page again.", 403)
        fields = {field: values for field, values in form.items() if field != FORM_TOKEN}
        await self._actions.carry_out(name, fields, who(request))
        return RedirectResponse(f"{_base(request)}/actions", status_code=303)

    def _detail_of(self, request: Request) -> SharedRead[Detail] | None:
        """What is known of an id; None if too many are being read."""
        name = request.path_params["name"]
        if name not in self._details:
            if len(self._details) >= _MAX_DETAILS:
                idle = next((each for each, known in self._details.items() if not known.is_running), None)
                if idle is None:
                    return None
                del self._details[idle]
            read = partial(read_detail, self._subject, self._recent, name)
            self._details[name] = SharedRead(f"the id {name}", read, limit=LIMIT_SECONDS + 2, every=EVERY_SECONDS)
        self._details.move_to_end(name)
        return self._details[name]

    def _values(self, request: Request, role: Role) -> dict[str, Any]:
        """What templates can use."""
        subject = self._subject
        return {
            "base": _base(request),
            "process": f"{socket.gethostname()}, pid {os.getpid()}",
            "role": role.value,
            "is_operator": role is Role.OPERATOR,
            "token": form_token(request),
            "every": math.ceil(EVERY_SECONDS) + 1,
            "subject": subject,
            "servers": KafkaConfig.of(subject.settings.kafka).servers if subject.has_kafka else None,
            "tabs": {name: title for name, (title, _) in TABS.items()},
            "data": self._sections,
            "history": self._history,
            "verdict": verdict(self._sections),
            "carried": self._actions.carried,
        }

    def _reads(self, *sections: str) -> list[SharedRead[Any]]:
        """What these sections show, as far as it can be read."""
        of, subject = self._sections, self._subject
        has_both = subject.has_database and subject.has_kafka
        needed: list[tuple[SharedRead[Any], object, tuple[str, ...]]] = [
            (of.ids, subject.has_database, ("verdict", "lost", "ids", *(("rates",) if self._recent is None else ()))),
            (of.seen, has_both, ("verdict", "ids", "journals")),
            (of.stuck, subject.has_kafka, ("verdict", "stuck")),
            (of.journals, subject.sql_store, ("verdict", "journals")),
            (of.letters, subject.sql_store, ("verdict", "letters")),
            (of.topics, subject.dead_letter_topics, ("verdict", "topics")),
            (of.relays, subject.relays, ("verdict", "relays")),
            (of.positions, subject.has_database, ("waiting", "consumers")),
            (of.lags, has_both, ("waiting", "consumers")),
            (of.jobs, subject.sql_store, ("verdict", "ids", "jobs")),
            (of.doctor, True, ("doctor",)),
        ]
        also = {"verdict"} if set(sections) & {"todo", "waiting"} else set()
        return [read for read, is_there, shown in needed if is_there and {*sections, *also} & set(shown)]

    def _begin_to_read(self) -> None:
        for read in self._reads("verdict", "waiting"):
            read.begin_if_due()

    def _read_again(self) -> None:
        for read in (*self._reads(*set(SECTIONS) - {"doctor"}), *self._details.values()):
            read.again()


async def _all(reads: Iterable[SharedRead[Any]], wait: float | None) -> None:
    """Wait for the answers, all at the same time."""
    async with anyio.create_task_group() as tasks:
        for each in reads:
            tasks.start_soon(each.answer, wait)


async def _static(request: Request) -> Response:
    asset = ASSETS.get(request.path_params["name"])
    if asset is None:
        return Response(status_code=404)
    cache = {"cache-control": f"public, max-age={_YEAR_SECONDS}, immutable"}
    return Response(asset.content, media_type=asset.media_type, headers=cache)


def _placed(scope: Scope) -> Scope:
    """The scope with a path that begins with the root path, whether a proxy has kept that or taken it away."""
    root, path = str(scope.get("root_path", "")).rstrip("/"), str(scope["path"])
    if path == root:
        path = f"{root}/"
    elif not path.startswith(f"{root}/"):
        path = scope.get("app_root_path", root) + path  # mounted: only what is above the whole application can be missing
    return {**scope, "root_path": root, "path": path}


def _base(request: Request) -> str:
    """The path below which the console is, without a slash at its end."""
    return str(request.scope["root_path"])


def _private(response: Response) -> Response:
    response.headers["cache-control"] = "no-store"
    return response


def console(
    pool: WriterPool[Any] | AsyncWriterPool[Any] | None = None,
    *,
    settings: Settings | None = None,
    authorize: Authorize | None = None,
    relays: Iterable[Relay] = (),
    dead_letter_topics: Iterable[str] = (),
    topics: Iterable[str] = (),
    origins: Collection[str] = (),
) -> Console:
    """Make the page of a pool's database and cluster, to be mounted in an ASGI application.

    `app.mount("/dualwrite", console(pool))` mounts it in a Starlette or FastAPI application.

    It shows what the whole database and the whole cluster have, not only this pool; durations and rates are those of this
    process. Make one for a process: it observes the process until `close`. From the first look on, and until nobody has looked
    for an hour, a thread reads every 15 seconds what waits, and keeps an hour of that in memory.

    Args:
        pool: The pool; None for a console of the settings alone.
        settings: The database and Kafka, if there is no pool; by default from the environment.
        authorize: Returns the role of whoever has sent a request, or None for no access; may be a coroutine function. By
            default everybody who reaches the page may look, and nobody may act.
        relays: Relays whose dead letters can be replayed on the page, with their layouts.
        dead_letter_topics: The dead-letter topics of processors. Each is read as a whole, every 30 seconds if somebody looks.
        topics: Topics that the doctor checks.
        origins: Origins (`https://ops.example.com`) whose pages may send forms, beside that of the page itself: for a proxy
            that changes the header Host.

    Raises:
        ConfigurationError: Neither a database nor Kafka is given.
    """
    if pool is not None and settings is not None:
        raise ConfigurationError("Both a pool and settings are given.", next_step="leave the settings out")
    if pool is not None:
        subject = Subject(pool.settings, pool.store, relays, dead_letter_topics)
    else:
        subject = Subject(settings or Settings.from_environment(), None, relays, dead_letter_topics)
    recent = None if pool is None else Recent()
    chosen = everybody_may_look if authorize is None else authorize
    return Console(subject, recent=recent, authorize=chosen, topics=topics, origins=origins)
