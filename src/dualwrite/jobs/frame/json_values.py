"""Converts columns of an Arrow record batch to JSON, one object per row, column by column and never row by row.

The result is that of Spark's `to_json(struct(…))` with its default options, with these differences:

- Microseconds of a timestamp are kept if they are not zero (Spark truncates them); otherwise the text is the same as Spark's.
- A timestamp is written in UTC, with `Z`; Spark writes it in the session's time zone. The instant is the same.
- A map's key that is a date or timestamp is written as such; Spark writes the number of days or microseconds since 1970.
- The exponents of very large and very small floats are written as `1e+16`, where Java writes `1.0E16`: the same number.

As in Spark, a null field is omitted, so that consumers of a job that switches to this sink see no difference; nulls in arrays
and maps are kept; NaN and the infinities, which JSON numbers can't represent, are the strings "NaN", "Infinity" and
"-Infinity"; binary values are base64.
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dualwrite.errors import ConfigurationError

_CONTROL: Final = bytes(range(32))
_SPECIAL: Final = b'"\\' + _CONTROL  # must be escaped in a JSON string; in UTF-8 never part of another character
_SHORT: Final = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
_WHOLE: Final = "^-?[0-9]+$"
_SIMPLE: Final = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_timestamp,
)
_FORM: Final = "arrives in Spark's internal form; convert it in Spark"
_INTERNAL: Final = {
    b"variant": f"a variant {_FORM}, by to_json",
    b"geometry": f"a geometry {_FORM}, by st_asbinary",
    b"geography": f"a geography {_FORM}, by st_asbinary",
}
"""Types that PySpark passes on as a struct of their internal bytes, by the mark in the metadata of one of its fields."""
_NOT_FINITE: Final = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}


def json_values(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.Array:
    """One JSON object per row, with the columns in the given order, as an array of strings without nulls.

    Args:
        batch: The rows.
        columns: Names of the columns.

    Raises:
        ConfigurationError: A column is missing, or its type can't be written as JSON.
    """
    present = set(batch.schema.names)
    problems = [f"there is no column {name!r}" for name in columns if name not in present]
    found = ((name, json_problem(batch.schema.field(name).type)) for name in columns if name in present)
    problems += [f"column {name!r}: {problem}" for name, problem in found if problem]
    if problems:
        raise ConfigurationError(
            f"The columns can't be converted to JSON: {'; '.join(problems)}.", next_step="choose other columns, or cast these"
        )
    return _objects(list(columns), [batch.column(name) for name in columns], len(batch))


def json_problem(kind: pa.DataType) -> str | None:
    """Why a type can't be written as JSON, or None if it can."""
    if pa.types.is_struct(kind):
        own = next((_INTERNAL[mark] for field in kind for mark in _INTERNAL if mark in (field.metadata or {})), None)
        names = [field.name for field in kind]
        twice = next(
            (f"{name!r} is twice in {kind}; a JSON object has one field of a name" for name in names if names.count(name) > 1),
            None,
        )
        return own or twice or next(filter(None, (json_problem(field.type) for field in kind)), None)
    if pa.types.is_map(kind):
        if pa.types.is_nested(kind.key_type):
            return f"the keys of a JSON object are strings, not {kind.key_type}"
        return json_problem(kind.key_type) or json_problem(kind.item_type)
    if _is_list(kind) or pa.types.is_dictionary(kind):
        return json_problem(kind.value_type)
    if _is_text(kind) or _is_binary(kind) or any(test(kind) for test in _SIMPLE):
        return None
    return f"{kind} can't be written as JSON; cast it to a string"


def json_texts(column: pa.Array) -> pa.Array:  # noqa: C901, PLR0911  (one case for each kind of type)
    """Each value of a column as the text of a JSON value; null stays null. `json_problem` must be None for the type."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return json_texts(column.cast(kind.value_type))
    if pa.types.is_null(kind):
        return column.cast(pa.string())
    if pa.types.is_struct(kind):
        fields = [field.name for field in kind]
        return pc.if_else(column.is_valid(), _objects(fields, column.flatten(), len(column)), None)
    if pa.types.is_map(kind):
        return _maps(column)
    if _is_list(kind):
        return _lists(column)
    if _is_text(kind):
        return _quoted(escaped(column.cast(pa.string())))
    if _is_binary(kind):
        return _base64(column)
    if pa.types.is_floating(kind):
        return _floats(column)
    if pa.types.is_timestamp(kind):
        return _timestamps(column)
    if pa.types.is_date(kind):
        return _quoted(column.cast(pa.string()))
    if pa.types.is_time(kind):
        digits = pc.ascii_rtrim(column.cast(pa.time64("us"), safe=False).cast(pa.string()), "0")  # of six decimals
        return _quoted(pc.ascii_rtrim(digits, "."))
    return column.cast(pa.string())  # integers, booleans, decimals


def escaped(texts: pa.Array) -> pa.Array:
    """Texts escaped for a JSON string, without the quotes. A column without special characters is scanned only once."""
    if not _has_any(texts, _SPECIAL):
        return texts
    texts = pc.replace_substring(texts, "\\", "\\\\")
    texts = pc.replace_substring(texts, '"', '\\"')
    if not _has_any(texts, _CONTROL):
        return texts
    for character in map(chr, range(32)):
        if pc.any(pc.match_substring(texts, character)).as_py():
            texts = pc.replace_substring(texts, character, _SHORT.get(character, f"\\u{ord(character):04X}"))
    return texts


# --- parts ------------------------------------------------------------------------------------------------------------


def _has_any(texts: pa.StringArray, characters: bytes) -> bool:
    """Whether any text has any of the characters; searches the texts' memory in a sixth of a regular expression's time.

    The memory behind a null may have any content, so the result may be True although no text has such a character.
    """
    if not len(texts):
        return False
    places = memoryview(texts.buffers()[1]).cast("i")
    first, last = places[texts.offset], places[texts.offset + len(texts)]
    if first == last:
        return False
    content = texts.buffers()[2].slice(first, last - first).to_pybytes()
    return len(content.translate(None, characters)) != len(content)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(test(kind) for test in tests)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _joined(*parts: Any) -> pa.Array:
    """Joined texts; null if any part is null, since Arrow 26 loses rows whose parts are all null when told to skip nulls."""
    return pc.binary_join_element_wise(*parts, "")


def _joined_over_nulls(*parts: Any) -> pa.Array:
    """Joined texts; a null part adds nothing."""
    return pc.binary_join_element_wise(*parts, "", null_handling="replace", null_replacement="")


def _objects(names: list[str], columns: list[pa.Array], length: int) -> pa.Array:
    """An object for each row. Every field starts with a comma; the first field's comma is removed."""
    parts: list[Any] = []
    may_begin_with_comma = False
    for name, column in zip(names, columns, strict=True):
        label = f"{json.dumps(name, ensure_ascii=False)}:"
        texts = json_texts(column)
        if texts.null_count:
            may_begin_with_comma |= not parts
            parts += (pc.if_else(texts.is_valid(), f",{label}", ""), texts)
        else:
            parts += (label if not parts else f",{label}", texts)
    if not parts:
        return pa.repeat("{}", length)
    if may_begin_with_comma:
        return _joined("{", pc.ascii_ltrim(_joined_over_nulls(*parts), ","), "}")
    return _joined_over_nulls("{", *parts, "}")


def _maps(column: pa.Array) -> pa.Array:
    """Objects with a map's entries, including nulls; a key that is not a string is converted to its JSON text, in quotes."""
    kind = column.type
    entry = pa.struct([pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)])
    entries = column.cast(pa.list_(entry))
    keys, values = pc.list_flatten(entries).flatten()
    names = json_texts(keys)
    if not (_is_text(keys.type) or pc.all(pc.starts_with(names, '"')).as_py()):
        names = pc.if_else(pc.starts_with(names, '"'), names, _quoted(names))
    return _collected(entries, _joined(names, ":", pc.fill_null(json_texts(values), "null")), "{", "}")


def _lists(column: pa.Array) -> pa.Array:
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    return _collected(column, pc.fill_null(json_texts(pc.list_flatten(column)), "null"), "[", "]")


def _collected(column: pa.Array, texts: pa.Array, opening: str, closing: str) -> pa.Array:
    """The texts of a list column's values, joined list by list."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int32())
    ends = pc.cumulative_sum(lengths)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    lists = pc.binary_join(pa.ListArray.from_arrays(offsets, texts), ",")
    return pc.if_else(column.is_valid(), _joined(opening, lists, closing), None)


def _quoted(texts: pa.Array) -> pa.Array:
    return _joined('"', texts, '"')


def _base64(column: pa.Array) -> pa.Array:
    encode = b2a_base64  # Arrow has no kernel for it
    return pa.array(
        [None if content is None else f'"{encode(content, newline=False).decode()}"' for content in column.to_pylist()],
        pa.string(),
    )


def _floats(column: pa.Array) -> pa.Array:
    """Numbers with a point or an exponent, so that readers that distinguish floats from integers see one type in all rows."""
    if pa.types.is_float16(column.type):
        column = column.cast(pa.float32())
    texts = column.cast(pa.string())
    whole = pc.match_substring_regex(texts, _WHOLE)
    if pc.any(whole).as_py():
        texts = pc.if_else(whole, _joined(texts, ".0"), texts)
    if not pc.all(pc.is_finite(column)).as_py():
        for given, text in _NOT_FINITE.items():
            texts = pc.if_else(pc.equal(texts, given), text, texts)
    return texts


def _timestamps(column: pa.Array) -> pa.Array:
    zone = column.type.tz
    moments = column.cast(pa.timestamp("us", None if zone is None else "UTC"), safe=False).cast(pa.timestamp("us"))
    milliseconds = moments.cast(pa.timestamp("ms"), safe=False)
    if milliseconds.cast(pa.timestamp("us")).equals(moments):
        texts = milliseconds.cast(pa.string())  # with three decimals each
    else:
        texts = moments.cast(pa.string())  # with six decimals
        texts = pc.if_else(pc.ends_with(texts, "000"), pc.utf8_slice_codeunits(texts, 0, -3), texts)
    return _joined('"', pc.replace_substring(texts, " ", "T"), '"' if zone is None else 'Z"')
