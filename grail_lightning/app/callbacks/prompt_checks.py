"""Checks of a run's problems before the model is loaded: do they fit task and model, and are they what they should be.

They are made with the policy's tokenizer alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from grail_lightning.app.callbacks.evaluation import Evaluation
from grail_lightning.app.callbacks.hooks import callbacks_of
from grail_lightning.core.data.loaders import EvaluationLoader, TrainingLoader
from grail_lightning.core.data.modules import PromptData, PromptLimit, check_held_out
from grail_lightning.core.data.rows import RowPrompts
from grail_lightning.core.policy.source import check_policy
from grail_lightning.core.records.task import Prompt, problem_id
from grail_lightning.core.step.execution import Execution
from grail_lightning.core.tasks.answered import AnswerTask

if TYPE_CHECKING:
    from grail_lightning.core.module import GrailModule

_MOST_COMPARED = 200_000  # The training problems that are compared with those of validation, in about 5 seconds.


def check_prompts(trainer: Trainer, module: GrailModule, data: PromptData, stage: str) -> None:
    """Make and encode prompts: the task must fit the rows, and all prompts of an evaluation the model."""
    evaluation = next((c for c in callbacks_of(trainer) if isinstance(c, Evaluation)), None)
    sampling = (evaluation and evaluation.sampling) or module.sampling
    training: object = data.train_dataloader() if stage == "fit" else None
    sets = [part.prompts for part in training.sets] if isinstance(training, TrainingLoader) else []
    for prompts in filter(len, sets):
        _check_beginning(module, prompts)
        rewards = prompts[0].task.rewards if isinstance(prompts[0].task, AnswerTask) else ()
        penalties = [reward.name for reward in rewards if reward.path == "overlong"]
        if penalties and module.objective.mask_truncated:
            rank_zero_warn(
                f"The reward `{penalties[0]}` is lowest for responses that are cut, but `objective.mask_truncated` "
                "leaves them out of the loss. Set it to false, so that the penalty reaches them."
            )
    if remark := module.credit.check_prompts(sets):
        rank_zero_warn(remark)
    if stage == "fit" and not trainer.enable_validation:
        return
    loaders = {"predict": data.predict_dataloader, "test": data.test_dataloader}.get(stage, data.val_dataloader)()
    held_out = [loader.prompts for loader in loaders if isinstance(loader, EvaluationLoader) and len(loader.prompts)]
    for prompts in held_out:
        _check_beginning(module, prompts)
        # Responses that `predict` is given are not sampled.
        sampled = stage != "predict" or "response" not in prompts[0].columns
        response = sampling.max_response_length if sampled else 0
        check_policy(module.policy_name, module.loading, response)
        option = "evaluation.sampling.max_response_length"
        encode = module.prompt_encoder(prompts[0].task)
        check_held_out(prompts, encode, PromptLimit(None, module.context_length, response, option))
    if sets and not data.disjoint_splits and trainer.is_global_zero and not getattr(trainer, "overfit_batches", 0):
        _compare_splits(sets, held_out)


def _check_beginning(module: GrailModule, prompts: Sequence[Prompt]) -> None:
    """Encode the first prompt, and look whether its problem is text that a chat template has rendered already.

    Such text has the one BOS token that it should have if it is the whole prompt. Within a conversation, and behind
    worked examples, BOS tokens stand in the middle of the prompt.
    """
    ids = module.prompt_encoder(prompts[0].task)(prompts[0].messages)
    bare, place, tokenizer = prompts[0], prompts[0].dataset or "The first prompt", module.tokenizer
    if isinstance(prompts, RowPrompts):  # Without worked examples.
        bare = RowPrompts(prompts.table, prompts.indices[:1], prompts.spec, prompts.task)[0]
        place = prompts.table.place(prompts.indices[0])
    text = isinstance(bare.messages, str)
    turns = [bare.messages] if isinstance(bare.messages, str) else [turn["content"] for turn in bare.messages]
    begin, number = tokenizer.bos_token, ids.count(tokenizer.bos_token_id)
    rendered = begin and any(isinstance(turn, str) and turn.lstrip().startswith(begin) for turn in turns)
    if not rendered or tokenizer.bos_token_id not in ids[1:]:
        return
    if text and bare.messages != prompts[0].messages:
        rank_zero_warn(
            f"{place}: the problem begins with the BOS token {begin!r}, as text does that a chat template has "
            f"rendered. With its worked examples the prompt has this token {number} times. Give plain problems with "
            "`few_shot.style: turns`."
        )
    elif not text and tokenizer.chat_template:
        rank_zero_warn(
            f"{place}: the problem begins with the BOS token {begin!r}, as text does that a chat template has "
            f"rendered, but it is a turn of a conversation, which is rendered once more: the prompt has this token "
            f"{number} times. Give the plain problem, or a task whose `prompt` returns the text as `messages`."
        )


def _compare_splits(training: Sequence[Sequence[Prompt]], held_out: Sequence[Sequence[Prompt]]) -> None:
    """Warn if validation problems are training problems: the same prompt with the same reference."""
    size, total = sum(map(len, training)), sum(map(len, held_out))
    if size + total > _MOST_COMPARED:
        if total:
            rank_zero_info(f"The {total:,} validation problems were not compared with {size:,} training problems.")
        return
    wanted = Counter(_problem(prompt) for prompts in held_out for prompt in prompts)
    references = {prompt.reference for prompts in held_out for prompt in prompts}  # They are quick to compare.
    every = (prompt for prompts in training for prompt in prompts if wanted)
    shared = {name for prompt in every if prompt.reference in references and (name := _problem(prompt)) in wanted}
    if number := sum(wanted[name] for name in shared):
        rank_zero_warn(
            f"{number:,} of the {total:,} validation problems are training problems, too: their accuracy says what was "
            "learned by heart, and the best checkpoint is chosen by it. Leave them out of one of `data.train` and "
            "`data.val`."
        )


def _problem(prompt: Prompt) -> str:
    """The identity of a problem in whatever dataset it stands."""
    return problem_id(replace(prompt, dataset="", occurrence=0))


def unequal_mini_batches(groups: int, execution: Execution, ranks: int) -> str:
    """A remark on a batch of some groups on each rank whose mini-batches have unequal parts of it; empty if not."""
    parts = execution.mini_batches
    if parts > groups and not execution.split_groups:
        return (
            f"`execution.mini_batches` {parts} are more than the {groups} groups of a rank's batch: "
            f"{parts - groups} of {parts} optimiser steps have no rows, change nothing and count towards "
            f"`max_steps`. Set it to {groups} at most, or take more prompts a batch."
        )
    what, number = "groups of a rank's batch", groups
    if execution.split_groups:
        what, number = "rollouts of a batch", groups * execution.group_size * ranks
    small, more = divmod(number, parts)
    if not more:
        return ""
    divisors = [str(k) for k in range(1 + execution.split_groups, min(number, 64) + 1) if number % k == 0]
    advice = f"Set it to one of {', '.join(divisors)}, or change" if divisors else "Change"
    return (
        f"`execution.mini_batches` {parts} deals the {number} {what} unequally: {more} of {parts} optimiser steps have "
        f"{small + 1}, the others {small}, and all count alike. {advice} the number of "
        "prompts a batch."
    )
