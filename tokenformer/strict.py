"""Strict YAML ↔ dataclasses: a typo is refused with a suggestion, types are checked, nothing is guessed.

Unusual: `1e9` is a whole number.
"""

import dataclasses
import difflib
import json
import operator
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from tokenformer.errors import UserError
from tokenformer.parsing import parse_yaml, shown

MOST = 2**53  # beyond it floating point numbers skip whole ones
UNIONS = (typing.Union, types.UnionType)
BOUNDS = {
    "above": (operator.gt, "a number above {:,}"),
    "below": (operator.lt, "a number below {:,}"),
    "most": (operator.le, "at most {:,}"),
    "least": (operator.ge, "{:,} or more"),
}


def key(
    doc: str,
    default: Any = dataclasses.MISSING,
    make: Any = dataclasses.MISSING,
    quiet: bool = False,
    of: str = "",
    **bounds: float,
) -> Any:
    """Declare a config key: what it means, its default (or the function that makes it) and which numbers it may hold.

    `bounds` are `least` and `most`, which it may hold, and `above` and `below`, which it may not. A `quiet` key is not
    written out while it has its default. `of` are the kinds of model (`model.of`) that alone have the key.
    """
    bounds |= {"most": bounds.get("most", MOST), "least": bounds.get("least", -MOST)}
    about = {"doc": doc, "quiet": quiet, "bounds": bounds, "of": of}
    return dataclasses.field(default=default, default_factory=make, metadata=about)


class Section:
    """A part of a config. Numbers and choices are checked whether YAML (`build`) or Python makes it."""

    section = ""  # what messages call it
    retired: tuple[str, ...] = ()  # keys of earlier versions, which the configs of old runs still hold as null

    def __init_subclass__(cls, section: str = "") -> None:
        cls.section = section

    def __post_init__(self) -> None:
        cls: Any = type(self)
        check_bounds(cls, vars(self), self.section)
        for field in dataclasses.fields(cls):
            if typing.get_origin(field.type) is Literal:
                _convert(field.type, getattr(self, field.name), _join(self.section, field.name))


def check_bounds(cls: Any, values: dict[str, Any], at: str) -> None:
    """Refuse numbers, and lists and mappings of them, beyond the bounds of their keys. Nothing was made of them yet."""
    for field in dataclasses.fields(cls):
        name, value = _join(at, field.name.rstrip("_")), values.get(field.name)
        numbers = [(name, number) for number in (value if isinstance(value, list) else [value])]
        if isinstance(value, dict):
            numbers = [(_join(name, entry), number) for entry, number in value.items()]
        for which, number in numbers:
            if isinstance(number, int | float) and not isinstance(number, bool):
                for bound, limit in field.metadata["bounds"].items():
                    holds, words = BOUNDS[bound]
                    need(holds(number, limit), f"{which} is {shown(number)}: give {words.format(limit)}")


def need(holds: bool, sentence: str) -> None:
    if not holds:
        raise UserError(sentence)


def merge(below: dict, above: dict) -> dict:
    """Lay one mapping over another: mappings are merged key by key, everything else is replaced.

    >>> merge({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    out = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = merge(out[name], value) if both else value
    return out


def override(raw: dict, assignments: Sequence[str]) -> dict:
    """Lay assignments `a.b=c` over a raw mapping; the values are YAML.

    >>> override({"a": {"b": 1}}, ["a.b=1e-3", "a.c=[1, 2]"])
    {'a': {'b': 0.001, 'c': [1, 2]}}
    """
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        need(bool(equals and path), f"'{assignment}' is not an override: write section.key=value")
        tree = parse_yaml(value, f"the value of '{assignment}'")
        for name in reversed(path.split(".")):
            tree = {int(name) if _is_number(name) else name: tree}
        raw = merge(raw, tree)
    return raw


def build(cls: Any, raw: Any, at: str = "") -> Any:
    """Make a dataclass from a raw mapping. Unknown keys are refused with a suggestion; types and bounds are checked."""
    need(isinstance(raw, dict), f"{at or 'the config'} should hold keys and values, not {shown(raw)}")
    fields = {f.name.rstrip("_"): f for f in dataclasses.fields(cls)}  # the key `from` is Python's own word: `from_`
    hints = typing.get_type_hints(cls)
    raw = {name: value for name, value in raw.items() if value is not None or name not in getattr(cls, "retired", ())}
    for name in raw:
        if name not in fields:
            close = [cls.familiar[name]] if name in getattr(cls, "familiar", {}) else []
            close += difflib.get_close_matches(str(name), fields, n=1)
            close += [
                f"{section}.{name}" for section, kind in hints.items() if name in getattr(kind, "__annotations__", {})
            ]
            hint = f"did you mean '{_join(at, close[0])}'?" if close else f"known keys are {', '.join(fields)}"
            raise UserError(f"unknown key {shown(_join(at, name))}: {hint}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        need(not required or name in raw, f"key '{_join(at, name)}' is missing: {field.metadata.get('doc', name)}")
    values = {fields[k].name: _convert(hints[fields[k].name], value, _join(at, k)) for k, value in raw.items()}
    check_bounds(cls, values, at)
    try:
        return cls(**values)
    except UserError as error:
        if "trunks." not in at:
            raise
        raise UserError(str(error).replace(f"{cls.section}.", f"{at}.")) from None  # one of several models


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


def _join(at: str, name: object) -> str:
    return f"{at}.{name}" if at else str(name)


def _convert(kind: Any, value: Any, at: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return build(kind, value, at)
    if origin in UNIONS:
        for option in args:
            if (option is bool) != isinstance(value, bool):
                continue
            of = dict if dataclasses.is_dataclass(option) else typing.get_origin(option)
            container = next((kind for kind in (list, dict) if isinstance(value, kind)), None)
            if container is (of if of in (list, dict) else None) and (value is None) == (option is type(None)):
                return _convert(option, value, at)
    elif origin is Literal:
        if value in args:
            return value
        close = difflib.get_close_matches(str(value), [str(a) for a in args], n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise UserError(f"{at} is {_shown(value)}, but must be one of {', '.join(map(str, args))}{hint}")
    elif origin is list and isinstance(value, list):
        return [_convert(args[0], item, f"{at}[{i}]") for i, item in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        return {_convert_key(args[0], k, at): _convert(args[1], v, _join(at, k)) for k, v in value.items()}
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    elif kind is int and isinstance(value, float) and float(value).is_integer():
        return int(value)  # 1e9 is a whole number
    elif kind is Any or (
        isinstance(kind, type) and isinstance(value, kind) and (kind is bool) == isinstance(value, bool)
    ):
        return value
    raise UserError(f"{at} is {_shown(value)}, but must be {_words(kind)}")


def _shown(value: Any) -> str:
    return "empty" if value is None else shown(value)


def _convert_key(kind: Any, name: Any, at: str) -> Any:
    if kind is int and _is_number(str(name)):  # JSON's keys are strings
        return int(name)
    return _convert(kind, name, f"a key of {at}")


def _words(kind: Any) -> str:
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if kind in plain:
        return plain[kind]
    args = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, args))}" if len(args) > 1 else str(args[0])
    if typing.get_origin(kind) is list and dataclasses.is_dataclass(args[0]):
        return "a list of mappings"
    if typing.get_origin(kind) is list:
        return f"a list ({_words(args[0])} each)"
    if typing.get_origin(kind) is dict:
        return "a mapping"
    return " or ".join(_words(a) for a in args) if args else "a mapping"


class Key(typing.NamedTuple):
    """A key as a table shows it. The type of a section, whose own keys come after it, is "section"."""

    name: str
    type: str
    default: str
    doc: str


def all_keys(cls: Any, at: str = "") -> list[Key]:
    """Return every key of a config and of its sections; `growth[].layers` is that of each item of a list.

    >>> from tokenformer.config import Config
    >>> next(key for key in all_keys(Config) if key.name == "steps")
    Key(name='steps', type='a whole number', default='1000', doc='optimizer steps of the run')
    """
    found, hints = [], typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, kind, default = _join(at, field.name.rstrip("_")), hints[field.name], field.default
        sections = {}
        marks = {list: "[]", dict: ".*"}
        for option in typing.get_args(kind) if typing.get_origin(kind) in UNIONS else (kind,):
            inner = typing.get_args(option)[-1] if typing.get_origin(option) in marks else option
            if dataclasses.is_dataclass(inner) and inner is not cls:
                sections[name + marks.get(typing.get_origin(option), "")] = inner
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        words = "section" if dataclasses.is_dataclass(kind) else _words(kind)
        if default is dataclasses.MISSING:
            default = "required"
        elif default is None or words == "section":
            default = ""
        default = default if isinstance(default, str) else json.dumps(default)
        found.append(Key(name, words, default, field.metadata["doc"]))
        for inside, section in sections.items():
            found += all_keys(section, inside)
    return found


def foreign(field: dataclasses.Field, config: Any) -> bool:
    """Whether a key belongs to another kind of model than this config's, and says nothing here."""
    kinds = field.metadata["of"].split()
    return bool(kinds) and getattr(config, "of", "") not in kinds and getattr(config, field.name) == field.default


def to_dict(config: Any) -> dict:
    """Return a config as plain containers, without keys that say nothing: null, empty, quiet, of other models."""

    def plain(value: Any, inside_list: bool = False) -> Any:
        if dataclasses.is_dataclass(value):
            pairs = [(f, getattr(value, f.name)) for f in dataclasses.fields(value) if not foreign(f, value)]
            value = {f.name.rstrip("_"): v for f, v in pairs if not (f.metadata["quiet"] and v == f.default)}
        if isinstance(value, dict):
            items = {k: plain(v) for k, v in value.items()}
            return items if inside_list else {k: v for k, v in items.items() if v is not None and v != {}}
        return [plain(item, inside_list=True) for item in value] if isinstance(value, list) else value

    return plain(config)


def to_yaml(config: Any) -> str:
    """Return YAML that `load` reads back to an equal config."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def represent_list(self, data):  # on one line
            return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)

    Dumper.add_representer(list, Dumper.represent_list)
    return yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
