"""Calls in what a policy wrote, with every way in which they can be wrong."""

import json
import time

import pytest

from grail_lightning.environments.calls import (
    MAX_CALLS,
    MAX_CHARACTERS,
    ParsedCall,
    calls_by,
    hermes_calls,
    llama3_calls,
    tag_calls,
)

ONE = {"name": "search", "arguments": {"query": "Ada"}}
TAGS = {"search": ["query"], "move": ["x", "y"], "look": []}


def _hermes(*values):
    return "".join(f"<tool_call>\n{json.dumps(value)}\n</tool_call>" for value in values)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (_hermes(ONE), [ParsedCall("search", {"query": "Ada"})]),
        ("I look it up.\n" + _hermes(ONE) + "<|im_end|>", [ParsedCall("search", {"query": "Ada"})]),
        (_hermes(ONE, {"name": "look"}), [ParsedCall("search", {"query": "Ada"}), ParsedCall("look")]),
        (f"<think>\nPerhaps {_hermes(ONE)}\n</think>\n\nNo.", []),
        (f"<think>\nPerhaps {_hermes(ONE)}", []),
        (f"<think>Who?</think>{_hermes(ONE)}", [ParsedCall("search", {"query": "Ada"})]),
        ('The answer is {"name": "search", "arguments": {}}.', []),
        ("", []),
    ],
)
def test_calls_in_json_between_tags_are_read_in_their_order_outside_thinking(text, calls):
    assert hermes_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "search", "parameters": {"query": "Ada"}}<|eot_id|>', [ParsedCall("search", {"query": "Ada"})]),
        ('<|python_tag|>{"name": "look", "parameters": {}}<|eom_id|>', [ParsedCall("look")]),
        ('Well: {"type": "function", "name": "look", "parameters": {}}', [ParsedCall("look")]),
        (
            '{"name": "look", "parameters": {}}; {"name": "search", "parameters": {"query": "Ada"}}',
            [ParsedCall("look"), ParsedCall("search", {"query": "Ada"})],
        ),
        (
            '{"name": "note", "parameters": {"call": {"name": "look", "parameters": {}}}}',
            [ParsedCall("note", {"call": {"name": "look", "parameters": {}}})],
        ),
        ('She is {"name": "Ada", "age": 36}.', []),
        ('<think>{"name": "look", "parameters": {}}</think>No.', []),
    ],
)
def test_bare_json_with_a_name_and_parameters_is_a_call_and_other_json_is_none(text, calls):
    assert llama3_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("Who? <search> Ada </search>", [ParsedCall("search", {"query": "Ada"})]),
        ("<search>7</search>\n", [ParsedCall("search", {"query": "7"})]),
        ('<move>{"x": 1, "y": [2]}</move>', [ParsedCall("move", {"x": 1, "y": [2]})]),
        ("<look></look>", [ParsedCall("look")]),
        ("<search>a <search>b</search>", [ParsedCall("search", {"query": "b"})]),
        ("<think>I can use <search> here.</think>4", []),
        ("<think><search>Ada</search>", [ParsedCall("search", {"query": "Ada"})]),  # The tag has ended the turn.
        ("<seek>Ada</seek> is 4", []),
    ],
)
def test_a_tag_holds_the_value_of_the_one_parameter_or_an_object_of_several(text, calls):
    assert tag_calls(text, TAGS) == calls


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
        (hermes_calls, f"<tool_call>{' ' * MAX_CHARACTERS}{{}}</tool_call>", "", "65,536 characters"),
        (llama3_calls, '{"name": "search", "parameters": {"query": "A', "", "Unterminated string"),
        (llama3_calls, '<|python_tag|>search.call(query="Ada")', "", "no JSON object with a name"),
        (llama3_calls, '{"name": "f", "parameters": ' + '{"a":' * 60_000, "", "nested too deeply"),
        (llama3_calls, '{"name": "f", "parameters": {"a": "' + "a" * 400_000 + '"}}', "", "65,536 characters"),
        (lambda text: tag_calls(text, TAGS), "Who? <search>Ada", "search", "no </search>"),
        (lambda text: tag_calls(text, TAGS), "Who? Ada</search>", "search", "no <search> before"),
        (lambda text: tag_calls(text, TAGS), "<move>1, 2</move>", "move", 'Write <move>{"x": …, "y": …}</move>'),
        (lambda text: tag_calls(text, TAGS), "<move>[1, 2]</move>", "move", "must be a JSON object"),
        (lambda text: tag_calls(text, TAGS), "<search>\ud800</search>", "", "surrogates not allowed"),
        (lambda text: calls_by(json.loads, text), '{"tool_calls": [{"function": "f"}]}', "", "no name"),
        (lambda text: calls_by(json.loads, text), '{"tool_calls": [3]}', "", "could not be read"),
        (lambda text: calls_by(json.loads, text), "[" * 60_000, "", "could not be read"),
    ],
)
def test_a_call_that_cannot_be_read_has_a_short_error_for_the_policy(read, text, name, error):
    (call,) = read(text)
    assert call.name == name
    assert not call.arguments
    assert error in call.error
    assert len(call.error) < 250


@pytest.mark.parametrize("read", [hermes_calls, llama3_calls, lambda text: tag_calls(text, TAGS)])
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
    assert len(calls) <= MAX_CALLS + 1
    assert all(len(json.dumps(call)) < 1000 for call in calls)


@pytest.mark.parametrize(
    "calls",
    [
        hermes_calls(_hermes(*[ONE] * (MAX_CALLS + 3))),
        llama3_calls('{"name": "look", "parameters": {}}' * (MAX_CALLS + 3)),
        calls_by(lambda _: {"tool_calls": [{"function": ONE}] * (MAX_CALLS + 3)}, ""),
    ],
)
def test_the_calls_above_the_limit_are_told_as_one_error(calls):
    assert [call.error is None for call in calls] == [True] * MAX_CALLS + [False]
