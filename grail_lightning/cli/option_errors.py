"""Translation of jsonargparse's message about a wrong option into one sentence.

The message is a tree. For an option of a union type it lists for each member why the value does not fit, and a member
that is a class lists its own options in turn. `complaints` parses the leaves; `refusal` selects the leaf that a user
can correct and adds the accepted names.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jsonargparse import ArgumentParser

from grail_lightning.callbacks.choices import base_classes, choices, imported, unusable
from grail_lightning.tasks.import_path import did_you_mean

EXTRAS = {"torchao": "torchao", "peft": "lora", "vllm": "vllm", "flash_attn": "flash"}
KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "NoneType": "null",
    "timedelta": "a time such as 1:30:00",
    "collections.abc.Iterable": "a list",
}
# Lines without a reason: those that follow the reasons of a union, and those about a class that would be accepted.
ASIDE = re.compile(
    r"Subtypes:|Errors:|Given value type:|Does not validate against|Not a valid subclass|Subclass types expect|"
    r"a class path \(str\)|a dict with|a dict without|Expected a path but .* not accessible or invalid"
)
TREE = re.compile(r"Parser key|^Errors:|accept option '|unrecognized arguments:|required: |\.help:", re.MULTILINE)
KEY = re.compile(r'Parser key "([\w.]+)":')
CLASS = re.compile(r"Problem with given class_path '([\w.]+)':")
TYPE = re.compile(r"Expected a (?:<class '([\w.]+)'>|typing\.Literal\[(.*?)\]|(\S+?))(?:\.? Got value: (.*))?$")
UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (.*)$")
WRONG_CLASS = re.compile(r"Expected '([\w.]+)' to be a subclass of")
NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
NOT_ACCEPTED = re.compile(r"(?:Option|accept option) '([\w.]+)'(?: is not accepted)?")
ABSTRACT = re.compile(r"Expected an instantiatable class, but (?:([\w.]+) )?is abstract")
NO_SUBCLASS = "Import path does not correspond to a subclass of"
BASE = re.compile(r"subclass of (?:<class ')?(\w+)")
NO_TEXT = re.compile(r"Key must be a string, got: (.*?)\.?$")
UNRECOGNISED = re.compile(r"unrecognized arguments: (\S+)")
REQUIRED = re.compile(r"the following arguments are required: (.*)$")


# Options of earlier versions and their replacements.
MOVED = {
    **{
        f"model.objective.{name}": f"It is `model.execution.{name}` now."
        for name in (
            *("group_size", "refill_rounds", "updates_per_batch", "mini_batches"),
            *("token_budget", "sampler_cap", "max_grad_norm"),
        )
    },
    "model.objective.share_prompts": "It is `model.execution.share_prefixes` now.",
    "saliency.share_forward": "It is `saliency.fuse` now.",
    "model.loading.compile": "Leave it out: decoder blocks are not compiled.",
    "model.loading.offload": "Leave it out: shard over more devices, or train adapters (`model.loading.lora`).",
}


@dataclass
class Complaint:
    """One leaf of the tree of messages.

    Attributes:
        option: The dotted name of the option, as far as the message contains it.
        owner: The import path of the class that has the option; empty for options of the command line.
        text: The text of the message.
        value: The value that was given; None if the message does not contain it.
    """

    option: str
    owner: str
    text: str
    value: str | None = None

    @property
    def kind(self) -> str | None:
        """The expected type in words, if the message states nothing else."""
        match = TYPE.match(self.text)
        if match is None or UNKNOWN_CLASS.match(self.text):
            return None
        if match[2] is not None:
            return "one of " + ", ".join(part.strip().strip("'") for part in match[2].split(","))
        return KINDS.get(match[1] or match[3], match[1] or match[3])


def refusal(text: str, known: Iterable[str] = ()) -> tuple[str, str]:
    """The dotted name of the wrong option ("" if there is none), and one sentence about it.

    Args:
        text: The message of jsonargparse.
        known: The names of all options of the command line.
    """
    if unnamed := NO_TEXT.match(text):
        return "", (
            f"The name of an option in a config file must be text, but got {unnamed[1]}. Numbers have a decimal point, "
            "since a comma separates options."
        )
    if not TREE.search(text):
        return "", " ".join(text.split())
    found = _without_base_class(complaints(text))
    # A message with more than a type is about a value that is nearly right. The deepest one is the most specific.
    specific = [c for c in found if c.kind is None and UNKNOWN_CLASS.match(c.text) is None]
    if specific:
        return _sentence(max(specific, key=lambda c: c.option.count(".")), list(known))
    depth = max(c.option.count(".") for c in found)
    deepest = [c for c in found if c.option.count(".") == depth]
    named = next((c for c in deepest if UNKNOWN_CLASS.match(c.text)), None)
    numbers = any(kind in ("int", "float") for c in deepest if (t := TYPE.match(c.text)) for kind in t.groups())
    if named is not None and not numbers:
        return _sentence(named, list(known))
    typed = [c for c in deepest if c.kind is not None]
    kinds = list(dict.fromkeys(c.kind for c in typed if c.kind is not None))
    value = next((c.value for c in typed if c.value is not None), "")
    if {*kinds} <= {"null", "true or false"} and (names := choices(typed[0].option)):
        return typed[0].option, _class_expected(typed[0].option, names, value)
    return typed[0].option, f"`{typed[0].option}` must be {_listed(kinds)}, but got {value!r}."


def complaints(text: str) -> list[Complaint]:
    """The leaves of a message, found by its indentation."""
    found: list[Complaint] = []
    nodes: list[tuple[int, str, str]] = []
    first = key[1] if (key := KEY.search(text)) else ""
    for line in text.splitlines():
        content = line.strip().removeprefix("- ").strip()
        if not content:
            continue
        indent = line.index(content)
        while nodes and nodes[-1][0] >= indent:
            nodes.pop()
        if given := re.match(r"Given value: (.*)$", content):
            for complaint in found:
                if complaint.value is None and complaint.option == _name(nodes):
                    complaint.value = _value(given[1])
            continue
        while node := KEY.search(content) or CLASS.search(content):
            nodes.append((indent, "key" if node.re is KEY else "class", node[1]))
            content = content[node.end() :].strip()
        content = re.sub(r"^Not of type (\w+):.*$", r"Expected a \1", content)
        content = re.sub(r"^Type .* expects a function or a callable class: ", "", content)
        if not content or ASIDE.match(content):
            continue
        owner = next((name for _, kind, name in reversed(nodes) if kind == "class"), "")
        if callable_class := re.search(r"Got value: Namespace\(class_path='([\w.]+)'", content):
            owner = owner or callable_class[1]
        content = re.sub(r"\.? Got value: Namespace\(.*$", "", content)
        typed = TYPE.match(content)
        value = _value(typed[4]) if typed and typed[4] is not None else None
        found.append(Complaint(_name(nodes) or first, owner, content, value))
    return found


def _without_base_class(found: list[Complaint]) -> list[Complaint]:
    """The complaints without those about the base class of an option, which is tried beside the class that is given."""
    given = [c for c in found if c.owner.rpartition(".")[2] not in base_classes()]
    return given if any(c.owner for c in given) else found


def _name(nodes: Sequence[tuple[int, str, str]]) -> str:
    return ".".join(name for _, kind, name in nodes if kind == "key")


def _value(text: str) -> str:
    """The value as the user wrote it, without the wrapper of jsonargparse for nested options."""
    text = re.sub(r"\. Got value: .*$", "", text)
    nested = re.match(r"NestedArg\(key='.*', val='?(.*?)'?\)$", text)
    return nested[1] if nested else text


def _sentence(complaint: Complaint, known: list[str]) -> tuple[str, str]:
    """The option and the sentence for a complaint that states more than a type."""
    option, text = complaint.option, complaint.text
    if unloaded := re.search(r"Unable to load config ['\"](.*?)['\"]", text):
        return option, f"`{option}` must be a group of options, but got {unloaded[1]!r}."
    if option and (absent := re.search(r"No module named '(\w+)", text)):
        module = absent[1]
        extra = EXTRAS.get(module)
        remedy = f"Run: pip install 'grail-lightning[{extra}]'." if extra else "Is it spelled right?"
        return option, f"`{option}` needs {module}, which is not installed. {remedy}"
    if stray := UNRECOGNISED.search(text):
        if not stray[1].startswith("--"):
            return "", f"An option must begin with two dashes, as `--model.policy=…` does, but got {stray[1]!r}."
        return _unknown(stray[1].removeprefix("--").partition("=")[0], complaint, known)
    if refused := NOT_ACCEPTED.search(text):
        return _unknown(refused[1], complaint, known)
    if required := REQUIRED.search(text):
        return option, _missing(option, complaint.owner, required[1])
    if abstract := ABSTRACT.search(text):
        return option, _abstract(option, abstract[1], complaint.value)
    if NO_SUBCLASS in text and (names := choices(option)):
        return option, _class_expected(option, names, complaint.value or "", text)
    unknown = UNKNOWN_CLASS.search(text) or WRONG_CLASS.search(text)
    missing = NO_ATTRIBUTE.search(text)
    given = unknown[1] if unknown else f"{missing[1]}.{missing[2]}" if missing else ""
    option = option or (asked[1] if (asked := re.match(r"--([\w.]+)\.help:", text)) else "")
    given = "ReduceLROnPlateau" if "name ReduceLROnPlateau" in text else given  # Torch and Lightning each have one.
    if reason := unusable(given):
        return option, reason
    if given and (names := choices(option)):
        return option, _class_expected(option, names, given, text)
    if unknown:
        return option, f"`{option}` must be the import path of a class or a group of options, but got {given!r}."
    said = " ".join(text.split())
    return option, said if not option or option in said else f"`{option}`: {said}"


def _abstract(option: str, base: str | None, given: str | None) -> str:
    """The sentence for a class of which no object can be made: the user's, or the base class if only options came."""
    names = choices(option)
    if base is not None and names:
        plain = min(names, key=len)  # `MathTask` rather than a special one
        return f"`{option}` must be given a class before its options, one of {', '.join(names)}: `--{option}={plain}`."
    try:
        missing = ", ".join(sorted(imported(given or "").__abstractmethods__))
    except (ImportError, AttributeError, ValueError):
        missing = "its abstract methods"
    return f"`{option}` must be a class of which objects can be made, but got {given!r}. Write {missing} in it."


def _class_expected(option: str, names: list[str], given: str, text: str = "") -> str:
    said = f"`{option}` must be one of {', '.join(names)}, or the import path of a class, but got {given!r}"
    module, _, name = given.rpartition(".")
    there = vars(sys.modules[module]) if module in sys.modules else {}
    if (base := BASE.search(text)) and name in there:
        what = type(there[name]).__name__
        if isinstance(there[name], type):
            what = f"class that does not derive from `{base[1]}`"
        return f"{said}, which is a {what}."
    return f"{said}.{did_you_mean(name, names) or did_you_mean(name, there)}"


def _unknown(name: str, complaint: Complaint, known: list[str]) -> tuple[str, str]:
    """The option and the sentence for an unknown option."""
    if name == "class_path":
        return complaint.option, (
            f"The options of a class must stand under `init_args`, beside `class_path`, but `{complaint.option}` has "
            "others beside it."
        )
    if complaint.owner:
        prefix, known = complaint.option, _options_of(complaint.owner)
        whose = f"{complaint.owner.rpartition('.')[2]} has"
    else:
        prefix, whose = "", f"`{name.rpartition('.')[0]}` has"
    siblings = [k for k in known if k.rpartition(".")[0] == name.rpartition(".")[0]]
    last = {k.rpartition(".")[2]: k for k in siblings}
    near = [last[k] for k in difflib.get_close_matches(name.rpartition(".")[2], last, n=1)]
    near = near or difflib.get_close_matches(name, known, n=1)
    full = f"{prefix}.{name}" if prefix else name
    if moved := next((new for old, new in MOVED.items() if full.endswith(old)), None):
        return full, f"There is no option `{full}` any more. {moved}"
    said = f"There is no option `{full}`."
    if near:
        return full, f"{said} Did you mean `{f'{prefix}.{near[0]}' if prefix else near[0]}`?"
    if siblings and (prefix or "." in name):
        return full, f"{said} {whose}: {', '.join(last)}."
    return full, f"{said} `grail-lightning fit --help all` lists them."


def _options_of(owner: str) -> list[str]:
    """The dotted names of the options of a class."""
    try:
        parser = ArgumentParser()
        parser.add_class_arguments(imported(owner), fail_untyped=False)
        return list(parser.get_defaults().keys())
    except (ImportError, AttributeError, ValueError, TypeError):  # The names serve only as a hint.
        return []


def _missing(option: str, owner: str, names: str) -> str:
    if option:
        return f"`{option}` must be given {names}, which {owner.rpartition('.')[2] or 'its class'} cannot do without."
    options = [re.sub(r"^(fit|validate|test|predict)\.", "", name.strip()) for name in names.split(",")]
    return (
        f"{', '.join(f'`{name}`' for name in options)} must be given, on the command line or in a file: "
        "`--config configs/quickstart.yaml` is one to begin with."
    )


def _listed(kinds: list[str]) -> str:
    ordered = [k for k in kinds if k != "null"] + [k for k in kinds if k == "null"]
    return " or ".join(ordered)
