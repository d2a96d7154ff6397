"""Calls in what a policy wrote, with every way in which they can be wrong."""

import json
import time

import pytest

from grail_lightning.core.environments.calls import LIMITS, ParsedCall, calls_by, hermes_calls, llama3_calls, tag_calls

ONE = {"name": "search", "arguments": {"query": "Ada"}}
TAGS = {"search": ["query"], "move": ["x", "y"], "look": [], "list": ["folder"], "sort": ["by", "down"]}


def _hermes(*values):
    return "".join(f"<tool_call>\n{json.dumps(value)}\n</tool_call>" for value in values)


def tags(text):
    return tag_calls(text, TAGS, {"look", "list", "sort"})


def by_parser(text):
    return calls_by(json.loads, text)


SEARCH, LOOK, NOTE = ParsedCall("search", {"query": "Ada"}), ParsedCall("look"), {"name": "look", "parameters": {}}


@pytest.mark.parametrize(
    ("read", "text", "calls"),
    [
        # In JSON between tags, in their order and outside of thinking.
        (hermes_calls, "I look it up.\n" + _hermes(ONE) + "<|im_end|>", [SEARCH]),
        (hermes_calls, _hermes(ONE, {"name": "look"}), [SEARCH, LOOK]),
        (hermes_calls, f"<think>\nPerhaps {_hermes(ONE)}\n</think>\n\nNo.", []),
        (hermes_calls, f"<think>\nPerhaps {_hermes(ONE)}", []),
        (hermes_calls, f"<think>Who?</think>{_hermes(ONE)}", [SEARCH]),
        (hermes_calls, 'The answer is {"name": "search", "arguments": {}}.', []),
        # In bare JSON with a name and parameters; other JSON is none.
        (llama3_calls, f"<|python_tag|>{json.dumps(NOTE)}<|eom_id|>", [LOOK]),
        (llama3_calls, 'Well: {"type": "function", "name": "look", "parameters": {}}', [LOOK]),
        (llama3_calls, f'{json.dumps(NOTE)}; {{"name": "search", "parameters": {{"query": "Ada"}}}}', [LOOK, SEARCH]),
        (llama3_calls, json.dumps({"name": "note", "parameters": {"c": NOTE}}), [ParsedCall("note", {"c": NOTE})]),
        (llama3_calls, 'She is {"name": "Ada", "age": 36}.', []),
        (llama3_calls, f"<think>{json.dumps(NOTE)}</think>No.", []),
        # In a tag, the value of the one parameter, or an object of several.
        (tags, "Who? <seek>4</seek> <search> Ada </search>\n", [SEARCH]),
        (tags, '<move>{"x": 1, "y": [2]}</move>', [ParsedCall("move", {"x": 1, "y": [2]})]),
        (tags, "<look></look>", [LOOK]),
        (tags, "<search></search>", [ParsedCall("search", {"query": ""})]),
        *((tags, f"<{name}> </{name}>", [ParsedCall(name)]) for name in ("list", "sort")),  # By their defaults.
        (tags, "<search>a <search>b</search>", [ParsedCall("search", {"query": "b"})]),
        (tags, "<think>I can use <search> here.</think>4", []),
        (tags, "<think><search>Ada</search>", [SEARCH]),  # The tag has ended the turn.
    ],
)
def test_calls_are_read_in_every_form(read, text, calls):
    assert read(text) == calls


@pytest.mark.parametrize(
    ("read", "text", "name", "error"),
    [
        (hermes_calls, '<tool_call>{"name": "search"', "", "no </tool_call>"),
        (hermes_calls, '<tool_call>{"name": "search", </tool_call>', "", "Expecting property name"),
        (hermes_calls, _hermes([ONE]), "", "no name"),
        (hermes_calls, _hermes({"name": 3}), "", "no name"),
        (hermes_calls, _hermes({"name": "search", "arguments": "Ada"}), "search", "must be a JSON object"),
        (hermes_calls, _hermes({"name": "f", "arguments": {"x": float("nan")}}), "", "not JSON compliant"),
        (hermes_calls, '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "", "not JSON compliant"),
        (hermes_calls, '<tool_call>{"name": "f\\ud800"}</tool_call>', "", "surrogates not allowed"),
        (hermes_calls, f'<tool_call>{{"name": {"9" * 5000}}}</tool_call>', "", "Exceeds the limit"),
        (hermes_calls, f"<tool_call>{'[' * 60_000}</tool_call>", "", "nested too deeply"),
        (hermes_calls, f"<tool_call>{' ' * LIMITS.characters}{{}}</tool_call>", "", "65,536 characters"),
        (llama3_calls, '{"name": "search", "parameters": {"query": "A', "", "Unterminated string"),
        (llama3_calls, '<|python_tag|>search.call(query="Ada")', "", "no JSON object with a name"),
        (llama3_calls, '{"name": "f", "parameters": ' + '{"a":' * 60_000, "", "nested too deeply"),
        (llama3_calls, '{"name": "f", "parameters": {"a": "' + "a" * 400_000 + '"}}', "", "65,536 characters"),
        (tags, "Who? <search>Ada", "search", "no </search>"),
        (tags, "Who? Ada</search>", "search", "no <search> before"),
        (tags, "<move>1, 2</move>", "move", 'Write <move>{"x": …, "y": …}</move>'),
        (tags, "<move>[1, 2]</move>", "move", "must be a JSON object"),
        (tags, "<search>\ud800</search>", "", "surrogates not allowed"),
        (by_parser, '{"tool_calls": [{"function": "f"}]}', "", "no name"),
        (by_parser, '{"tool_calls": [3]}', "", "could not be read"),
        (by_parser, "[" * 60_000, "", "could not be read"),
    ],
)
def test_a_call_that_cannot_be_read_has_a_short_error_for_the_policy(read, text, name, error):
    (call,) = read(text)
    assert call.name == name
    assert not call.arguments
    assert error in call.error
    assert len(call.error) < 250


@pytest.mark.parametrize("read", [hermes_calls, llama3_calls, tags])
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>", "<tool_call></tool_call>", "<think>", "<think></think>", "<search>", '{"name":',
        '{"name": "f", "parameters": ', '{"name": "f", "parameters": {}}', "{   ", "<|python_tag|>", '"',
        _hermes(ONE), "\\", "[", "\ud800", "</search",
    ],
)  # fmt: skip
def test_floods_of_every_piece_are_read_in_linear_time(read, piece):
    start = time.perf_counter()
    calls = read(piece * (500_000 // len(piece)))
    # A quadratic reading of half a million characters takes minutes.
    assert time.perf_counter() - start < 3
    assert len(calls) <= LIMITS.calls + 1
    assert all(len(json.dumps(call)) < 1000 for call in calls)


@pytest.mark.parametrize(
    "calls",
    [
        hermes_calls(_hermes(*[ONE] * (LIMITS.calls + 3))),
        llama3_calls('{"name": "look", "parameters": {}}' * (LIMITS.calls + 3)),
        calls_by(lambda _: {"tool_calls": [{"function": ONE}] * (LIMITS.calls + 3)}, ""),
    ],
)
def test_the_calls_above_the_limit_are_told_as_one_error(calls):
    assert [call.error is None for call in calls] == [True] * LIMITS.calls + [False]
