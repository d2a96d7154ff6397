"""The arguments of a command line, with the files of ``--config`` and those on which these build, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

CONFIGS = (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "configs")
_MERGE = "tag:yaml.org,2002:merge"  # The key `<<`, with which a mapping takes over others.


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


def not_followed(content: str) -> str:
    """The text of a config file in which the key ``config`` holds a list, which jsonargparse keeps but does not follow.

    It would read a base again, over the options of a file that came after it, and it looks in the file's folder alone.
    """
    root: Any = yaml.compose(content, yaml.SafeLoader) if "config" in content else None
    for place, (key, value) in enumerate(root.value if isinstance(root, yaml.MappingNode) else []):
        if key.value == "config" and value.tag == "tag:yaml.org,2002:str":
            root.value[place] = key, yaml.SequenceNode("tag:yaml.org,2002:seq", [value])
            return str(yaml.serialize(root))
    return content


def replace_lists(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, where each list of classes or datasets is preceded by an empty one.

    jsonargparse takes the options that an entry leaves out from the entry at the same place of an earlier list of the
    same length: the second of two datasets would be read with the columns of another one.
    """
    pending = deque(arguments)
    while pending:
        name, joined, value = pending.popleft().partition("=")
        if name.startswith("--") and not joined and pending and not pending[0].startswith("-"):
            joined, value = "=", pending.popleft()
        if name == "--config":
            emptied = _emptied(read_options(Path(value)))
        elif name.startswith("--") and not name.endswith("+") and "{" in value:
            emptied = _emptied(_parsed(value))
        else:
            emptied = None
        if emptied is not None:
            yield f"{name}={yaml.safe_dump(emptied, default_flow_style=True).strip()}"
        yield f"{name}{joined}{value}"


def _parsed(value: str) -> object:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:  # It may be text, and jsonargparse says so if it must not.
        return None


def _emptied(options: object) -> Any:
    """The lists of mappings among the options, as empty ones, with the classes in which they lie; None without."""
    if isinstance(options, list):
        return [] if any(isinstance(entry, dict) for entry in options) else None
    if not isinstance(options, dict):
        return None
    given = {name: value for name, value in options.items() if name != "config" and not str(name).endswith("+")}
    emptied = {name: inner for name, value in given.items() if (inner := _emptied(value)) is not None}
    if emptied and "class_path" in options:
        emptied["class_path"] = options["class_path"]
    return emptied or None


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
    return content


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
