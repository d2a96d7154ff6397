"""Environments beside TRL: its own trainer finds the tools, tells them to the chat template, and calls them.

Where the definitions differ, and which call shows it:

- An exception is ``str({"error": message})`` there, and "Error: Type: message" here.
- TRL puts the results of asynchronous tools behind the others. Here results stand in the order of the calls.
- TRL's parser takes the calls out of a turn's content, and makes a JSON object of their arguments. Here the content is
  all that the policy wrote in the turn, and the calls stand beside it, too.
"""

import json
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from grail_lightning import EnvironmentTask, Execution, GrailModule, RewardSpec, Sampling
from grail_lightning.core.environments.tools import ToolSet
from tests.core.environments.test_dialogue import _model
from tests.core.environments.test_tools import Desk
from tests.runs import Watch
from tests.runs import trainer as run
from tests.trl_trainers import OF_TRL, Dataset, GRPOConfig, GRPOTrainer
from tests.written_turns import WritingEngine

pytestmark = OF_TRL

ROW = {"prompt": [{"role": "user", "content": "Go."}], "number": 5}


END = "<|im_end|>"


def _call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SHOW = {"text": "x", "share": 1, "mood": "bad", "at": None, "words": ["a"], "table": {"b": [1]}}
VALUES = {"none": None, "table": {"a": [1, True]}, "number": 0.1, "flag": True, "text": "c", "bytes": b"d"}
GIVES = ["\n".join([_call("multiply", one=3, other=4), *(_call("give", which=which) for which in VALUES)]) + END]
# The turns of two rollouts; both have calls that work, the second one also calls that do not.
TEXTS = [
    [
        f"See.\n{_call('add', number=3, times=2)}\n{_call('even', number=8)}\n{_call('show', **SHOW)}{END}",
        *GIVES,
        f"11.{END}",
    ],
    [
        *(_call("ask", question=question) + END for question in ("fail", "How many")),
        _call("fly") + END,
        _call("even", number=-1) + END,
        _call("add", number=-1) + END,
        f"It is 4.{END}",
    ],
]


class Seen(Desk):
    """A desk that keeps what became of every rollout, and gives results of all types."""

    logs: list = []  # noqa: RUF012

    def give(self, which: str) -> Any:
        """Give a value.

        Args:
            which: Its name.
        """
        return VALUES[which]

    def get_reward(self) -> float:
        self.logs.append(self.log)
        return super().get_reward()


def multiply(one: int, other: int) -> int:
    """Multiply two numbers.

    Args:
        one: A number.
        other: A number.
    """
    return one * other


class Outside:
    """Rewards outside of the class, which keep what they are told."""

    def __init__(self):
        self.told = []

    def numbers(self, completions, environments, number, **columns):
        """What the desk has; no opinion about a rollout that failed."""
        self.told.append((completions, [[*world.log] for world in environments], number, sorted(columns)))
        failed = [any("nobody" in message["content"] for message in own) for own in completions]
        pairs = zip(failed, environments, strict=True)
        return [None if bad else float(sum(world.log)) for bad, world in pairs]

    async def lengths(self, prompts, completion_ids, **columns):
        """How many tokens there are."""
        self.told.append((prompts, completion_ids))
        return [len(ids) / 8 for ids in completion_ids]


class Scripted(GRPOTrainer):
    """TRL's trainer; only the turns are not sampled, and what rewards are told is kept."""

    texts: tuple = ()

    def _generate_single_turn(self, prompt_ids, *arguments, **options):
        said = [own.pop(0) for own in self.texts if own] or [f"done{END}"] * len(prompt_ids)
        return [self.processing_class.encode(text) for text in said], None

    def _calculate_rewards(self, inputs, prompts, completions, *others):
        rewards = super()._calculate_rewards(inputs, prompts, completions, *others)
        self.seen = completions, rewards.nansum(1).tolist()
        return rewards


def _policy():
    """A small Qwen3 with the control tokens and the chat template of Qwen3."""
    tokenizer = _model("qwen3")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 100_000}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, eos_token_id=tokenizer.eos_token_id)
    ), tokenizer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    model, tokenizer = _policy()
    outside = Outside()
    made = Scripted(
        model=model,
        args=GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, gradient_checkpointing=False,
            report_to="none", num_generations=2, per_device_train_batch_size=2, max_completion_length=50_000,
            max_steps=1, save_strategy="no",
        ),
        train_dataset=Dataset.from_list([ROW]),
        processing_class=tokenizer,
        environment_factory=Seen,
        tools=[multiply],
        reward_funcs=[outside.numbers, outside.lengths],
    )  # fmt: skip
    made.outside = outside
    return made


def test_the_chat_template_is_told_what_trl_tells_it(trainer):
    template = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    tokenizer, messages, ours = trainer.processing_class, ROW["prompt"], ToolSet(Seen, [multiply])
    theirs, told = (
        tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
        for tools in (trainer.tools, ours.schemas)
    )
    assert told == theirs
    assert [tool.__name__ for tool in trainer.tools] == [*ours.by_name]


def test_a_whole_step_calls_and_pays_as_under_trl(trainer, tmp_path):
    Seen.logs, trainer.texts, trainer.outside.told = [], [[*texts] for texts in TEXTS], []
    trainer.train()
    (completions, rewards), theirs, by_trl = trainer.seen, Seen.logs, trainer.outside.told
    told = [[m["content"] for m in messages if m["role"] == "tool"] for messages in completions]

    Seen.logs, watch, outside = [], Watch(), Outside()
    paid = [outside.numbers, outside.lengths, RewardSpec(function="environment")]
    task = EnvironmentTask(Seen, instruction="", rewards=paid, tools=[multiply])
    module = GrailModule(
        _policy(),
        engine=WritingEngine([[*texts] for texts in TEXTS]),
        sampling=Sampling(max_response_length=50_000),
        execution=Execution(group_size=2),
    )
    prompt = task.prompt(ROW)
    run(1, watch, default_root_dir=tmp_path).fit(module, torch.utils.data.DataLoader([prompt], collate_fn=list))
    batch = watch.outputs[0].batch
    assert Seen.logs == theirs == [[5, 6], [5, -1]]
    calls = [episode.calls for episode in batch.episodes]
    assert [[call.name for call in own] for own in calls] == [
        ["add", "even", "show", "multiply", *["give"] * len(VALUES)],
        ["ask", "ask", "fly", "even", "add"],
    ]
    for own, results in zip(calls, told, strict=True):
        pairs = [(call.result, result) for call, result in zip(own, results, strict=True) if call.status == "done"]
        assert all(ours == result for ours, result in pairs)
    failed, _, _, odd, _ = calls[1]
    assert [call.status for call in calls[1]] == ["failed", "done", "invalid", "failed", "done"]
    assert (failed.result, odd.result) == ("Error: LookupError: nobody knows", "Error: ValueError: less than 0")
    errors = ("nobody knows", "Tool fly not found.", "less than 0")
    assert [told[1][k] for k in (0, 2, 3)] == [str({"error": text}) for text in errors]

    # What the functions outside of the class were told, and what they paid. The texts of errors differ.
    (their_numbers, their_lengths), (our_numbers, our_lengths) = by_trl, outside.told
    assert our_numbers[1:3] == their_numbers[1:3] == ([[5, 6], [5, -1]], [5, 5])
    assert our_lengths[0] == their_lengths[0]
    texts = [trainer.processing_class.decode(ids[0]) for ids in (our_lengths[1], their_lengths[1])]
    assert texts[0].replace("<think>\n\n</think>\n\n", "") == texts[1], "TRL begins no later turn with an empty thought"
    assert our_lengths[1] == [batch.response_ids[row][batch.valid_mask[row]].tolist() for row in range(2)]
    for ours, of_trl in zip(our_numbers[0], their_numbers[0], strict=True):
        assert [(m["role"], m.get("name"), m.get("tool_calls")) for m in ours] == [
            (m["role"], m.get("name"), m.get("tool_calls")) for m in of_trl
        ]
    assert [m["content"] for m in our_numbers[0][0]] == [
        TEXTS[0][0].removesuffix(END), *told[0][:3], TEXTS[0][1].removesuffix(END), *told[0][3:], "11."
    ]  # fmt: skip
    assert rewards[0] == 11 + 11 + len(their_lengths[1][0]) / 8
    assert rewards[1] == 4 + len(their_lengths[1][1]) / 8, "no opinion, and what the environment pays"
    lengths = [len(ids) / 8 for ids in our_lengths[1]]
    assert batch.rewards.tolist() == [11 + 11 + lengths[0], 4 + lengths[1]]
