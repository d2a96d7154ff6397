"""The page of options, docs/reference/options.md, from the parser of the command line; `fill_pages.py` writes it.

It has every option of ``grail-lightning fit`` with type, default and meaning, and the options of every class that an
option accepts. What a reader sees is what the docstrings say.
"""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import html
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from grail_lightning.app.cli import classes as choices_of_options
from grail_lightning.app.cli.app import ALWAYS_ON, GrailCLI, run

OURS = "grail_lightning."
BASES = choices_of_options.BASES
# The groups in the order in which a reader needs them; others follow.
FIRST = ("model", "model.sampling", "model.execution", "model.objective", "model.loading", "data", "evaluation")
TITLES = {"": "The run"}
# What stands after the parser's title of a group.
NOTES = {
    "trainer": " The options mean what they mean in Lightning. `gradient_clip_val`, `gradient_clip_algorithm`, "
    "`accumulate_grad_batches`, `enable_checkpointing` and `barebones` are refused; the message says what to set.",
}


class _ParserMadeError(Exception):
    """Raised with the parser of the subcommand before anything is parsed."""


class _ParserOnly(GrailCLI):
    def parse_arguments(self, parser: Any, args: Any) -> None:
        raise _ParserMadeError(*self._subcommand_parsers.values())


def parser_of(subcommand: str) -> ArgumentParser:
    """The parser of a subcommand of ``grail-lightning``."""
    try:
        run(_ParserOnly, [subcommand])
    except _ParserMadeError as made:
        parser: ArgumentParser = made.args[0]
        return parser
    raise AssertionError("LightningCLI no longer parses by `parse_arguments`")


# --- the page -----------------------------------------------------------------------------------------------------


def options_page() -> str:
    """The page of options as Markdown."""
    parser = parser_of("fit")
    groups = groups_of(parser)
    order = [*(name for name in FIRST if name in groups), *(name for name in groups if name not in (*FIRST, "trainer"))]
    records: dict[str, type] = {}
    sections = []
    for name in [*order, "trainer"]:
        actions = groups[name]
        for action in actions:
            records |= {record.__name__: record for record in records_in(getattr(action, "_typehint", None))}
        titled = (parser.groups or {}).get(name)
        about = (sentence(titled.title) if titled else "Options of a run as a whole.") + NOTES.get(name, "")
        head = f"## {TITLES.get(name, name)} {{#group-{name or 'run'}}}"
        sections.append(f"{head}\n\n{about}\n\n{table(actions, anchors=True)}")
    classes = [section for option in sorted(BASES) for section in class_sections(option, records)]
    kept = {name: record for name, record in sorted(records.items()) if record.__module__.startswith(OURS)}
    shown = [record_section(record, kept) for record in _closed(kept).values()]
    return "\n\n".join([*sections, *classes, *shown])


def groups_of(parser: ArgumentParser) -> dict[str, list[argparse.Action]]:
    """The options of a parser by the group that they belong to."""
    names = sorted((name for name in (parser.groups or {}) if name != "fit"), key=len, reverse=True)
    groups: dict[str, list[argparse.Action]] = {}
    for action in real_options(parser):
        group = next((name for name in names if action.dest.startswith(f"{name}.") or action.dest == name), "")
        groups.setdefault(group, []).append(action)
    return groups


def real_options(parser: ArgumentParser) -> Iterator[argparse.Action]:
    """The options that have a value, without the help texts and config files of groups and classes."""
    for action in parser._actions:
        is_help = action.dest == "help" or action.dest.endswith(".help")
        if action.dest != "print_config" and not is_help and (hasattr(action, "_typehint") or action.dest == "config"):
            yield action


def table(actions: list[argparse.Action], *, anchors: bool = False) -> str:
    """Options as a Markdown table: name, type and default, meaning."""
    rows = ["| option | type, default | meaning |", "|---|---|---|"]
    for action in actions:
        name = f'<a id="{action.dest}"></a>`{action.dest}`' if anchors else f"`{action.dest}`"
        rows.append(f"| {name} | {_type_and_default(action)} | {cell(action.help or '')}{_links(action)} |")
    return "\n".join(rows)


def _links(action: argparse.Action) -> str:
    """Links to the options of what stands inside an option: classes, or groups."""
    # Options of the data module begin with its own name in the table of choices.
    option = next((o for o in (action.dest, f"data.{action.dest}", f"data.task.{action.dest}") if o in BASES), "")
    if option and option not in ("model.optimizer", "model.scheduler", "trainer.callbacks", "trainer.logger"):
        return f" [Its classes](#classes-{option.replace('.', '-')})."
    records = {r.__name__ for r in records_in(getattr(action, "_typehint", None)) if r.__module__.startswith(OURS)}
    linked = ", ".join(f"[{name}](#record-{name.lower()})" for name in sorted(records))
    return f" Options of {linked}." if linked else ""


def class_sections(option: str, records: dict[str, type]) -> list[str]:
    """A section for an option that takes a class: the names, and the options of our own classes."""
    names, (_, modules) = choices_of_options.choices(option), BASES[option]
    found = {name: _imported(name, modules) for name in names}
    others = sorted(name for name, cls in found.items() if not cls.__module__.startswith(OURS))
    every_run = ALWAYS_ON.values()  # Their options are groups of their own.
    ours = {name: cls for name, cls in found.items() if name not in others and cls not in every_run}
    sections = [f"## Classes of {option} {{#classes-{option.replace('.', '-')}}}"]
    if others:
        sections.append(f"Of torch or Lightning, whose pages describe them: {', '.join(f'`{n}`' for n in others)}.")
    for name, cls in ours.items():
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls)
        actions = [action for action in real_options(parser) if action.dest != "config"]
        for action in actions:
            records |= {r.__name__: r for r in records_in(action._typehint)}  # type: ignore[attr-defined]
        sections.append(f"### {name} {{#{option.replace('.', '-')}-{name.lower()}}}\n\n{about_class(cls)}")
        sections.append(table(actions) if actions else "It has no options.")
    return sections


def record_section(record: type, known: dict[str, type]) -> str:
    """A section for a dataclass that stands inside an option."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(record)
    actions = [action for action in real_options(parser) if action.dest != "config"]
    return f"## {record.__name__} {{#record-{record.__name__.lower()}}}\n\n{about_class(record)}\n\n{table(actions)}"


def _closed(records: dict[str, type]) -> dict[str, type]:
    """The records with those that stand inside them."""
    found = dict(records)
    for record in records.values():
        for hint in typing.get_type_hints(record).values():
            found |= {r.__name__: r for r in records_in(hint) if r.__module__.startswith(OURS)}
    return found if len(found) == len(records) else _closed(found)


def records_in(hint: Any) -> Iterator[type]:
    """The dataclasses in a type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for inner in typing.get_args(hint):
        yield from records_in(inner)


def about_class(cls: type) -> str:
    """What the docstring says before its sections: paragraphs, and examples as they are."""
    text = re.split(r"\n(?:Args|Attributes|Raises|Returns|Source):", inspect.getdoc(cls) or "")[0]
    shown = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("    "):
            shown.append(f"```yaml\n{inspect.cleandoc(paragraph)}\n```")
        elif not paragraph.startswith((".. math", "Source:")):
            shown.append(paragraph if paragraph.startswith("- ") else cell(paragraph.replace("::", ":")))
    return "\n\n".join(shown)


def _imported(name: str, modules: tuple[str, ...]) -> type:
    for module in modules:
        found = getattr(__import__(module, fromlist=[name]), name, None)
        if found is not None:
            return typing.cast(type, found)
    raise LookupError(name)


# --- text ---------------------------------------------------------------------------------------------------------


def sentence(text: str | None) -> str:
    """A title as a sentence."""
    said = cell(text or "").rstrip(":. ")
    return f"{said}." if said else ""


def cell(text: str) -> str:
    """A docstring's text, which may be reStructuredText, as one line of Markdown inside a table."""
    text = re.sub(r"\n\s*Example::.*", "", text, flags=re.DOTALL)
    text = re.sub(r"\.\. (\w+)::", lambda m: f"{m[1].capitalize()}:", text)
    text = re.sub(r":(?:\w+:)?\w+:`~?([^`]*?)(?:\s*<[^>]*>)?`", lambda m: f"`{m[1].rpartition('.')[2]}`", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    text = re.sub(r"\s*Default: `[^`]*`\.?\s*$", "", text)
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    # Inside backticks python-markdown takes everything as it is, also what separates columns.
    return "".join(p if p.startswith("`") else _escaped(p) for p in parts)


def _escaped(text: str) -> str:
    return re.sub(r"([*|])", r"\\\1", html.escape(text, quote=False))


def _type_and_default(action: argparse.Action) -> str:
    said = type_name(getattr(action, "_typehint", str))
    required = action.required and action.default is None
    default = "required" if required else f"`{_yaml(action.default)}`"
    return f"{cell(f'`{said}`')}, {cell(default)}"


def type_name(hint: Any) -> str:
    """A type as a reader writes a value of it: choices by their values, classes by their names."""
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(type_name(a) for a in arguments))
    if hint is type(None):
        return "null"
    if origin is collections.abc.Callable:
        return type_name(arguments[-1])  # A class that is called later, with the parameters of the policy.
    if origin is not None and inspect.isclass(origin):
        inner = ", ".join(type_name(a) for a in arguments if a is not Ellipsis)
        return f"{origin.__name__}[{inner}]" if inner else origin.__name__
    if hasattr(hint, "__forward_arg__"):
        return str(hint.__forward_arg__)
    return "number" if hint is float else getattr(hint, "__name__", str(hint).replace("typing.", ""))


def _yaml(value: Any) -> str:
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, tuple):
        value = list(value)
    if inspect.isclass(value) or callable(value):
        return getattr(value, "__name__", str(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)
    try:
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
    except yaml.YAMLError:
        text = str(value)
    return text.replace("`", "'")
