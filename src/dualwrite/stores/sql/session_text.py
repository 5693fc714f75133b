"""What a SQL text leaves behind in the session: settings, temporary tables, cursors, locks. No I/O.

Units of a group share a session, so what one of them leaves behind would reach the next one. `examined` finds it in the text
of a statement, `examined_body` in that of the functions and triggers that it may call; `SessionEffects` gets these from the
database.

Every statement that does not begin with a word of `_HARMLESS` is taken for one that changes the session.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

_REMEMBERED: Final = 60.0
"""Seconds."""
_MOST_TEXTS: Final = 10_000
_LONGEST: Final = 4_000
"""Characters of a text that is remembered: longer ones have values in them, and come once."""
_DEFINING: Final = frozenset(("create", "alter", "drop"))


class Effect(IntEnum):
    """How long what a statement leaves behind is seen by those that come after it."""

    NONE = 0
    TRANSACTION = 1
    """Until the transaction ends: `SET LOCAL`, `set_config(…, true)`, cursors, `ON COMMIT DROP`."""
    SESSION = 2
    """As long as the connection exists: `SET`, other temporary tables, session-level locks, prepared statements."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What the text of a statement shows.

    Args:
        effect: Its effect, apart from the functions and triggers that it calls.
        names: All its identifiers, in lower case: some may be functions, or tables with triggers.
        if_false: Its effect if one of its parameters is false: `set_config(…, …, :is_local)`.
    """

    effect: Effect
    names: frozenset[str]
    if_false: Effect


_HARMLESS: Final = frozenset(
    (
        *("SELECT", "INSERT", "UPDATE", "DELETE", "MERGE", "REPLACE", "WITH", "VALUES", "TABLE", "EXPLAIN", "COPY", "SHOW"),
        *("DESCRIBE", "DESC", "SAVEPOINT", "RELEASE", "ROLLBACK", "NOTIFY", "FETCH", "MOVE", "CLOSE", "LOCK", "ANALYZE"),
        *("CREATE", "ALTER", "DROP", "TRUNCATE", "COMMENT", "GRANT", "REVOKE", "REFRESH", "REINDEX", "IMPORT", "SECURITY"),
    )
)
_CALL_NOTHING: Final = frozenset(("SAVEPOINT", "RELEASE", "ROLLBACK"))
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
_IDENTIFIER: Final = re.compile(r"[^\W\d][\w$]*")
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

_READING_PRAGMA: Final = re.compile(
    r"(?:\w+\.)?(?:\w+\s*\Z|(?:table_x?info|table_list|index_list|index_x?info|foreign_key_list|foreign_key_check|"
    r"integrity_check|quick_check)\s*\()",
    re.IGNORECASE,
)
_STATEMENT_IN_BODY: Final = re.compile(
    r"(?:\A|;|\b(?:BEGIN|THEN|ELSE|LOOP|ATOMIC|DO|RETURN)\b)\s*(SET|RESET|DISCARD|LISTEN|PREPARE|DECLARE|LOAD|OPEN)\b\s*(\S*)",
    re.IGNORECASE,
)
_ASSIGNMENT: Final = re.compile(
    r"(?:\A|;|\b(?:BEGIN|THEN|ELSE|LOOP|DO)\b)\s*SET\s+(?!NEW\b|STATEMENT\b)(@{0,2}\w+)|(@\w+)\s*:?=", re.IGNORECASE
)
_PREPARE: Final = re.compile(r"\bPREPARE\b", re.IGNORECASE)
_DECLARED: Final = re.compile(r"\bDECLARE\s+([\w\s,]+?)\s+\w+(?:\s*\(|\s*;|\s+DEFAULT|\s+UNSIGNED)", re.IGNORECASE)
_UNTIL_BEGIN: Final = re.compile(r"\bDECLARE\b.*?\bBEGIN\b", re.IGNORECASE | re.DOTALL)
_FALSE: Final = ("false", "off", "no", "0", "none")
_DOLLAR_QUOTED: Final = re.compile(r"\$(\w*)\$(.*?)\$\1\$", re.DOTALL)
_EXECUTES: Final = re.compile(r"\bEXECUTE\b(?:\s+format\s*\()?(?:\s*E?'\s*(\w+)(?:\s+(\w+))?)?", re.IGNORECASE)


def examined(sql: str, family: str) -> Examined:
    """What the text of a statement, or of several, shows; `family` is "postgresql", "mysql" (and MariaDB), or "sqlite"."""
    plain = _plain(sql, family)
    effect = if_false = Effect.NONE
    words, names = set(), _names(sql, plain, family)
    for statement in plain.split(";"):
        found = _FIRST_WORDS.match(statement)
        if found is not None:
            words.add(found[1].upper())
            effect = max(effect, _effect_of_statement(found[1].upper(), found[2], family))
    if words and words <= _CALL_NOTHING:
        return Examined(effect, frozenset(), effect)
    if family == "postgresql" and "DO" in words:
        body = _body_of_do(sql, plain)
        effect, names = max(effect, body.effect), names | body.names
    called, called_if_false = _effect_of_calls(plain, family)
    if _TEMPORARY[family].search(plain):
        called = max(called, Effect.TRANSACTION if _ON_COMMIT_DROP.search(plain) else Effect.SESSION)
    if family == "mysql" and _SESSION_CALLS[family].search(sql):  # executable comments are no comments
        called = Effect.SESSION
    effect = max(effect, called)
    if_false = max(effect, called_if_false)
    return Examined(effect, names, if_false)


def examined_body(source: str | None, language: str, family: str) -> Examined:
    """What the body of a function, a procedure or a trigger shows; everything is possible in a language that can't be read."""
    if source is None or language.lower() not in ("sql", "plpgsql"):
        return Examined(Effect.SESSION, frozenset(), Effect.SESSION)
    plain = _plain(source, family)
    effect, if_false = _effect_of_calls(plain, family)
    effect = max(effect, if_false)
    names = _names(source, plain, family)
    if _TEMPORARY[family].search(plain):
        effect = Effect.SESSION
    if family == "mysql":
        own = {name for match in _DECLARED.finditer(plain) for name in re.split(r"[\s,]+", match[1].lower())}
        if any((match[1] or "@").lower() not in own for match in _ASSIGNMENT.finditer(plain)) or _PREPARE.search(plain):
            effect = Effect.SESSION
    else:
        if re.search(r"\bEXECUTE\b", plain, re.IGNORECASE):
            effect = max(effect, _effect_of_executed_text(source))
            names |= _names(source, source, family)
        for match in _STATEMENT_IN_BODY.finditer(_UNTIL_BEGIN.sub("BEGIN", plain)):
            word = match[1].upper()
            is_local = word == "OPEN" or (word == "SET" and f"{match[2].upper()} " in _POSTGRESQL_LOCAL)
            effect = max(effect, Effect.TRANSACTION if is_local else Effect.SESSION)
    return Examined(effect, names, effect)


def any_is_false(parameters: Any) -> bool:
    """Whether one of a statement's parameters may be false for `set_config`, as NULL is; so may those that can't be read."""
    return any(_is_false(value) for value in _values(parameters))


def _is_false(value: Any) -> bool:
    if isinstance(value, str | bytes):
        text = (value if isinstance(value, str) else value.decode(errors="replace")).strip().lower()
        return text != "" and any(word.startswith(text) for word in _FALSE)  # PostgreSQL takes abbreviations
    return str(value).lower() in _FALSE or hasattr(value, "__iter__")


def _values(parameters: Any) -> Iterator[Any]:
    if isinstance(parameters, dict):
        yield from parameters.values()
    elif isinstance(parameters, (list, tuple)):
        for each in parameters:
            if isinstance(each, (dict, list, tuple)):
                yield from _values(each)
            else:
                yield each


def _plain(sql: str, family: str) -> str:
    """The text without comments and the content of strings, and with quoted names as if they were not quoted."""

    def replaced(token: re.Match[str]) -> str:
        if token["string"] is not None:
            return "''"
        return " " if token["comment"] is not None else token["name"].replace(";", "_")

    return _TOKEN[family].sub(replaced, sql)


def _names(sql: str, plain: str, family: str) -> frozenset[str]:
    """The identifiers of a text, and its quoted names, which may contain spaces."""
    quoted = (token["name"].replace('""', '"') for token in _TOKEN[family].finditer(sql) if token["name"])
    return frozenset(name.lower() for name in (*_IDENTIFIER.findall(plain), *quoted))


def _body_of_do(sql: str, plain: str) -> Examined:
    """What the blocks of `DO` show; another language, or a block in single quotes, can't be read."""
    blocks = [block[2] for block in _DOLLAR_QUOTED.finditer(sql)]
    language = re.search(r"\bLANGUAGE\s+(\w*)", plain, re.IGNORECASE)
    return examined_body(";".join(blocks) if blocks else None, "plpgsql" if language is None else language[1], "postgresql")


def _effect_of_executed_text(source: str) -> Effect:
    """The effect of a body's statements that are put together as text, by the words that they begin with."""
    if _SET_CONFIG.search(source) or _SESSION_CALLS["postgresql"].search(source) or _TEMPORARY["postgresql"].search(source):
        return Effect.SESSION
    for executed in _EXECUTES.finditer(source):
        word, second = (executed[1] or "").upper(), (executed[2] or "").upper()
        if word not in _HARMLESS and f"{word} {second} " not in ("SET LOCAL ", "SET CONSTRAINTS ", "SET TRANSACTION "):
            return Effect.SESSION
    return Effect.TRANSACTION


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
        case "sqlite", "PRAGMA" if "=" not in rest and _READING_PRAGMA.match(rest):
            return Effect.NONE
        case _:
            is_local = word == "CALL" or (family == "postgresql" and word == "DO")  # what they do is found otherwise
    return Effect.TRANSACTION if is_local else Effect.SESSION


def _effect_of_calls(plain: str, family: str) -> tuple[Effect, Effect]:
    """The effect of the built-in functions that a text calls, and the same if a parameter is false."""
    effect = if_false = Effect.NONE
    if _SESSION_CALLS[family].search(plain):
        return Effect.SESSION, Effect.SESSION
    if family == "postgresql":
        if _UNREADABLE.search(plain):
            return Effect.SESSION, Effect.SESSION
        for call in _SET_CONFIG.finditer(plain):
            own, own_if_false = _effect_of_set_config(_last_argument(plain, call.end()))
            effect, if_false = max(effect, own), max(if_false, own_if_false)
    return effect, if_false


def _effect_of_set_config(is_local: str) -> tuple[Effect, Effect]:
    """The effect of `set_config(name, value, is_local)`, and the same if `is_local` is a parameter that is false."""
    value = re.sub(r"::\s*\w+", "", is_local).strip().lower()
    if value == "true":
        return Effect.TRANSACTION, Effect.TRANSACTION
    if re.fullmatch(r"%s|%\(\w+\)s|\$\d+|:\w+|%[bt]|%\(\w+\)[bt]", value):
        return Effect.TRANSACTION, Effect.SESSION
    return Effect.SESSION, Effect.SESSION


def _last_argument(plain: str, start: int) -> str:
    """The last argument of a call whose arguments begin at `start`."""
    depth, begin = 0, start
    for place in range(start, len(plain)):
        character = plain[place]
        if character == "(":
            depth += 1
        elif character == ")":
            if depth == 0:
                return plain[begin:place]
            depth -= 1
        elif character == "," and depth == 0:
            begin = place + 1
    return ""


class Routine(NamedTuple):
    """A function, a procedure or a trigger of the database; the source is None if the database does not show it."""

    source: str | None
    language: str


Routines = Callable[[frozenset[str]], Iterable[Routine] | None]
"""Returns the routines with these names, in lower case, and those that triggers of tables with these names call.

None: the database can't be asked now, because an earlier statement has failed; so will the next one, unless it rolls back.
"""


class SessionEffects:
    """The effects of one database's statements. Threads may share it: a lost update costs a query."""

    def __init__(self, family: str) -> None:
        self._family = family
        self._until = 0.0
        self._texts: dict[str, Examined] = {}
        self._harmless: set[str] = set()  # those of `_texts` that leave nothing behind, whatever their parameters are
        self._known: set[str] = set()  # names that were asked for, and lead to nothing that leaves anything behind

    def is_harmless(self, sql: str) -> bool:
        """Whether `of` has found, in this minute, that a statement leaves nothing behind, whatever its parameters are."""
        return sql in self._harmless and time.monotonic() < self._until

    def of(self, sql: str, parameters: Any, routines: Routines) -> Effect:
        """The effect of a statement with parameters in any form; `routines` asks the database."""
        now = time.monotonic()
        if now > self._until or len(self._texts) > _MOST_TEXTS:
            self._texts, self._harmless, self._known, self._until = {}, set(), set(), now + _REMEMBERED
        found = self._texts.get(sql)
        if found is None:
            own = examined(sql, self._family)
            found = self._with_routines(own, routines)
            if found is None:
                return own.effect
            if len(sql) <= _LONGEST:
                self._texts[sql] = found
                if found.if_false is Effect.NONE:  # it is never less than the effect
                    self._harmless.add(sql)
            if found.names & _DEFINING:
                self._until = 0.0  # before the next statement, which may call what this one defines
        if found.effect is found.if_false:
            return found.effect
        return found.if_false if any_is_false(parameters) else found.effect

    def _with_routines(self, found: Examined, routines: Routines) -> Examined | None:
        """With the effects of what is called, as far as the calls go; None if the database can't be asked."""
        called, asked = Effect.NONE, set(found.names)
        names = found.names - self._known
        while names and max(called, found.effect) is not Effect.SESSION:
            answer = routines(frozenset(names))
            if answer is None:
                return None
            bodies = [examined_body(source, language, self._family) for source, language in answer]
            called = max([called, *(body.effect for body in bodies)])
            names = frozenset().union(*(body.names for body in bodies)) - asked - self._known
            asked |= names
        if called is Effect.NONE and not names:  # otherwise one of them leaves something behind, or was not asked for
            self._known |= asked
        effect = max(called, found.effect)
        return Examined(effect, found.names, max(effect, found.if_false))
