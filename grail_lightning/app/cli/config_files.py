"""The options of the files of ``--config`` and those on which these build, merged, and the arguments beside them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from grail_lightning.app.cli.classes import BASES, BEGINS_ANEW, class_name, exported, import_path, still_valid
from grail_lightning.app.cli.trainer_options import as_list

CONFIGS = (Path(__file__).parents[2] / "configs", Path(__file__).parents[3] / "configs")
_MERGE = "tag:yaml.org,2002:merge"  # The key `<<`, with which a mapping takes over others.
_CLASS, _INIT = "class_path", "init_args"
OF_A_CLASS = {_CLASS, _INIT, "dict_kwargs"}
"""The keys of a mapping that describes an object: its class, and the options of the class."""
_OBJECTS = {*BASES, *BEGINS_ANEW} - {"predictions.compare", "trainer.callbacks"}  # Those two are lists.
# Below all files: so `--model.objective.clip_high=0.3` alone changes the default class, and another name begins anew.
DEFAULTS: dict[str, Any] = {"model": {"objective": {_CLASS: "DrGRPO"}}}


def merged(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of all config files of a command line as one mapping, and its other arguments.

    Of files in their order mappings are merged, lists and other values replaced, and ``name+`` adds to a list. What an
    argument replaces as a whole is left out, in the mapping and among the arguments before it: a list, and the options
    of a class in `BEGINS_ANEW` whose name differs from the one before. jsonargparse would give entries of a list what
    the entries at their places had, and a class the options of another one.

    The mapping begins with the default objective, `DrGRPO`.
    """
    options: dict[str, Any] = DEFAULTS
    rest: list[str] = []
    pending = deque(expand_configs(arguments))
    while pending:
        name, joined, value = pending.popleft().partition("=")
        if name.startswith("--") and not joined and pending and is_value(pending[0]):
            joined, value = "=", pending.popleft()
        if name == "--config":
            if not value:
                raise ValueError("`--config` must be followed by the name of a YAML file, but got nothing.")
            content = _nested(read_options(Path(value)), Path(value).parent)
            options = _over(options, {key: part for key, part in content.items() if key != "config"}, "")
            continue
        if name.startswith("--") and joined and not name.endswith("+"):
            for option in list(_replaced(plain_name(name[2:]), _parsed(value), options, rest)):
                options = _without(options, option)
                rest = [earlier for earlier in rest if not f"{_named(earlier)[0]}.".startswith(f"{option}.")]
        rest.append(f"{name}{joined}{value}")
    return options, rest


def is_value(argument: str) -> bool:
    """Whether an argument is no name of an option; a negative number is none."""
    return not argument.startswith("-") or re.match(r"-\.?\d", argument) is not None


def as_arguments(options: Mapping[str, Any], rest: Sequence[str]) -> list[str]:
    """Arguments of jsonargparse for merged options: the subcommand, one ``--config`` that is YAML, and the others.

    Classes are given by their import paths.
    """
    start = int(bool(rest) and not rest[0].startswith("-"))
    text = yaml.dump(_with_paths(options, ""), Dumper=_Quoted, sort_keys=False)
    config = [f"--config={text}"] if options else []
    return [*rest[:start], *config, *map(_argument_with_paths, rest[start:])]


def _with_paths(value: Any, option: str) -> Any:
    """The value of an option, in which classes are given by their import paths."""
    if isinstance(value, str):
        if option in BASES:
            return import_path(option, value)
        exported(option, value)  # It may be the short name of a class, in an option of a class of a user's own.
        return value
    if isinstance(value, list):
        return [_with_paths(entry, option) for entry in value]
    if not isinstance(value, Mapping):
        return value
    inside = (_CLASS, _INIT)  # They belong to the option itself.
    names = {key: option if key in inside else plain_name(f"{option}.{key}").removeprefix(".") for key in value}
    parts = {key: _with_paths(part, names[key]) for key, part in value.items()}
    return {
        key: _as_object(part) if names[key] in _OBJECTS and key not in inside else part for key, part in parts.items()
    }


def _argument_with_paths(argument: str) -> str:
    """An argument, in which classes are given by their import paths, also where their options are asked for."""
    name, joined, text = argument.partition("=")
    option = plain_name(name[2:]).removesuffix(f".{_CLASS}").removesuffix(".help")
    before = _parsed(text) if joined else None
    if (value := _with_paths(before, option)) == before:
        return argument
    written = value if isinstance(value, str) else yaml.dump(value, Dumper=_Quoted, default_flow_style=True, width=1e9)
    return f"{name}={written}"


def expand_configs(args: Sequence[str]) -> list[str]:
    """The arguments, with each ``--config FILE`` behind the subcommand and preceded by the files on which it builds.

    So options override files wherever they stand; the parser would let a file override those before it.

    The key ``config`` of a file names the file on which it builds, or a list of files, relative to its own folder. A
    file that is not there, or not in the working folder for ``--config``, is looked up among the configs of the
    package. A file on which several of them build is read once.
    """
    expanded: list[str] = []
    files: list[str] = []
    read: set[Path] = set()
    pending = deque(part for arg in args for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg]))
    while pending:
        argument = pending.popleft()
        if argument not in ("--config", "-c") or not pending:
            expanded.append(argument)
            continue
        *bases, last = _with_bases(Path(), pending.popleft())
        for file in [*(base for base in dict.fromkeys(bases) if base.resolve() not in read), last]:
            files += ["--config", str(file)]
            read.add(file.resolve())
    start = int(bool(args) and not args[0].startswith("-"))
    return [*expanded[:start], *files, *expanded[start:]]


def plain_name(option: str) -> str:
    """The name of an option without the plus sign that adds to it, and without ``init_args``, which may be left out."""
    return ".".join(part for part in option.removesuffix("+").split(".") if part != _INIT)


def _nested(content: Mapping[str, Any], folder: Path, group: str = "") -> dict[str, Any]:
    """The options of a file, with ``trainer.max_steps: 1`` as ``trainer: {max_steps: 1}``, and groups in own files.

    Keys of a mapping have no order: an option is set before those inside it.
    """
    nested: dict[str, Any] = {}
    for key, inner in sorted(content.items(), key=lambda item: str(item[0]).count(".")):
        if isinstance(inner, str) and inner.endswith((".yaml", ".yml")) and (folder / inner).is_file():
            inner = read_options(folder / inner, f"`{key}`")
        if isinstance(inner, dict) and key != _INIT:
            inner = _nested(inner, folder, f"{group}.{key}".removeprefix("."))
        first, *parts = key.split(".") if isinstance(key, str) else [key]
        for part in reversed(parts):
            inner = {part: inner}
        is_there = first in nested or f"{first}".removesuffix("+") in nested or f"{first}+" in nested
        nested = _over(nested, {first: inner}, group) if is_there else nested | {first: inner}
    return nested


def _over(before: Any, after: Any, option: str) -> Any:
    """The value of an option in a later file on top of that in earlier ones."""
    named = isinstance(after, str) and isinstance(before, dict) and _CLASS in before
    if named:
        after = {_CLASS: after}
    elif isinstance(before, str) and isinstance(after, dict) and (_INIT in after or option in _OBJECTS):
        before = {_CLASS: before}
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return after
    of_class = before.keys() & OF_A_CLASS or (option in _OBJECTS and after.keys() & OF_A_CLASS)
    before, after = (_as_object(part) if of_class else part for part in (before, after))
    result = dict(before)
    if _CLASS in before and _CLASS in after and class_name(before) != class_name(after):
        init_args = {} if option in BEGINS_ANEW else still_valid(option, after[_CLASS], before.get(_INIT) or {})
        result = {_INIT: init_args} if init_args else {}
    for name, value in sorted(after.items(), key=lambda item: str(item[0]).endswith("+")):
        plain = name.removesuffix("+") if isinstance(name, str) else name
        if plain != name and (plain in result or name in result):
            place = plain if plain in result else name
            result[place] = [*as_list(result[place]), *as_list(value)]
        else:
            result.pop(f"{name}+", None)
            inner = option if name == _INIT else f"{option}.{name}".removeprefix(".")
            result[name] = _over(result.get(name), value, inner)
    return after[_CLASS] if named and not result.get(_INIT) else result


def _as_object(value: Any) -> Any:
    """The value of an option that takes an object, in which options without `init_args` stand under it."""
    plain = isinstance(value, dict) and value and not value.keys() & OF_A_CLASS
    return {_INIT: value} if plain else value


def _replaced(option: str, value: object, options: Mapping[str, Any], rest: Sequence[str]) -> Iterator[str]:
    """The options that the value of an argument replaces as a whole."""
    if isinstance(value, list):
        yield option
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not str(key).endswith("+"):
                yield from _replaced(plain_name(f"{option}.{key}"), inner, options, rest)
    elif isinstance(value, str) and (owner := option.removesuffix(f".{_CLASS}")) in BEGINS_ANEW:
        texts = (text for name, text in map(_named, reversed(rest)) if name in (owner, f"{owner}.{_CLASS}"))
        before = class_name(next((_parsed(text) for text in texts), _value_at(options, owner)))
        if before is not None and before != class_name(value):
            yield owner


def _value_at(options: Any, option: str) -> Any:
    """The value of an option among merged ones, also of one of a class; None if it has none."""
    for part in option.split("."):
        options = options.get(_INIT, options) if isinstance(options, dict) else None
        options = options.get(part) if isinstance(options, dict) else None
    return options


def with_arguments(options: Mapping[str, Any], rest: Sequence[str]) -> dict[str, Any]:
    """Merged options together with those of the arguments beside them, without plus signs.

    A value that an argument gives is a `GivenText`, unless it is a list or a mapping; `NO_VALUE` if it gives none. What
    is added to an option is an `Added` list.
    """
    result: Any = _added(options)
    for argument in rest:
        name, joined, text = argument.partition("=")
        if name.startswith("--") and not name.endswith(".help") and name not in ("--print_config", "--help"):
            value = _parsed(text) if joined else NO_VALUE
            value = value if isinstance(value, (dict, list)) or not joined else GivenText(text)
            result = _with(result, name[2:].split("."), value, "")
    return dict(result)


class GivenText(str):
    """The text of an argument's value, which the type of its option reads as a number, a text or null."""

    def read(self) -> Any:
        """The value, read as YAML; an empty text stays one."""
        return _parsed(str(self)) if self else ""


class Added(list[Any]):
    """The entries of an option to which a plus sign has added some."""


NO_VALUE = object()
"""In place of the value of an argument that has none."""


def _added(value: Any) -> Any:
    """A value whose mappings have lists in place of what was to be added to lists."""
    if isinstance(value, list):
        return [_added(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    plain = {key: _added(part) for key, part in value.items() if not str(key).endswith("+")}
    return plain | {key[:-1]: Added(_added(as_list(value[key]))) for key in value.keys() - plain.keys()}


def _with(before: Any, parts: Sequence[str], value: object, option: str) -> Any:
    """The value of an option, in which an argument sets the value of an inner one; of a list the last entry's."""
    if not parts:
        is_name = not isinstance(value, GivenText) or isinstance(value.read(), str)
        return _over(before, value, option) if is_name else value
    if isinstance(before, list) and before:
        return [*before[:-1], _with(before[-1], parts, value, option)]
    (first, *inner), place = parts, before
    if isinstance(before, str):
        place = {_CLASS: before}
    place = place if isinstance(place, dict) else {}
    if place.keys() & OF_A_CLASS and first not in OF_A_CLASS:
        first, inner = _INIT, list(parts)
    if first.endswith("+") and not inner:
        added = value.read() if isinstance(value, GivenText) else value
        first = first.removesuffix("+")
        return place | {first: Added([*as_list(place.get(first)), *as_list(added)])}
    name = option if first == _INIT else plain_name(f"{option}.{first}").removeprefix(".")
    return place | {first: _with(place.get(first), inner, value, name)}


def _named(argument: str) -> tuple[str, str]:
    """The name of the option that an argument sets, and the text of its value; two empty texts for others."""
    name, joined, value = argument.partition("=")
    return (plain_name(name[2:]), value) if name.startswith("--") and joined else ("", "")


def _without(options: Any, option: str) -> Any:
    """Merged options without one of them."""
    if not isinstance(options, dict):
        return options
    first, dot, inner = option.partition(".")
    remainder = {name: value for name, value in options.items() if dot or name not in (first, f"{first}+")}
    if _INIT in remainder:
        remainder[_INIT] = _without(remainder[_INIT], option)
    return remainder | ({first: _without(remainder[first], inner)} if first in remainder else {})


def _parsed(value: str) -> Any:
    try:
        return get_loader("yaml")(value)
    except yaml.YAMLError:  # It may be text, and jsonargparse says so if it must not.
        return value


def find_config(name: Path, folder: Path = Path()) -> Path:
    """The file of that name in a folder, or else the package's, as `quickstart.yaml` or `configs/quickstart.yaml`.

    Without either it is the first, which does not exist. A mistyped folder stays an error.
    """
    parts = name.parts[1:] if name.parts[:1] == ("configs",) else name.parts
    ours = [place.joinpath(*parts) for place in CONFIGS if not name.is_absolute() and ".." not in parts]
    return next((file for file in (folder / name, *ours) if file.is_file()), folder / name)


def read_options(file: Path, given_as: str = "`--config`") -> dict[str, Any]:
    """The options of a YAML file, which errors call `given_as`.

    A file that cannot be read, or does not hold options, is a ValueError that names file and line.
    """
    try:
        with file.open(encoding="utf-8") as stream:
            content = yaml.load(stream, _UniqueKeys)  # noqa: S506  (a SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{given_as} must name a YAML file, but got {file}: {error}.") from None
    if not isinstance(content, dict):
        got = "nothing" if content is None else f"a {type(content).__name__}"
        raise ValueError(
            f"{given_as} {file} must hold options, as `model: {{policy: arithmetic}}` does, but got {got}."
        )
    # Numbers such as 1e-5, and no dates, as jsonargparse reads them; it takes a lone `trainer:` for a text.
    values = get_loader("yaml")(file.read_text("utf-8"))
    return values if isinstance(values, dict) else content


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader, which refuses a key that a mapping has twice: the first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"a second {key.value!r}", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Quoted(yaml.SafeDumper):  # type: ignore[misc]
    """PyYAML's safe dumper, with all texts in quotes: jsonargparse reads more of them as numbers, such as 1e5."""


_Quoted.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def _with_bases(folder: Path, name: str, given_as: str = "`--config`", above: tuple[Path, ...] = ()) -> list[Path]:
    """The files on which the file of a name builds, followed by the file itself."""
    file = find_config(Path(name), folder)
    if file.resolve() in above:
        raise ValueError(f"{given_as} must name another file to build on, but {file} builds on itself.")
    options = read_options(file, given_as)
    if "methods" in options:
        raise ValueError(f"{file} is a sweep of many runs. Run: python -m grail_lightning.sweep {file}")
    named = options.get("config") or []
    named = named if isinstance(named, list) else [named]
    bases = (_with_bases(file.parent, str(n), f"`config` in {file}", (*above, file.resolve())) for n in named)
    return [*chain.from_iterable(bases), file]
