"""Token credit inside TRL's `GRPOTrainer`: TRL samples, scores, shuffles, logs and takes steps as ever.

TRL computes one advantage for each response ``[B]``; its loss also takes one for each token ``[B, T]``. The class
completes what TRL's generation step returns: it makes a batch of the ids, masks and rewards, calls the credit method
(`grail_lightning.core.other_trainers`), and puts the advantages of tokens in the place of the others.

Shapes: ``B`` rows (completions) of a rank in one generation, ``T`` completion tokens.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.trainer_utils import get_last_checkpoint

from grail_lightning.app.trl.checks import check_release, check_run, standardised
from grail_lightning.app.trl.pages import STATE_FILE, CreditPages, KeepCreditState
from grail_lightning.core.credit.base import CreditControl, TokenCredit
from grail_lightning.core.credit.service import FrozenReference, listed
from grail_lightning.core.other_trainers.credit import assign, context_of
from grail_lightning.core.other_trainers.model import as_policy
from grail_lightning.core.other_trainers.rollouts import GivenRollouts
from grail_lightning.core.records.episode import Episode, ToolCall, Turn
from grail_lightning.core.records.picture import has_pictures, with_pictures
from grail_lightning.core.records.task import Prompt, Task
from grail_lightning.core.rollout.batch import lengths_to_mask
from grail_lightning.core.tasks.answered import AnswerTask, MathTask

check_release()
from trl import GRPOTrainer  # noqa: E402  (a release that is too old has other names)


class _TurnsTask(MathTask):
    """The default task where TRL's environments or tools answer between the turns of a rollout."""

    has_environment = has_tools = True


class _Scored(NamedTuple):
    """What TRL's reward functions were given, and what they made of it; one entry for each row of the rank."""

    rows: Sequence[Mapping[str, Any]]  # Of the dataset.
    prompts: Sequence[Any]
    completions: Sequence[Any]
    ids: Sequence[Sequence[int]]  # All tokens after the prompt.
    rewards: Tensor  # [B] float64, weighted and summed; NaN for a completion that nothing scored.
    correct: Tensor | None  # [B] bool, by `correct_func`; None without it.


class TokenCreditMixin(GRPOTrainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Token credit for a subclass of `GRPOTrainer`: ``class Mine(TokenCreditMixin, MyTrainer)``.

    The arguments of the trainer stay as they are, and these are added. Training alone has token credit; evaluation is
    TRL's own. Figures of the credit are logged as ``credit/…`` beside TRL's.

    Args:
        credit: The credit method. With `scale_rewards="group"` `TreeAdvantage` and `GiGPO` standardise their terms.
        credit_control: A control experiment around it, such as `Shuffled`.
        correct_func: A function in the form of a reward function that says which completions are right (True or 1), for
            methods that read it and for the pages; None counts a weighted reward above 0.
        credit_task: The task that knows the form of the answer and can label steps; default the last box. The columns
            of the dataset are those of its prompts.
        reference_column: The column with the reference answer, for methods that read it and for the pages.
        credit_batch_size: Completions in a forward pass of the method; default `per_device_train_batch_size`.

    Raises:
        ValueError: If the method or an option of TRL's does not go with token credit; the message names what does.
    """

    def __init__(
        self,
        *args: Any,
        credit: TokenCredit,
        credit_control: CreditControl | None = None,
        correct_func: Callable[..., Any] | None = None,
        credit_task: Task | None = None,
        reference_column: str = "solution",
        credit_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(credit, TokenCredit):
            raise ValueError(
                f"`credit` must be an instance of `TokenCredit`, but got {credit!r:.80}. Call the class: "
                "credit=GRAIL()."
            )
        super().__init__(*args, **kwargs)
        self.credit = standardised(credit) if self.scale_rewards == "group" else credit
        self.credit_control, self.correct_func = credit_control, correct_func
        self.credit_task = credit_task or (_TurnsTask() if self.tools else MathTask())
        self.reference_column = reference_column
        self.credit_batch_size = credit_batch_size or self.args.per_device_train_batch_size
        check_run(self)
        runs = self.credit.runs_policy
        processor = self.processing_class if hasattr(self.processing_class, "image_processor") else None
        options = {"chat_template_kwargs": self.chat_template_kwargs, "runs": runs, "processor": processor}
        named = getattr(self.model, "peft_config", {})
        self._credit_policy = as_policy(
            self.model, self._credit_tokenizer, reference_adapter="ref" if "ref" in named else None, **options
        )
        if runs and self.is_fsdp_enabled:
            # These are tried while weights are whole.
            _ = self._credit_policy.tree_kernel, self._credit_policy.supports_kv_continuation
        reads = runs and any(issubclass(kind, FrozenReference) for kind in listed([self.credit]))
        has_copy = reads and self.ref_model is not None
        self._credit_reference = as_policy(self.ref_model, self._credit_tokenizer, **options) if has_copy else None
        self._credit_scored: list[_Scored] = []  # Of the generation that is being scored.
        self.add_callback(KeepCreditState(self.credit))

    @property
    def _credit_tokenizer(self) -> Any:
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """See TRL; a method that has a state begins with that of the checkpoint, else anew."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        state = {}
        if folder and (file := Path(folder) / STATE_FILE).is_file():
            state = torch.load(file, map_location="cpu", weights_only=True)
        self.credit.load_state_dict(state)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """See TRL; keeps what it is given and what it returns."""
        table: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training:
            first = self.accelerator.process_index * len(prompts)  # Of the rewards of all ranks.
            own = table[first : first + len(prompts)].double()
            total = (own * self.reward_weights.to(own)).nansum(1).masked_fill(own.isnan().all(1), torch.nan)
            told = (inputs, prompts, completions, completion_ids_list)
            correct = None if self.correct_func is None else self._credit_correct(*told).to(own.device)
            self._credit_scored.append(_Scored(*told, total, correct))
        return table

    def _credit_correct(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Tensor:
        """``[B]`` bool by `correct_func`, which is told what TRL tells a reward function; None counts as wrong."""
        assert self.correct_func is not None
        reserved = ("prompt", "completion", "completion_ids")
        columns = {name: [row[name] for row in inputs] for name in inputs[0] if name not in reserved}
        if self.environments is not None:
            columns["environments"] = self.environments
        found = self.correct_func(
            prompts=prompts,
            completions=completions,
            completion_ids=ids,
            trainer_state=self.state,
            log_extra=lambda column, values: None,  # What a reward function logs, it has logged itself.
            log_metric=lambda name, value: None,
            **columns,
        )
        flags = list(asyncio.run(found) if inspect.iscoroutine(found) else found)
        if len(flags) != len(prompts):
            raise ValueError(
                f"`correct_func` must return one value for each of {len(prompts)} completions, but got {len(flags)}."
            )
        return torch.tensor([bool(flag) for flag in flags])

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """See TRL; in training with the advantages of tokens ``[B, T]`` in place of those of completions ``[B]``."""
        self._credit_scored.clear()
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        begun, (scored,) = time.perf_counter(), self._credit_scored
        rollouts = self._credit_rollouts(output, scored)
        context = context_of(
            self.credit,
            self._credit_policy,
            reference=self._credit_reference,
            step=self.state.global_step,
            seed=self.args.seed,
            temperature=self.temperature,
            token_budget=self.credit_batch_size * (output["prompt_ids"].shape[1] + output["completion_ids"].shape[1]),
        )
        with self.accelerator.autocast():
            advantages, told = assign(self.credit, self.credit_control, self._credit_policy, rollouts, context)
        figures = told.metrics | {"credit/seconds": time.perf_counter() - begun}
        for name, value in figures.items():
            self._metrics["train"][name].append(value)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, CreditPages):
                callback.on_credit(self.args, self.state, told, self._credit_tokenizer, type(self.credit).__name__)
        return output | {"advantages": advantages.to(output["advantages"].device)}

    def _credit_rollouts(self, output: Mapping[str, Any], scored: _Scored) -> GivenRollouts:
        """The rows of a generation. TRL clears the masks of truncated rows, so lengths are those of the ids."""
        ids, device = output["completion_ids"], output["completion_ids"].device
        valid = lengths_to_mask(torch.tensor([len(row) for row in scored.ids], device=device), ids.shape[1])
        sampled, ends = valid, {*self.eos_token_ids, self._credit_tokenizer.pad_token_id}
        finished = torch.tensor([row[-1] in ends for row in scored.ids], device=device)
        if (told := output.get("tool_mask")) is not None:
            # The mask of a truncated row is lost. It is not in the loss, and counts as one turn for its group.
            lost = ~finished & torch.tensor(self.mask_truncated_completions, device=device)
            sampled = valid & (told.bool() | lost[:, None])
        place = torch.arange(len(ids), device=device)
        return GivenRollouts(
            prompt_ids=output["prompt_ids"],
            prompt_mask=output["prompt_mask"],
            response_ids=ids,
            response_mask=sampled,
            valid_mask=valid,
            rewards=scored.rewards.to(device),
            group=place // self.num_generations,
            advantages=output["advantages"],
            correct=scored.correct,
            finished=finished,
            prompts=list(map(self.credit_prompt, scored.rows, scored.prompts)),
            row=place + self.accelerator.process_index * len(ids),
            episodes=None if told is None else self._credit_episodes(scored, sampled, finished),
        )

    def credit_prompt(self, row: Mapping[str, Any], messages: Any) -> Prompt:
        """A row of TRL's dataset as a prompt of the task."""
        reference = str(row.get(self.reference_column) or "")
        if isinstance(self.credit_task, AnswerTask):
            reference = self.credit_task.form.bare(reference).strip()
        if has_pictures(messages):
            messages = with_pictures(messages, [], "a prompt of TRL's dataset")
        return Prompt(messages=messages, reference=reference, task=self.credit_task, columns=dict(row))

    def _credit_episodes(self, scored: _Scored, sampled: Tensor, finished: Tensor) -> list[Episode]:
        """The turns of each row as text: a turn is what was sampled between two answers of tools."""
        episodes = []
        for ids, mask, done, messages in zip(
            scored.ids, sampled.tolist(), finished.tolist(), scored.completions, strict=True
        ):
            parts = list(_runs(ids, mask[: len(ids)]))
            told = _calls(messages) if isinstance(messages, list) else []
            told += [()] * (len(parts) - len(told))
            decode = self._credit_tokenizer.decode
            turns = [
                Turn(text=decode(part, skip_special_tokens=True), calls=calls)
                for part, calls in zip(parts, told, strict=False)
            ]
            episodes.append(Episode(turns=tuple(turns), end="answered" if done else "tokens"))
        return episodes


class TokenCreditGRPOTrainer(TokenCreditMixin, GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` with token credit; `TokenCreditMixin` has the arguments that are added to TRL's."""


def _runs(ids: Sequence[int], mask: Sequence[bool]) -> Iterator[list[int]]:
    """The ids of each run of True in a mask."""
    for is_sampled, run in groupby(zip(ids, mask, strict=True), key=itemgetter(1)):
        if is_sampled:
            yield [token for token, _ in run]


def _calls(messages: Sequence[Mapping[str, Any]]) -> list[tuple[ToolCall, ...]]:
    """The calls of each turn of a completion with their results, as far as they were run."""
    turns: list[tuple[ToolCall, ...]] = []
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            continue
        results = []
        for later in messages[place + 1 :]:
            if later["role"] != "tool":
                break
            results.append(str(later["content"]))
        asked = [call.get("function", call) for call in message.get("tool_calls") or []]
        results += [""] * (len(asked) - len(results))
        turns.append(
            tuple(
                ToolCall(name=str(call.get("name", "")), arguments=call.get("arguments") or {}, result=result)
                for call, result in zip(asked, results, strict=False)
            )
        )
    return turns
