"""The arguments of a command line, with the files of ``--config`` and those on which these build, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"  # The key `<<`, with which a mapping takes over others.
CONFIGS = (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "configs")
CREDIT, COMPARED = "--model.credit", "--predictions.compare+"


def expand_configs(args: list[str]) -> list[str]:
    """The arguments, with each ``--config FILE`` preceded by the files on which it builds.

    A file that is not in the working folder is looked up among the configs of the package. The key ``config`` of a file
    names the file on which it builds, or a list of files, relative to its own folder. jsonargparse follows that key
    only without subcommands. A file on which several of them build is read once.

    Raises:
        ValueError: If a file is missing, holds no options, or builds on itself.
    """
    expanded: list[str] = []
    read: set[Path] = set()
    pending = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    while pending:
        argument = pending.pop(0)
        if argument in ("--config", "-c") and pending:
            *bases, last = _with_bases(Path(pending.pop(0)))
            for file in [*(base for base in dict.fromkeys(bases) if base.resolve() not in read), last]:
                expanded += ["--config", str(file)]
                read.add(file.resolve())
        else:
            expanded.append(argument)
    return expanded


def expand_methods(arguments: Sequence[str]) -> list[str]:
    """The arguments, with every credit method after the first one as an entry of `predictions.compare`.

    Options of a method follow its name: ``--model.credit=GRAIL --model.credit.std=0.3 --model.credit=HighEntropy``.
    """
    expanded, number = [], 0
    for argument in arguments:
        name = argument.partition("=")[0]
        number += name == CREDIT
        if number > 1 and name == CREDIT:
            argument = COMPARED + argument.removeprefix(CREDIT)
        elif number > 1 and name.startswith(f"{CREDIT}."):
            argument = COMPARED.removesuffix("+") + argument.removeprefix(CREDIT)
        expanded.append(argument)
    if number > 1 and arguments[0] != "predict":
        raise ValueError(
            f"`model.credit` must be given once to `{arguments[0]}`, but got {number} methods. Leave all but one out; "
            "`grail-lightning predict` compares several."
        )
    return expanded


def replace_lists(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, where each list of classes or datasets is preceded by an empty one.

    jsonargparse takes the options that an entry leaves out from the entry at the same place of an earlier list of the
    same length: the second of two datasets would be read with the columns of another one.
    """
    last = ""
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if last == "--config":
            if emptied := _emptied(read_options(Path(argument))):
                yield from (yaml.safe_dump(emptied), last)
        elif last.startswith("--") and "=" not in last and not last.endswith("+"):
            if emptied_text := _emptied_text(argument):
                yield from (emptied_text, last)
        elif separator and name.startswith("--") and not name.endswith("+") and (emptied_text := _emptied_text(value)):
            yield f"{name}={emptied_text}"
        yield argument
        last = argument


def _emptied_text(value: str) -> str:
    """The same of an argument's value; empty if there is nothing to empty."""
    try:
        emptied = _emptied(yaml.safe_load(value)) if "{" in value else None
    except yaml.YAMLError:  # It may be text, and jsonargparse says so if it must not.
        emptied = None
    return "" if emptied is None else yaml.safe_dump(emptied, default_flow_style=True).strip()


def _emptied(options: object) -> Any:
    """The lists of mappings among the options, as empty ones, with the classes in which they lie; None without."""
    if isinstance(options, list):
        return [] if any(isinstance(entry, dict) for entry in options) else None
    if not isinstance(options, dict):
        return None
    emptied = {name: inner for name, value in options.items() if (inner := _emptied(value)) is not None}
    emptied = {name: inner for name, inner in emptied.items() if name != "config" and not str(name).endswith("+")}
    if emptied and "class_path" in options:
        emptied["class_path"] = options["class_path"]
    return emptied or None


def shipped(file: Path) -> Path | None:
    """The config of the package that is meant by `quickstart.yaml` or `configs/quickstart.yaml`; None without one.

    A mistyped folder stays an error.
    """
    parts = file.parts[1:] if file.parts[:1] == ("configs",) else file.parts
    files = [folder.joinpath(*parts) for folder in CONFIGS if not file.is_absolute() and ".." not in parts]
    return next((other for other in files if other.is_file()), None)


def file_that_sets(args: Sequence[str], option: str) -> Path | None:
    """The last config file that sets an option; None if the command line itself sets it, or nothing does."""
    if any(arg.partition("=")[0] in (f"--{option}", f"--{option}.help") for arg in args):
        return None
    files = [Path(name) for flag, name in pairwise(args) if flag == "--config"]
    return next((file for file in reversed(files) if _sets(read_options(file), option.split("."))), None)


def _sets(options: object, names: Sequence[str]) -> bool:
    if isinstance(options, list):
        return any(_sets(part, names) for part in options)
    if not names or not isinstance(options, dict):
        return not names
    inside = _sets(options["init_args"], names) if "init_args" in options else False
    return inside or (names[0] in options and _sets(options[names[0]], names[1:]))


def read_options(file: Path, given_as: str = "`--config`") -> dict[str, Any]:
    """The options of a YAML file, which errors call `given_as`.

    Raises:
        ValueError: If it cannot be read, is no YAML, or does not hold options. The message names file and line.
    """
    try:
        with file.open(encoding="utf-8") as stream:
            content = yaml.load(stream, _UniqueKeys)  # noqa: S506  (a SafeLoader)
    except OSError as error:
        reason = f"{error.strerror} (looked in {Path.cwd()})"
        raise ValueError(f"{given_as} must name a YAML file, but {file} cannot be read: {reason}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{given_as} {file} must be UTF-8 text, but byte {error.start} is not. Convert it to UTF-8."
        ) from None
    except yaml.YAMLError as error:
        raise ValueError(f"{given_as} must be well-formed YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        got = "nothing" if content is None else f"a {type(content).__name__}"
        raise ValueError(
            f"{given_as} {file} must hold options, as `model: {{policy: arithmetic}}` does, but got {got}. Fill it in, "
            "or leave it out."
        )
    return content


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader, which refuses a key that a mapping has twice: the first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """The mapping of a node."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"a second {key.value!r}", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _with_bases(file: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    """The files on which a file builds, followed by the file itself."""
    if not file.is_file():
        file = shipped(file) or file
    if file.resolve() in above:
        chain = " -> ".join(other.name for other in (*above[above.index(file.resolve()) :], file))
        raise ValueError(f"`config` must name another file to build on, but {file} builds on itself: {chain}.")
    options = read_options(file)
    if "methods" in options:
        raise ValueError(
            f"`--config` must hold options of a run, but {file} is a sweep of many. Run: "
            f"python -m grail_lightning.sweep {file}"
        )
    base = options.get("config")
    bases = [] if base is None else base if isinstance(base, list) else [base]
    if not all(isinstance(name, str) for name in bases):
        raise ValueError(
            f"`config` in {file} must be the path of a file to build on, or a list of them, but got {base!r}."
        )
    for parent in (file.parent / name for name in bases):
        if not parent.is_file() and shipped(parent) is None:
            raise ValueError(
                f"`config` in {file} must name a file to build on, but there is no {parent}. Correct the path, "
                "which is relative to that file's folder."
            )
    above = (*above, file.resolve())
    return [*(part for name in bases for part in _with_bases(file.parent / name, above)), file]
