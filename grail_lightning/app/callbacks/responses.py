"""The callback that shows some graded responses of the first batch on the terminal. Text from a model is untrusted."""

from __future__ import annotations

import math
import sys
from collections import Counter

from lightning.pytorch import Callback, LightningModule, Trainer

from grail_lightning.answers.records import UNSCORED, Verdict
from grail_lightning.app.callbacks.hooks import module_of, output_of
from grail_lightning.app.results.table import plain
from grail_lightning.core.records.task import Prompt, Task
from grail_lightning.core.rollout.batch import GradedBatch, Sampling
from grail_lightning.core.rollout.rows import prompt_text, response_text
from grail_lightning.core.runtime.checks import check_option
from grail_lightning.core.runtime.pages import page

_PROMPT, _RESPONSE, _ANSWER = 300, 700, 80  # Most characters that are shown of each.
_LINES = 14  # Most lines of a text.
_MARGIN = " " * 10


class ShowResponses(Callback):
    """Shows some graded responses of the first batch of `fit` and `validate` on the terminal.

    For each it shows the end of the prompt, the response, the answer that was found in it beside the reference, the
    verdict and the reward. If all responses of that batch are cut or without an answer, or if nearly all are wrong, a
    line says so and what to do. The first rank shows responses of its own. Control characters are written out, and long
    texts are shortened.

    Args:
        number: The number of responses; 0 shows none.
    """

    def __init__(self, number: int = 3) -> None:
        check_option("number", number, "[0, inf)")
        self.number = number
        self._waiting = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait for the first batch of a fit or a validation."""
        self._waiting = self.number > 0 and stage in ("fit", "validate")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Show responses to training problems, if there was no validation before."""
        self._show(trainer, pl_module, outputs, "sampling", module_of(pl_module).sampling)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show responses to validation problems; the sanity check of Lightning shows none."""
        if not trainer.sanity_checking:
            sampling = getattr(module_of(pl_module).evaluation, "sampling", module_of(pl_module).sampling)
            self._show(trainer, pl_module, outputs, "evaluation.sampling", sampling)

    def _show(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, option: str, sampling: Sampling
    ) -> None:
        if not self._waiting or outputs is None or not len(batch := output_of(outputs).batch):
            return
        self._waiting = False
        if not trainer.is_global_zero:
            return
        rows = first_rows(batch, self.number)
        lines = ["", f"{len(rows)} of the first {len(batch)} responses (`responses.number: 0` shows none)"]
        for row in rows:
            lines += ["", *response_lines(batch, row)]
        module = module_of(pl_module)
        remark = remark_on(batch, f"{option}.max_response_length", sampling.max_response_length)
        remark = remark or few_are_right(batch, module.execution.group_size)
        if remark:
            lines += ["", remark + what_it_knows(module.policy_name)]
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # A terminal may know ASCII alone.
        # Beside a progress bar the bar itself has to print.
        pl_module.print("\n".join([*lines, ""]).encode(encoding, "backslashreplace").decode(encoding))


def first_rows(batch: GradedBatch, number: int) -> list[int]:
    """The first response of each group, then the second of each, and so on: `number` rows, or all."""
    earlier, order = Counter[int](), []
    for row, group in enumerate(batch.group.tolist()):
        order.append((earlier[group], row))
        earlier[group] += 1
    return [row for _, row in sorted(order)[:number]]


def response_lines(batch: GradedBatch, row: int) -> list[str]:
    """What is shown of a response."""
    prompt, verdict, reward = batch.prompts[row], batch.verdicts[row], float(batch.rewards[row])
    answer = "none" if verdict.status == "missing" else plain(verdict.prediction, _ANSWER) or "(empty)"
    reference = f" (reference {plain(prompt.reference, _ANSWER)})" if prompt.reference else ""
    length, earned = int(batch.response_lengths[row]), "no score" if math.isnan(reward) else f"reward {reward:.4g}"
    end = "" if batch.finished[row] else ", cut at its limit"
    return [
        *_in_margin("prompt", _shortened(prompt_text(prompt), 0, _PROMPT)),
        *_in_margin("response", _shortened(response_text(batch, row), _RESPONSE // 2, _RESPONSE // 2)),
        *([] if _has_no_answer(verdict) else _in_margin("answer", [answer + reference])),
        *_in_margin("verdict", [f"{plain(verdict.status)}, {earned}, {length} tokens{end}"]),
    ]


def _has_no_answer(verdict: Verdict) -> bool:
    """Whether a reward has judged the rollout, of which no answer is read."""
    return not verdict.gold and verdict.layer == "none" and verdict.status in ("right", "wrong", UNSCORED)


def _in_margin(name: str, lines: list[str]) -> list[str]:
    """Lines behind a name. All of them are indented, so that no line of a model can pass for ours."""
    return [f"{name:<{len(_MARGIN)}}{lines[0]}", *(_MARGIN + line for line in lines[1:])]


def _shortened(text: str, first: int, last: int) -> list[str]:
    """The lines of a text without control characters: at most its `first` and `last` characters and `_LINES` lines."""
    if len(text) > first + last:
        text = f"{text[:first]} … ({len(text) - first - last:,} characters) … {text[len(text) - last :]}".lstrip()
    lines = [plain(line, len(line) * 10) for line in text.splitlines()] or [""]
    if len(lines) > _LINES:
        begin = _LINES // 2 * bool(first)
        left_out = f"… ({len(lines) - _LINES:,} lines) …"
        lines = [*lines[:begin], left_out, *lines[len(lines) - _LINES + begin :]]
    return lines


def remark_on(batch: GradedBatch, limit: str, most: int) -> str:
    """What to look at if all responses are cut, without an answer or wrong; empty if some are not.

    Rewards of one's own may differ although no answer is right: then there is something to learn.
    """
    number, statuses = len(batch), {verdict.status for verdict in batch.verdicts}
    scored = batch.rewards[~batch.rewards.isnan()]
    if not batch.finished.any():
        return (
            f"All {number} responses were cut at {most} tokens. Raise `{limit}`; if they go on behind their answer, "
            "set `sampling.stop` to what follows it, or see whether the end token is the policy's."
        )
    if batch.correct.any() or (len(scored) and scored.max() > scored.min()):
        return ""
    status = next(iter(statuses)) if len(statuses) == 1 else "several"
    if status == "wrong" or status not in _REMARKS:
        status = "wrong" if any(map(_is_compared, batch.prompts, batch.verdicts)) else "judged"
    return _REMARKS[status].format(number=number, page=page("reference/grading.md"))


def few_are_right(batch: GradedBatch, group_size: int) -> str:
    """What to do if so few responses are right that most groups of training have none; empty else.

    With the share ``p`` of right responses, at most ``1 - (1 - p)^G`` of the groups of ``G`` rollouts have a right one.
    Rewards of one's own may differ among wrong responses: then there is something to learn.
    """
    number, right = len(batch), int(batch.correct.sum())
    share = right / number
    wrong = batch.rewards[~batch.correct & ~batch.rewards.isnan()]
    if share >= _FEW or (len(wrong) and wrong.max() > wrong.min()):
        return ""
    alive = 1 - (1 - share) ** group_size
    return (
        f"Only {right} of {number} responses {'is' if right == 1 else 'are'} right. Training compares the rollouts of "
        f"one problem with each other, and at this rate at most {alive:.0%} of the groups of {group_size} have a right "
        "one; the others teach nothing. Take easier problems, a stronger policy, or larger groups "
        "(`model.execution.group_size`)."
    )


def what_it_knows(policy: object) -> str:
    """What a packaged policy can do, as a sentence behind another one; empty for any other policy."""
    if not isinstance(policy, str) or policy not in _KNOWS:
        return ""
    return f" The packaged policy `{policy}` knows {_KNOWS[policy]}, and nothing else."


def _is_compared(prompt: Prompt, verdict: Verdict) -> bool:
    """Whether an answer of the response is compared with a reference, rather than judged by a reward or by tests."""
    return not _has_no_answer(verdict) and type(prompt.task).verdicts is Task.verdicts


_FEW = 0.05  # The share of right responses below which a remark says that there is little to learn from.
_KNOWS = {
    "arithmetic": "sums and differences of five numbers from 1 to 9, as `Compute 7+5-3+8-9.`",
    "chains": "sums and differences of five to ten numbers from 1 to 9, as `Compute 7+5-3+8-9+4.`",
    "numbers": "sums and differences of two to six numbers from 1 to 20, as `Compute 17-4+12.`, and which of two sums "
    "or of several numbers is the largest or smallest, as `Which is larger, 17-4 or 9+6?`",
    "long_chains": "sums and differences of 15 to 20 numbers from 1 to 9, as those of `chains`",
    "words": "word problems in the sentences of `WordProblemData` with comparisons",
    "search": "the questions of `SearchData`",
    "code": "the functions of `CodeData`",
    "charts": "the questions of `ChartsData`",
}
"""What each packaged policy can do."""

_REMARKS = {
    "missing": "None of {number} responses has an answer in the form that the task reads. Compare the responses above "
    "with `data.task.answer`, and see whether the prompt asks for this form (`data.task.instruction`, `few_shot`).",
    "unevaluated": "None of {number} responses has an answer that is worked out: all are equal to the reference, but "
    "could still be carried out. See whether the prompt asks for a worked-out answer, or set "
    "`data.task.answer.evaluated: false` ({page}).",
    "unknown_tokens": "In each of {number} responses the policy sampled tokens that its tokenizer does not know. See "
    "whether the tokenizer is the model's own (`model.policy`).",
    UNSCORED: "None of {number} responses was judged: the reward returned None for all of them. Look at the service or "
    "the data that `data.task.rewards` or `get_reward` asks.",
    **dict.fromkeys(
        ("timeout", "crashed"),
        "None of {number} responses could be judged: each took too long, or its process ended. See whether the machine "
        "has free cores and memory, and look at the responses above for what takes so long ({page}).",
    ),
    "wrong": "None of {number} responses is right. Compare answers and references above: if the answers are right, "
    "look at the column of the reference and `data.task.compare`; if not, take a stronger policy or easier problems.",
    "judged": "None of {number} responses is right. Look at what judges the responses above, the tests or the reward "
    "(`data.task.solved_at`); if it is right, take a stronger policy or easier problems.",
}
"""What to look at if no response is right, by the one status of all of them."""
