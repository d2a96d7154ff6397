"""What is wrong with options that the parser has refused: names, classes, and values, by the types of the parser.

jsonargparse's own message is a tree with a branch for each type of a union. It is not read here: the options are walked
beside the parser's types, in the classes that they name too, and the first mistake is put into a sentence.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

from jsonargparse import ArgumentError, ArgumentParser

from grail_lightning.app.cli.classes import BASES, UNUSABLE, choices, exported, find_class, options_parser
from grail_lightning.app.cli.config_files import NO_VALUE, OF_A_CLASS, Added, GivenText, find_config
from grail_lightning.app.cli.earlier import present_class, present_isolation, present_option, written_value
from grail_lightning.app.cli.known_as import known_algorithm, known_as
from grail_lightning.app.cli.type_words import classes_in, in_words, list_parts, records_in, shown, takes
from grail_lightning.core.runtime.guard import said
from grail_lightning.core.runtime.import_path import did_you_mean

_NOT_SET = ("config", "help", "print_config")  # Options of the parser that no run has.


Kind = Literal["name", "value", "null", "made"]
"""What a mistake is in: a name; a value; null, which jsonargparse takes for each option of a class; a record's values,
which its constructor refuses."""
KINDS: tuple[Kind, ...] = ("name", "value", "null", "made")  # A wrong value may follow from a wrong name.


class _Wrong(NamedTuple):
    """A mistake."""

    kind: Kind
    sentence: str


def wrong_option(parser: ArgumentParser, options: Mapping[str, Any], kinds: Sequence[Kind] = KINDS) -> str | None:
    """The sentence about the first mistake in the options of a command line; None if none is found.

    Args:
        parser: The parser of the subcommand.
        options: Its options of files and arguments, as `with_arguments` gives them.
        kinds: The kinds of mistakes that are looked for, in the order in which they are told.
    """
    mistakes = [wrong for wrong in _Walk(parser, "").mistakes(options, "") if wrong.kind in kinds]
    return min(mistakes, key=lambda wrong: kinds.index(wrong.kind)).sentence if mistakes else None


def last_line(error: BaseException) -> str:
    """The last line of a message of jsonargparse that gives a reason."""
    lines = [line.strip(" -") for line in str(error).splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith("Given value")), str(error))


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments without the name of an option, such as a file for which ``--config`` is meant."""
    start = int(bool(arguments) and not arguments[0].startswith("-"))
    for argument in arguments[start:]:
        if argument.startswith("--") or argument == "-h":
            continue
        file = next((n for n in (argument, f"{argument}.yaml") if find_config(Path(n)).is_file()), argument)
        is_file = file.endswith((".yaml", ".yml")) or find_config(Path(file)).is_file()
        plain = argument.lstrip("-")
        meant = f"--config {file}" if is_file else f"--{plain}" if "=" in plain else "--OPTION=VALUE"
        raise ValueError(f"Each argument must be an option, but got {argument!r}. Write {meant}.")


class _Walk:
    """A walk over the options of one parser: that of the subcommand, or of a class that an option names."""

    def __init__(self, parser: ArgumentParser, option: str, cls: type | None = None) -> None:
        self.option, self.cls = option, cls
        self.types = {a.dest: a for a in parser._actions if hasattr(a, "_typehint") and not a.dest.endswith(".help")}
        self.names = [name for name in self.types if name not in _NOT_SET]
        needed: set[str] = getattr(parser, "_extra_required_keys", set())  # `data`, which jsonargparse keeps apart.
        self.required = [name for name in self.names if self.types[name].required or name in needed]

    def full(self, name: str) -> str:
        """The name of an option from the parser of the subcommand on."""
        return f"{self.option}.{name}" if self.option else name

    def mistakes(self, values: Mapping[Any, Any], group: str) -> Iterator[_Wrong]:
        """The mistakes in the options of a group."""
        for key, value in values.items():
            name = f"{group}.{key}" if group else str(key)
            if not isinstance(key, str):
                yield _Wrong("name", f"Options of `{self.full(group)}` must have names, but got {shown(key)}.")
            elif value is NO_VALUE and any(f"{other}.".startswith(f"{name}.") for other in self.names):
                yield _Wrong("value", f"`{self.full(name)}` must have a value, as in --{self.full(name)}=VALUE.")
            elif name in self.types:
                action: Any = self.types[name]
                yield from _of_value(self.full(name), action._typehint, value, action.default)
            elif any(other.startswith(f"{name}.") for other in self.names):
                if isinstance(value, Mapping):
                    yield from self.mistakes(value, name)
                else:
                    yield _Wrong("value", _no_group(self.full(name), value))
            elif name not in _NOT_SET:
                yield _Wrong("name", self.no_option(*_innermost(name, value, bool(self.option or group))))
        if not group and (missing := [name for name in self.required if not _has(values, name)]):
            yield _Wrong("null", self.lacking(missing))

    def lacking(self, names: Sequence[str]) -> str:
        """The sentence about options that must be given."""
        if self.cls is None:
            needed = ", ".join(f"`{name}`" for name in names)
            return f"{needed} must be given, on the command line or in a file such as configs/quickstart.yaml."
        needed = ", ".join(f"`{self.full(name)}`" for name in names)
        why = f"because {self.cls.__name__} of `{self.option}` has no default for it"
        return (
            f"{needed} must be given, {why}.{f' Write --{self.full(names[0])}=VALUE.' if choices(self.option) else ''}"
        )

    def no_option(self, name: str, value: Any) -> str:
        """The sentence about an option that does not exist."""
        if earlier := present_option(self.full(name), value):
            return f"There is no option `{self.full(name)}`.{earlier}"
        inner, _, last = name.rpartition(".")
        in_group = any(other.startswith(f"{inner}.") for other in self.names)
        others = [] if self.cls is None else _having(self.option, name)
        if self.cls is None or in_group or (not others and did_you_mean(last, self.names)):
            return _no_option(self.full(name), [self.full(other) for other in self.names])
        listed = list(dict.fromkeys(other.partition(".")[0] for other in self.names))
        has = f"has: {', '.join(listed)}" if listed else "has no options"
        hint = f" `{name}` is an option of {', '.join(others)}." if others else ""
        hint = hint or known_as(self.full(name)) or known_as(name)
        return f"There is no option `{self.full(name)}`. {self.cls.__name__} of `{self.option}` {has}.{hint}"


def _of_value(option: str, hint: Any, value: Any, default: Any = None) -> Iterator[_Wrong]:
    """The mistakes in the value of an option of a type."""
    read = value.read() if isinstance(value, GivenText) else value
    bases, entries = classes_in(hint), list_parts(hint)
    inside: list[_Wrong] | None = None  # Where the value has parts that have been walked.
    if isinstance(value, Added) and not entries:
        yield _Wrong("name", f"`{option}` must be given without a plus sign, since it is no list.")
        return
    if isinstance(read, list) and any(classes_in(entry) or records_in(entry) for entry in entries):
        inside = [wrong for entry in read for wrong in _of_value(option, _union(entries), entry)]
    elif isinstance(read, Mapping) and bases and not takes(hint, Mapping):
        inside = list(_of_object(option, bases, read, default))
    elif isinstance(read, Mapping) and (records := records_in(hint)):
        inside = list(_Walk(options_parser(records[0]), option, records[0]).mistakes(read, ""))
        inside = inside or [_Wrong("made", refused) for refused in _refusal(records[0], read)]
    elif isinstance(read, str) and bases and not takes(hint, str) and not (takes(hint, float) and "." not in read):
        inside = list(_of_object(option, bases, {"class_path": read}, default))
    if inside:
        yield from inside
    elif not _is_accepted(hint, value) and not (inside == [] and isinstance(read, Mapping)):
        got = value if isinstance(read, str) else read
        kind: Kind = "null" if read is None else "value"
        yield _Wrong(kind, f"`{option}` must be {in_words(hint, option)}, but got {shown(got)}.{_instead(hint, read)}")


def _instead(hint: Any, value: Any) -> str:
    """A sentence, after a space, with the form in which a value that the type refuses may be meant; or nothing."""
    if isinstance(value, list) and len(value) == 1 and not list_parts(hint):
        return " Leave out the brackets."
    for form, parts in ((" Write {%s: %s}.", [hint]), (" Write [{%s: %s}].", list_parts(hint))):
        needed = [_Walk(options_parser(record), "").required for part in parts for record in records_in(part)]
        if isinstance(value, str) and needed and len(needed[0]) == 1:
            return form % (needed[0][0], value)
    return " Put it in brackets." if list_parts(hint) and _is_accepted(hint, [value]) else ""


def _of_object(option: str, bases: Sequence[type], value: Mapping[str, Any], default: Any) -> Iterator[_Wrong]:
    """The mistakes in the value of an option that takes an object: its class and the class's options."""
    if "class_path" in value and not value.keys() <= OF_A_CLASS:
        yield _Wrong("name", f"The options of a class in `{option}` must stand under `init_args`, beside `class_path`.")
        return
    init_args = value.get("init_args") if value.keys() & OF_A_CLASS else value
    init_args = init_args if isinstance(init_args, Mapping) else {}
    default = default.get("class_path") if isinstance(default, Mapping) else None
    path = value.get("class_path", default)
    if path is None:
        concrete = next((base for base in bases if not inspect.isabstract(base)), None)
        if concrete is None or choices(option):
            yield _Wrong("name", _no_class(option, init_args))
            return
        cls: Any = concrete
    elif not isinstance(path, str):
        yield _Wrong("name", _wrong_class(option, path))
        return
    else:
        cls, why = _loaded(option, path, bases)
        if cls is None:
            yield _Wrong("name", _wrong_class(option, path, why))
            return
        if not inspect.isclass(cls):  # A function that makes the object.
            return
        if not issubclass(cls, tuple(bases)):
            names = " or ".join(base.__name__ for base in bases)
            yield _Wrong("name", _wrong_class(option, path, f"it is no subclass of {names}"))
            return
        if inspect.isabstract(cls):
            yield _Wrong("name", _wrong_class(option, path, "it is abstract: name one of its subclasses"))
            return
    yield from _Walk(options_parser(cls), option, cls).mistakes(init_args, "")


def _loaded(option: str, path: str, bases: Sequence[type]) -> tuple[Any, str]:
    """The object with an import path, or the class with a short name; without it None, and why, if there is more."""
    module, _, name = path.rpartition(".")
    if name in UNUSABLE and option in BASES:
        return None, UNUSABLE[name]
    if not module:
        entry = exported(option, path)
        return (entry[1] if entry else _imported(bases, path)), ""
    try:
        namespace = importlib.import_module(module)
    except ModuleNotFoundError as error:
        lost = error.name == module.partition(".")[0]
        return None, f"{error}.{' Is its folder on PYTHONPATH?' if lost else ''}"
    except Exception as error:  # The module of a user.
        return None, said(error)
    if not hasattr(namespace, name):
        return None, f"{module} has no {name!r}.{did_you_mean(name, dir(namespace))}"
    return getattr(namespace, name), ""


def _imported(bases: Sequence[type], name: str) -> type | None:
    """The subclass with a short name among those that are imported, of which jsonargparse knows the short names."""
    ahead = [*bases]
    while ahead:
        cls = ahead.pop()
        if cls.__name__ == name:
            return cls
        ahead += type.__subclasses__(cls)
    return None


def _wrong_class(option: str, path: object, why: str = "") -> str:
    """The sentence about the name of a class that an option does not take."""
    names = choices(option)
    accepted = f"one of {', '.join(names)}, or the import path of a class" if names else "the import path of a class"
    name = path.rpartition(".")[2] if isinstance(path, str) else ""
    if earlier := present_isolation(option, path):
        why = ""  # An address is no import path.
    hint = (
        earlier or present_class(option, path) or ("" if why else known_algorithm(option, name) or _near(name, names))
    )
    reason = f": {why.removesuffix('.') if not why.endswith('?') else why}" if why else ""
    end = "" if reason.endswith("?") else "."
    return f"`{option}` must be {accepted}, but got {shown(path)}{reason}{end}{hint}"


def _near(name: str, names: Sequence[str]) -> str:
    """A question with the name that is nearest to a wrong one, without regard to case."""
    plain = name.lower().replace("-", "").replace("_", "")
    same = [candidate for candidate in names if candidate.lower() == plain]
    begun = same or [candidate for candidate in names if plain and candidate.lower().startswith(plain)]
    return f" Did you mean {' or '.join(begun)}?" if 0 < len(begun) < 4 else did_you_mean(name, names)


def _no_class(option: str, init_args: Mapping[str, Any]) -> str:
    """The sentence about options of a class that is not named."""
    name = next(iter(init_args), "")
    having = _having(option, name)
    which = f"`{name}` is an option of {', '.join(having)}" if having else f"it has {', '.join(choices(option))}"
    example = f", as in --{option}={having[0]} --{option}.{name}={written_value(init_args[name])}" if having else ""
    return f"`{option}` must name a class beside `{option}.{name}`{example}: {which}."


def _having(option: str, name: str) -> list[str]:
    """The classes of an option that have an option of that name, the usual one first."""
    names = sorted(choices(option), key=lambda other: other != "GroupMean")
    classes = {other: find_class(option, other) for other in names}
    return [other for other, owner in classes.items() if owner and name in inspect.signature(owner).parameters]


def _no_option(option: str, names: Sequence[str]) -> str:
    """The sentence about an option that does not exist, with the one that may be meant."""
    group, _, name = option.rpartition(".")
    elsewhere = [other for other in names if other.endswith(f".{name}")]
    within = f"{group}." if group else ""
    parts = (other.removeprefix(within).partition(".")[0] for other in names if other.startswith(within))
    siblings = list(dict.fromkeys(parts))
    hint = f" Did you mean `{elsewhere[0]}`?" if elsewhere else known_as(option) or did_you_mean(name, siblings)
    if not hint:
        hint = f" `{group}` has: {', '.join(siblings)}." if group and siblings else " See `grail-lightning fit --help`."
    return f"There is no option `{option}`.{hint}"


def _no_group(option: str, value: object) -> str:
    got = value.read() if isinstance(value, GivenText) else value
    return f"`{option}` must be a group of options, but got {shown(got)}. Fill it in, or leave it out."


def _innermost(name: str, value: Any, in_group: bool) -> tuple[str, Any]:
    """Name and value of an unknown option: of one with options inside those of the first, if that name is known."""
    inner, inner_value = name, value
    while isinstance(inner_value, Mapping) and inner_value:
        key, inner_value = next(iter(inner_value.items()))
        inner = f"{inner}.{key}"
    return (name, value) if in_group and not known_as(inner) else (inner, inner_value)


def _has(values: Any, name: str) -> bool:
    """Whether an option is given, and not as null."""
    for part in name.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return (values.read() if isinstance(values, GivenText) else values) is not None


def _union(parts: Sequence[Any]) -> Any:
    """The union of types."""
    return Union[tuple(parts)]  # noqa: UP007  (of a list)


def _refusal(record: type, values: Mapping[str, Any]) -> Iterator[str]:
    """What the constructor of a dataclass says of values that the types of its fields take."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=record)
    try:
        parser.instantiate_classes(parser.parse_object({"value": values}))
    except ArgumentError:
        return
    except ValueError as error:
        yield str(error)


def _is_accepted(hint: Any, value: Any) -> bool:
    """Whether an option of a type takes a value."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        if isinstance(value, GivenText):
            parser.parse_args([f"--value={value}"])
        else:
            parser.parse_object({"value": value})
    except ArgumentError:
        return False
    return True
