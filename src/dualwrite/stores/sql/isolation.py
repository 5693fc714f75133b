"""What a unit leaves behind in its session: settings, temporary tables, cursors, locks. No I/O.

Units of a group share a session, so what one of them leaves behind would reach the next one: such a unit runs alone. A
`StatementWatch` sees each statement, and each call whose statements are not seen. `text_effect` finds what the text of a
statement shows. What a function does that users have made is not known: it may leave anything behind. `SessionEffects` asks the
database which functions of a statement are such ones. Triggers, defaults, views and the like are not looked at.

A statement leaves nothing behind if it begins with a word of `_HARMLESS`, and calls only the database's own functions, but none
of `_SESSION_CALLS`.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from dualwrite.stores.store_transaction import RunAloneError

_SHOWN_CHARACTERS: Final = 80
"""Of a statement, in an error."""
_REMEMBERED_SECONDS: Final = 60.0
_MAX_TEXTS: Final = 10_000
_MAX_CHARACTERS: Final = 4_000
"""Characters of a text that is remembered: longer ones have values in them, and come once."""
_DEFINING: Final = re.compile(r"\b(?:CREATE|ALTER|DROP)\b", re.IGNORECASE)


class Effect(IntEnum):
    """How long what a statement leaves behind is seen by those that come after it."""

    NONE = 0
    TRANSACTION = 1
    """Until the transaction ends: `SET LOCAL`, `set_config(…, true)`, cursors, `ON COMMIT DROP`."""
    SESSION = 2
    """As long as the connection exists: `SET`, other temporary tables, session-level locks, prepared statements."""


@dataclass(frozen=True, slots=True)
class TextEffect:
    """What the text of a statement shows.

    Args:
        effect: Its effect, apart from that of functions that users have made.
        if_false: Its effect if one of its parameters is false: `set_config(…, …, :is_local)`.
        called: The names of what may be functions; see `_called`.
    """

    effect: Effect
    if_false: Effect
    called: frozenset[str]


_HARMLESS: Final = frozenset(
    (
        *("SELECT", "INSERT", "UPDATE", "DELETE", "MERGE", "REPLACE", "WITH", "VALUES", "TABLE", "EXPLAIN", "COPY", "SHOW"),
        *("DESCRIBE", "DESC", "SAVEPOINT", "RELEASE", "ROLLBACK", "NOTIFY", "FETCH", "MOVE", "CLOSE", "LOCK"),
    )
)
_OF_DATABASE: Final = frozenset(
    (
        *("CREATE", "ALTER", "DROP", "TRUNCATE", "COMMENT", "GRANT", "REVOKE"),
        *("ANALYZE", "REFRESH", "REINDEX", "IMPORT", "SECURITY"),
    )
)
"""They leave nothing in the session, but others may see what they do, or it calls, until the transaction ends."""
_POSTGRESQL_LOCAL: Final = ("LOCAL ", "CONSTRAINTS ", "TRANSACTION ")
"""What follows SET if it ends with the transaction."""

_STRING: Final = r"'(?:[^']|'')*'"
_FLAT_COMMENT: Final = r"/\*(?:(?!/\*|\*/).)*\*/"
_NESTED_COMMENT: Final = rf"/\*(?:(?!/\*|\*/).|{_FLAT_COMMENT})*\*/"
"""PostgreSQL's comments may contain comments; deeper ones are taken for something unknown."""
_TOKENS: Final = {
    "postgresql": rf"(?P<string>\b[eE]'(?:[^'\\]|\\.|'')*'|{_STRING}|(?<![\w$])\$(?P<tag>(?:[^\W\d]\w*)?)\$.*?\$(?P=tag)\$)"
    rf'|(?P<comment>--[^\n]*|{_NESTED_COMMENT})|"(?P<name>(?:[^"]|"")*)"',
    # before a parenthesis or a dot, "…" is a name (ANSI_QUOTES); without a space after it, -- is no comment
    "mysql": r"""(?P<string>'(?:[^'\\]|\\.|'')*'|"(?![\w$]+"\s*[.(])(?:[^"\\]|\\.|"")*")"""
    r"""|(?P<comment>--(?=[\s\x00-\x1f]|\Z)[^\n]*|\#[^\n]*|/\*.*?\*/)|(?P<quote>[`"])(?P<name>(?:(?!(?P=quote)).)*)(?P=quote)""",
    "sqlite": rf"(?P<string>{_STRING})|(?P<comment>--[^\n]*|/\*.*?\*/)|[\"`\[](?P<name>[^\"`\]]*)[\"`\]]",
}
_TOKEN: Final = {name: re.compile(pattern, re.DOTALL) for name, pattern in _TOKENS.items()}
_NAME: Final = r"[\w$\x80-\U0010ffff]+"
"""MySQL's may begin with a digit; PostgreSQL's may contain every character but ASCII's."""
_IDENTIFIER: Final = re.compile(_NAME)
_CALL: Final = re.compile(rf"(?<![\w$\x80-\U0010ffff])((?:{_NAME}\s*\.\s*)*{_NAME})\s*\(")
_ASCII_LOWER: Final = {ord(letter): letter.lower() for letter in string.ascii_uppercase}
_FIRST_WORDS: Final = re.compile(r"[\s(]*(\w+|[^\w\s(])\s*(.*)", re.DOTALL)
_TEMPORARY: Final = {
    family: re.compile(
        r"\bCREATE\s+(?:OR\s+REPLACE\s+)?(?:(?:GLOBAL|LOCAL)\s+)?TEMP(?:ORARY)?\b"
        r"|\bINTO\s+(?:LOCAL\s+|GLOBAL\s+)?TEMP(?:ORARY)?\b" + schema,
        re.IGNORECASE,
    )
    for family, schema in {"postgresql": r"|\bpg_temp\w*", "mysql": "", "sqlite": r"|\btemp(?:orary)?\s*\."}.items()
}
_ON_COMMIT_DROP: Final = re.compile(r"\bON\s+COMMIT\s+DROP\b", re.IGNORECASE)
_SET_CONFIG: Final = re.compile(r"\bset_config\s*\(", re.IGNORECASE)
_LOCAL_SET_CONFIG: Final = re.compile(
    r"\bset_config\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*,\s*"
    r"(?:true|(?P<parameter>%s|%\(\w+\)s|\$\d+|:\w+|%[bt]|%\(\w+\)[bt]))\s*(?:::\s*\w+\s*)?\)",
    re.IGNORECASE,
)
"""`set_config(name, value, is_local)` until the end of the transaction: if `is_local` is a parameter, unless that is false."""
_SESSION_CALLS: Final = {
    "postgresql": re.compile(
        r"\b(?:pg_(?:try_)?advisory_lock(?:_shared)?|setseed|lo_open|pg_replication_origin_(?:session|xact)_\w+"
        r"|dblink_(?:connect|open)\w*|set_limit"  # of the extensions dblink and pg_trgm
        # these execute a statement that they get as text
        r"|(?:query|cursor|table|schema|database)_to_xml\w*|ts_(?:stat|rewrite)|crosstab\w*|connectby|xpath_table)\s*\("
        r"|\bUPDATE\s+(?:ONLY\s+)?(?:pg_catalog\s*\.\s*)?pg_settings\b",
        re.IGNORECASE,
    ),
    "mysql": re.compile(r":=|\bINTO\s+@|\bGET_LOCK\s*\(|/\*M?!", re.IGNORECASE),
    "sqlite": re.compile(r"\bload_extension\s*\(", re.IGNORECASE),
}
_UNREADABLE: Final = re.compile(r"\\|\bUESCAPE\b|/\*", re.IGNORECASE)
"""Names with escapes (`U&"…"`), and comments that are nested too deeply: where PostgreSQL reads another text than we do."""
_OWN_SAVEPOINT: Final = "SA_SAVEPOINT_"
"""SQLAlchemy's, for begin_nested(): no other unit knows its number."""

_FALSE: Final = ("false", "off", "no", "0", "none")


def text_effect(sql: str, family: str) -> TextEffect:
    """What the text of a statement, or of several, shows; `family` is "postgresql", "mysql" (and MariaDB), or "sqlite"."""
    text = plain(sql, family)
    effect, if_false = _effect_of_calls(text, family)
    for statement in text.split(";"):
        found = _FIRST_WORDS.match(statement)
        if found is not None:
            effect = max(effect, _effect_of_statement(found[1].upper(), found[2], family))
    if _TEMPORARY[family].search(text):
        effect = max(effect, Effect.TRANSACTION if _ON_COMMIT_DROP.search(text) else Effect.SESSION)
    if family == "mysql" and _SESSION_CALLS[family].search(sql):  # executable comments are no comments
        effect = Effect.SESSION
    return TextEffect(effect, max(effect, if_false), _called(sql, text, family))


def any_is_false(parameters: Any) -> bool:
    """Whether one of a statement's parameters may be false for `set_config`, as NULL is; so may those that can't be read."""
    if isinstance(parameters, dict):
        return any(isinstance(each, dict | list | tuple) or any_is_false(each) for each in parameters.values())
    if isinstance(parameters, list | tuple):
        return any(map(any_is_false, parameters))
    if isinstance(parameters, str | bytes):
        text = (parameters if isinstance(parameters, str) else parameters.decode(errors="replace")).strip().lower()
        return text != "" and any(word.startswith(text) for word in _FALSE)  # PostgreSQL takes abbreviations
    return str(parameters).lower() in _FALSE or hasattr(parameters, "__iter__")


def plain(sql: str, family: str) -> str:
    """The text without comments and the content of strings, and with quoted names as if they were not quoted."""

    def replaced(token: re.Match[str]) -> str:
        if token["string"] is not None:
            return "''"
        return " " if token["comment"] is not None else token["name"].replace(";", "_")

    return _TOKEN[family].sub(replaced, sql)


def _called(sql: str, plain: str, family: str) -> frozenset[str]:
    """What precedes a parenthesis, and what qualifies it (a package of MariaDB), in each case that the database may make of it.

    Besides functions, these are keywords, tables and types. Quoted names that have spaces or the like may be functions anyway.
    """
    quoted = (token["name"].replace('""', '"') for token in _TOKEN[family].finditer(sql) if token["name"])
    names = {name for call in _CALL.finditer(plain) for name in _IDENTIFIER.findall(call[1])}
    names.update(name for name in quoted if _IDENTIFIER.fullmatch(name) is None)
    return frozenset(case for name in names for case in (name, name.lower(), name.translate(_ASCII_LOWER)))


def _effect_of_statement(word: str, rest: str, family: str) -> Effect:
    """The effect of a statement that begins with `word`, apart from what it calls."""
    if word == "SAVEPOINT" and not rest.upper().startswith(_OWN_SAVEPOINT):
        return Effect.TRANSACTION  # the units after it could roll back to it
    if word in _HARMLESS:
        return Effect.NONE
    match family, word:
        case "postgresql", "SET":
            return Effect.TRANSACTION if rest.upper().startswith(_POSTGRESQL_LOCAL) else Effect.SESSION
        case "postgresql", "DECLARE":
            is_local = re.search(r"\bWITH\s+HOLD\b", rest, re.IGNORECASE) is None
        case "mysql", "LOAD" if re.match(r"(?:DATA|XML)\b", rest, re.IGNORECASE):
            return Effect.NONE
        case _:
            is_local = word in _OF_DATABASE
    return Effect.TRANSACTION if is_local else Effect.SESSION


def _effect_of_calls(plain: str, family: str) -> tuple[Effect, Effect]:
    """The effect of the built-in functions that a text calls, and the same if a parameter is false."""
    if _SESSION_CALLS[family].search(plain) or (family == "postgresql" and _UNREADABLE.search(plain)):
        return Effect.SESSION, Effect.SESSION
    calls = len(_SET_CONFIG.findall(plain)) if family == "postgresql" else 0
    if not calls:
        return Effect.NONE, Effect.NONE
    parameters = [call["parameter"] for call in _LOCAL_SET_CONFIG.finditer(plain)]
    if len(parameters) < calls:
        return Effect.SESSION, Effect.SESSION
    return Effect.TRANSACTION, Effect.SESSION if any(parameters) else Effect.TRANSACTION


OwnFunctions = Callable[[frozenset[str]], bool | None]
"""Whether users have made a function with one of these names.

None: the database can't be asked now, because an earlier statement has failed; so will the next one, unless it rolls back.
"""


class SessionEffects:
    """The effects of one database's statements. Threads may share it: a lost update costs a query."""

    def __init__(self, family: str) -> None:
        self._family = family
        self._until = 0.0
        self._texts: dict[str, TextEffect] = {}
        self._harmless: set[str] = set()  # those of `_texts` that leave nothing behind, whatever their parameters are
        self._known: set[str] = set()  # names that users have made no function with

    def is_harmless(self, sql: str) -> bool:
        """Whether `of` has found, in this minute, that a statement leaves nothing behind, whatever its parameters are."""
        return sql in self._harmless and time.monotonic() < self._until

    def of(self, sql: str, parameters: Any, own_functions: OwnFunctions) -> Effect:
        """The effect of a statement with parameters in any form; `own_functions` asks the database.

        What it says is forgotten after a minute, and when a statement defines something: a name may become a function's.
        """
        now = time.monotonic()
        if now > self._until or len(self._texts) > _MAX_TEXTS:
            self._texts, self._harmless, self._known, self._until = {}, set(), set(), now + _REMEMBERED_SECONDS
        found = self._texts.get(sql)
        if found is None:
            found = text_effect(sql, self._family)
            names = found.called - self._known
            if names and found.effect is not Effect.SESSION:
                is_own = own_functions(names)
                if is_own is None:
                    return found.effect
                if is_own:
                    found = TextEffect(Effect.SESSION, Effect.SESSION, found.called)
                else:
                    self._known |= names
            if len(sql) <= _MAX_CHARACTERS:
                self._texts[sql] = found
                if found.if_false is Effect.NONE:  # it is never less than the effect
                    self._harmless.add(sql)
            if found.effect is not Effect.NONE and _DEFINING.search(sql):
                self._until = 0.0  # before the next statement, which may call what this one defines
        if found.effect is found.if_false:
            return found.effect
        return found.if_false if any_is_false(parameters) else found.effect


class StatementWatch:
    """Watches the statements of one transaction, and the calls whose statements are not seen; see `StoreTransaction.watch`.

    Args:
        effects: Of the store.
        own_functions: Asks the database, on the transaction's connection.

    Attributes:
        is_harmless: See `SessionEffects`: such a statement need not be seen.
        shares: Whether others use the transaction too.
        refused: What the current unit was about to do when it was refused.
        has_changed_session: Whether something was left behind in the session.
    """

    __slots__ = ("_effects", "_own_functions", "has_changed_session", "is_harmless", "refused", "shares")

    def __init__(self, effects: SessionEffects, own_functions: OwnFunctions) -> None:
        self._effects = effects
        self._own_functions = own_functions
        self.is_harmless = effects.is_harmless
        self.shares = False
        self.refused: str | None = None
        self.has_changed_session = False

    def see(self, sql: str, parameters: Any) -> None:
        """Called before each statement.

        Raises:
            RunAloneError: It would leave something behind, and others share the transaction. It must not be executed.
        """
        effect = self._effects.of(sql, parameters, self._own_functions)
        if effect is not Effect.NONE:
            self.see_call(" ".join(sql.split())[:_SHOWN_CHARACTERS], effect)

    def see_call(self, call: str, effect: Effect = Effect.SESSION) -> None:
        """Called before something whose statements are not seen, such as a use of the driver's own connection.

        Raises: as for `see`.
        """
        if self.shares:
            self.refused = call
            raise RunAloneError(call)
        self.has_changed_session |= effect is Effect.SESSION

    def see_past(self, call: str) -> None:
        """Called after something whose statements were not seen. The unit is undone, and the connection replaced.

        Raises: as for `see`.
        """
        self.has_changed_session = True
        self.see_call(call)
