"""How a conversation with tools becomes token ids, and how the calls in a sampled turn are read.

Ids are only ever appended. In a chat dialect the text between two turns is what the chat template puts there; in the
dialect of plain tags no template is involved. A result can never be read as anything but text: what looks like a
control token or a tag is broken up, it is encoded apart from the template, and ids of control tokens are dropped.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, cast

from grail_lightning.core.environments import calls as reading
from grail_lightning.core.environments.calls import CallLimits, ParsedCall
from grail_lightning.core.records.picture import Picture, PictureEncoder, add_text, in_parts, pictures_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MARK = "\ufdd0"  # Not a character by Unicode's definition, so no text has a use for it.
_QUESTION = {"role": "user", "content": "Question"}
_THOUGHT = "<think>\nReason\n</think>\n\nText."
_TURN_START = re.compile(r"(<think>\s*(</think>\s*)?)?")


@dataclass(frozen=True)
class _ChatTemplate:
    """The chat template of a tokenizer, with the declarations of tools."""

    tokenizer: PreTrainedTokenizerBase
    kwargs: dict[str, Any]  # Its arguments, `tools` among them.
    tool: str  # The name of a tool.
    control: Iterable[str]  # The texts of the control tokens.
    in_parts: bool = False  # Whether it takes contents as lists of parts: it is of a policy that takes pictures.

    def render(self, messages: Sequence[dict[str, Any]], *, ask: bool = True, **kwargs: Any) -> str:
        """The text of a conversation, with the beginning of the next turn if `ask`."""
        options = {**self.kwargs, **kwargs, "tokenize": False, "add_generation_prompt": ask}
        messages = in_parts(list(messages)) if self.in_parts else list(messages)
        try:
            return cast(str, self.tokenizer.apply_chat_template(messages, **options))
        except Exception as error:  # A template is a program of its own and can raise anything.
            raise ValueError(_refusal(f"it cannot show a call and its result ({str(error)[:200]})")) from error

    def trial(self, content: str = "") -> list[dict[str, Any]]:
        """A question, and a turn that calls the tool."""
        function = {"name": self.tool, "arguments": {"query": "one"}}
        call = {"type": "function", "function": function}
        return [_QUESTION, {"role": "assistant", "content": content, "tool_calls": [call]}]

    @cached_property
    def end(self) -> str:
        """The text of the end token: the first control token behind what the assistant said."""
        text = self.render([_QUESTION, {"role": "assistant", "content": _MARK}], ask=False)
        behind = text.rpartition(_MARK)[2]
        ends = [(behind.find(token), token) for token in self.control if token in behind]
        if _MARK not in text or not ends:
            raise ValueError(_refusal("it ends the assistant's turn with no special token"))
        return min(ends)[1]

    def until_end(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text of a conversation up to the end token of its last turn."""
        return "".join(self.render(messages, ask=False).rpartition(self.end)[:2])

    @cached_property
    def _before_results(self) -> str:
        return self.until_end(self.trial())

    def around(self, results: Sequence[Sequence[str | None]]) -> list[str]:
        """What follows the end token: parts of the template and texts by turns, the template first and last.

        Each of the `results` has one text, or texts and pictures (None), whose places are in the template's parts.
        """
        answers = [{"role": "tool", "name": self.tool, "content": _marked(result)} for result in results]
        text, number = self.render([*self.trial(), *answers]), sum(part is not None for r in results for part in r)
        parts = text.removeprefix(self._before_results).split(_MARK)
        if not text.startswith(self._before_results) or len(parts) != 2 * number + 1:
            raise ValueError(_refusal("a result changes how the turn before it is shown, or is not shown itself"))
        return parts

    def check(self) -> None:
        """Check that a turn is shown alike whatever follows it, so that ids can only be appended."""
        between = "".join(self.around([["Result"]]))
        for content in ("", _THOUGHT):
            turn = [self.trial(content)[1], {"role": "tool", "name": self.tool, "content": "Result"}]
            prompt = self.render([_QUESTION])
            step = self.until_end([_QUESTION, turn[0]]).removeprefix(prompt) + between
            if any(prompt + step * k != self.render([_QUESTION, *turn * k]) for k in (1, 2, 3)):
                raise ValueError(_refusal("an earlier turn is shown in another way once others follow it"))

    def for_training(self) -> _ChatTemplate:
        """Our template in its place if both give the same prompts, as where its own is of Qwen3's kind; else itself."""
        text = resources.files(__package__).joinpath("templates", "qwen3.jinja").read_text("utf-8")
        ours = replace(self, kwargs={**self.kwargs, "chat_template": text})
        system, thought_turn = {"role": "system", "content": "Rules"}, {"role": "assistant", "content": _THOUGHT}
        trials = [[_QUESTION], [system, _QUESTION], [_QUESTION, thought_turn, _QUESTION]]
        prompts = [(self.render(messages), ours.render(messages)) for messages in trials]
        starts = {prompt.removeprefix(common) for prompt, common in prompts}
        start = starts.pop()  # What its own template writes behind the header of the next turn.
        if starts or not _TURN_START.fullmatch(start):
            return self
        return replace(ours, kwargs={**ours.kwargs, "turn_start": start})


def _marked(result: Sequence[str | None]) -> Any:
    """The content of a result whose texts stand between two `_MARK`; a plain text, or parts."""
    texts = [None if part is None else f"{_MARK}{part}{_MARK}" for part in result]
    parts = [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts]
    return texts[0] if len(texts) == 1 and texts[0] is not None else parts


def _refusal(reason: str) -> str:
    return (
        f"The tokenizer's chat template cannot be used for rollouts of several turns: {reason}. Give the tokenizer a "
        "template for training, or choose calls in plain `tags`."
    )


CallFormat = Literal["auto", "hermes", "llama3", "tokenizer", "tags"]
"""How calls are written. `hermes`: JSON in ``<tool_call>``; `llama3`: bare JSON; `tokenizer`: what the tokenizer's own
parser (its `response_template`) reads; `tags`: ``<name>…</name>``. `auto`: the first of `hermes`, `llama3` and
`tokenizer` that reads back the call that the chat template writes; `tags` without a template that declares tools."""

Encode = Callable[[Any], list[int]]
Result = str | Sequence[str | Picture]
_CHAT_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


class Dialect(ABC):
    """The ids of a conversation with tools."""

    kind: CallFormat
    stop: tuple[str, ...] = ()  # The strings that end a turn, beside the end tokens.
    end_token_id: int | None = None  # What the chat template writes behind a turn; None without a template.

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        encode: Encode,
        tags: Iterable[str],
        pictures: PictureEncoder | None,
        limits: CallLimits,
    ) -> None:
        self.tokenizer, self.encode, self.control = tokenizer, encode, _control_tokens(tokenizer)
        self.pictures, self.limits = pictures, limits
        texts = {*self.control.values(), *tags, "" if pictures is None else pictures.place} - {""}
        first, whole = "".join(re.escape(text[0]) for text in texts), "|".join(map(re.escape, texts))
        # It looks at each character, because occurrences can overlap; the first condition makes that quick.
        self._marks = re.compile(f"(?=[{first}])(?={whole})(.)", re.DOTALL)

    def prompt_ids(self, messages: list[dict[str, str]] | str) -> list[int]:
        """The ids of a prompt, with what declares the tools to the policy."""
        return self.encode(messages)

    @abstractmethod
    def calls(self, ids: Sequence[int]) -> list[ParsedCall]:
        """The calls in one sampled turn. A turn without one is an answer; a call that cannot be read has an `error`."""

    @abstractmethod
    def between(self, results: Sequence[Result]) -> list[int]:
        """The ids that follow a turn: the results, what stands around them, and the beginning of the next turn."""

    def escaped(self, text: str) -> str:
        """The text with a blank behind the first character of each control token and tag: ``< |im_end|>``."""
        text = text.replace(_MARK, "").encode("utf-8", "replace").decode()  # The tokenizer takes no lone surrogate.
        return self._marks.sub(r"\1 ", text)

    def _result_ids(self, text: str) -> list[int]:
        # Not with `split_special_tokens`, which is a state of the tokenizer, and rollouts may be sampled in a thread.
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        # A normaliser makes a control token out of other characters, full-width ones say.
        return [token for token in ids if token not in self.control]

    def _template_ids(self, text: str, pictures: Sequence[Picture] = ()) -> list[int]:
        """The ids of a text whose control tokens are meant, and whose places stand for these `pictures`."""
        if pictures and self.pictures is not None:
            return self.pictures.name(self.pictures.expand(text, pictures, begins=False), pictures)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, ids: Sequence[int]) -> str:
        # With special tokens, as some calls are written with these.
        keep = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return cast(str, self.tokenizer.decode(list(ids), **keep))


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The added tokens that are special or have a sign in them: words and blanks that were added are ordinary text."""
    added = tokenizer.added_tokens_decoder.items()
    words = (str.isalnum, str.isspace)
    return {k: token.content for k, token in added if token.special or not any(kind(token.content) for kind in words)}


class Tags(Dialect):
    """Calls in plain tags within the policy's text; ``<result>…</result>`` follows the closing tag.

    The `instruction` names the tools in the system turn of a conversation. A prompt of plain text stays as it is.
    """

    kind = "tags"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[dict[str, Any]],
        encode: Encode,
        pictures: PictureEncoder | None = None,
        instruction: str = "",
        limits: CallLimits = reading.LIMITS,
    ) -> None:
        self.instruction = instruction
        self.parameters, self.optional = _parameters(schemas), _without_required(schemas)
        if "result" in self.parameters:
            raise ValueError("A tool must not be named `result`, because this is the tag of results. Rename the tool.")
        names = [*self.parameters, "result"]
        tags = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
        super().__init__(tokenizer, encode, tags, pictures, limits)
        self.stop = tuple(f"</{name}>" for name in self.parameters)

    def prompt_ids(self, messages: list[dict[str, str]] | str) -> list[int]:
        """See `Dialect.prompt_ids`."""
        if isinstance(messages, list) and self.instruction:
            has_system = messages[0]["role"] == "system"  # A text, or parts beside pictures.
            content = add_text(messages[0]["content"], f"\n\n{self.instruction}") if has_system else self.instruction
            messages = [{"role": "system", "content": content}, *messages[has_system:]]
        return self.encode(messages)

    def calls(self, ids: Sequence[int]) -> list[ParsedCall]:
        """See `Dialect.calls`. There is at most one, as its closing tag ends the turn."""
        return reading.tag_calls(self._text(ids), self.parameters, self.optional, self.limits)

    def between(self, results: Sequence[Result]) -> list[int]:
        """See `Dialect.between`. The policy goes on in the same message."""
        before, behind = self._template_ids("\n<result>"), self._template_ids("</result>\n")
        return [token for result in results for token in (*before, *self._ids(result), *behind)]

    def _ids(self, result: Result) -> list[int]:
        if isinstance(result, str):
            return self._result_ids(self.escaped(result))
        assert self.pictures is not None
        place = self.pictures.place
        parts = (self._ids(p) if isinstance(p, str) else self._template_ids(place, [p]) for p in result)
        return [token for part in parts for token in part]


class Chat(Dialect):
    """Calls and results as the chat template writes them."""

    def __init__(
        self,
        template: _ChatTemplate,
        kind: CallFormat,
        encode: Encode,
        pictures: PictureEncoder | None = None,
        limits: CallLimits = reading.LIMITS,
    ) -> None:
        super().__init__(template.tokenizer, encode, _CHAT_TAGS, pictures, limits)
        self.template = template
        self.end_token_id = next(token for token, text in self.control.items() if text == template.end)
        self.prefix = template.render(template.trial()[:1])
        opened = self.prefix.rfind("<think>") > self.prefix.rfind("</think>")
        self.start = "<think>" if opened else ""  # A prompt can open the block of thinking for the policy.
        self.kind = self._readable(kind)

    def prompt_ids(self, messages: list[dict[str, str]] | str) -> list[int]:
        """See `Dialect.prompt_ids`; a ValueError if the prompt is plain text, which cannot declare tools."""
        if isinstance(messages, list):
            text, pictures = self.template.render(messages), pictures_in(messages)
            if self.pictures is None:
                return self._template_ids(text)
            return self.pictures.name(self.pictures.expand(text, pictures), pictures)
        if type(messages) is not str:  # A text with ids of its own.
            return self.encode(messages)
        raise ValueError(
            f"A prompt with tools must be a conversation, but got the plain text {messages[:50]!r}. Give messages, or "
            "choose calls in plain `tags`."
        )

    def calls(self, ids: Sequence[int]) -> list[ParsedCall]:
        """See `Dialect.calls`."""
        return self._read(self.kind, self._text(ids), self.limits)

    def between(self, results: Sequence[Result]) -> list[int]:
        """See `Dialect.between`. What the template makes of a result, a string of JSON say, is text as well."""
        lists = [[result] if isinstance(result, str) else result for result in results]
        pictures = [part for result in lists for part in result if isinstance(part, Picture)]
        texts = [[self.escaped(part) if isinstance(part, str) else None for part in result] for result in lists]
        first, *rest = self.template.around(texts)
        place = "" if self.pictures is None else self.pictures.place
        parts = [self.template.end + first, *rest]  # Some end tokens own the blanks behind them.
        if pictures and sum(part.count(place) for part in parts[::2]) != len(pictures):
            raise ValueError(_refusal("it does not show a picture in a result"))
        ids: list[int] = []
        for piece, result in zip(parts[::2], [*parts[1::2], ""], strict=True):
            number = piece.count(place) if pictures else 0
            ids += self._template_ids(piece, pictures[:number]) + self._result_ids(result)
            pictures = pictures[number:]
        return ids[1:]

    def _readable(self, kind: CallFormat) -> CallFormat:
        """The first kind that reads back the call that the template writes."""
        question, turn = self.template.trial()
        text = self.template.until_end([question, turn]).removeprefix(self.prefix)
        call = turn["tool_calls"][0]["function"]
        # With something in front of the JSON the form is another one, whose other parts `llama3` would not see.
        bare: tuple[CallFormat, ...] = ("llama3",) if text.removeprefix("<|python_tag|>").startswith("{") else ()
        kinds: tuple[CallFormat, ...] = ("hermes", *bare, "tokenizer") if kind == "auto" else (kind,)
        text = f"</think>{text}" if self.start else text
        for candidate in kinds:
            if self._read(candidate, text, reading.LIMITS) == [ParsedCall(call["name"], call["arguments"])]:
                return candidate
        wanted = "`hermes` or `llama3`" if kind == "auto" else f"`{kind}`"
        raise ValueError(_refusal(f"its calls must have the form {wanted}, but it wrote {text[:200]!r}"))

    def _read(self, kind: CallFormat, text: str, limits: CallLimits) -> list[ParsedCall]:
        if kind != "tokenizer":
            read = reading.hermes_calls if kind == "hermes" else reading.llama3_calls
            return read(self.start + text, limits)
        if getattr(self.tokenizer, "response_template", None) is None:
            return []
        return reading.calls_by(
            lambda text: self.tokenizer.parse_response(text, prefix=self.prefix, tools=self.template.kwargs["tools"]),
            text,
            limits,
        )


def find_dialect(
    tokenizer: PreTrainedTokenizerBase,
    schemas: Sequence[dict[str, Any]],
    kind: CallFormat,
    encode: Encode,
    chat_template_kwargs: dict[str, Any],
    pictures: PictureEncoder | None = None,
    instruction: str = "",
    limits: CallLimits = reading.LIMITS,
) -> Dialect:
    """The dialect of a tokenizer, for tools as `transformers.utils.get_json_schema` describes them.

    A chat template must preserve prefixes: a turn is shown alike whatever follows it. One that does not, but has the
    prompts of Qwen3's own template, is replaced by ours for training. `encode` is for prompts without tools.
    `pictures` are the tokens of pictures of a policy that takes some; the template may be that of its processor.
    The `instruction` names tools whose calls are plain tags, and the `limits` say how much of a turn is read.
    """
    written = tokenizer.chat_template or (None if pictures is None else pictures.processor.chat_template)
    if kind == "tags" or not schemas or (kind == "auto" and not written):
        return Tags(tokenizer, schemas, encode, pictures, instruction, limits)
    kwargs = {**({} if tokenizer.chat_template else {"chat_template": written}), **chat_template_kwargs}
    kwargs["tools"] = list(schemas)
    control, in_parts = _control_tokens(tokenizer).values(), pictures is not None
    template = _ChatTemplate(tokenizer, kwargs, next(iter(_parameters(schemas))), control, in_parts)
    question = template.trial()[:1]
    if kind == "auto" and template.render(question) == template.render(question, tools=None):
        return Tags(tokenizer, schemas, encode, pictures, instruction, limits)
    try:
        template.check()
    except ValueError:
        template = template.for_training()
        template.check()
    return Chat(template, kind, encode, pictures, limits)


def describe(schemas: Sequence[dict[str, Any]]) -> str:
    """Instructions that list the tags of the tools, for a prompt of the dialect `tags`; empty without tools."""
    if not schemas:
        return ""
    lines = ["You can call these tools. The result follows in <result>…</result>."]
    for schema in schemas:
        function, forms = schema["function"], reading.parameter_forms(schema)
        fields = function["parameters"]["properties"]
        notes = [f"`{forms[name]}`: {fields[name].get('description', '')}".removesuffix(": ") for name in fields]
        about = " ".join([function.get("description", ""), *notes])
        lines.append(f"{reading.tag_form(function['name'], list(fields))} {about}".rstrip())
    return "\n".join(lines)


def _parameters(schemas: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    functions = [schema["function"] for schema in schemas]
    return {function["name"]: list(function["parameters"]["properties"]) for function in functions}


def _without_required(schemas: Sequence[dict[str, Any]]) -> set[str]:
    """The tools that can be called without an argument."""
    functions = [schema["function"] for schema in schemas]
    return {function["name"] for function in functions if not function["parameters"].get("required")}
