"""The callback that writes the token credit of given or sampled texts as Parquet, and as a page to look at."""

from __future__ import annotations

import base64
import inspect
import io
import json
import os
import socket
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from grail_lightning.answers.spans import align
from grail_lightning.app.callbacks.hooks import module_of, output_of, policy_of, rollouts_of, tell_policy
from grail_lightning.app.callbacks.rollouts import answer_place, sampled_values
from grail_lightning.app.views.page import pieces_of, write_page
from grail_lightning.core.credit.base import TokenCredit, TokenWeights
from grail_lightning.core.credit.saliency import picture_saliency
from grail_lightning.core.credit.service import listed
from grail_lightning.core.distributed.sharding import gathered
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.columns import OPTIONAL, PREDICTION, table_of
from grail_lightning.core.records.picture import FIRST_PICTURE_ID, PLACE, Picture, pictures_in
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.rollout.grading import align_rows, labelled_steps
from grail_lightning.core.rollout.rows import rows_of
from grail_lightning.core.runtime.files import whole_file
from grail_lightning.core.runtime.run_folder import RunFolder, unused
from grail_lightning.core.step.assign import weigh_batch
from grail_lightning.core.step.figures import StepOutput, effective_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST_SIDE = 256  # Pixels of a picture in a file.
_OF_A_METHOD = ("weights", "scores", "fallback")


class PredictionWriter(Callback):
    """Writes the results of `predict`: a Parquet file with one row for each rollout, and a page (HTML) of it.

    It is not a `BasePredictionWriter`, because Lightning would then require batch indices, which loaders of prompts do
    not have. The page "Files and columns" of the documentation lists the columns. The HTML page shows the first
    200 rollouts, or fewer if they need more than 5 MB; `grail_lightning.write_page` makes a page of more of them.

    Args:
        file: The file to write; default ``predictions.parquet`` in the folder of the run. It holds the rows of the
            ranks one after the other.
        compare: Further credit methods for the same rollouts. A control applies to them, too.
        page: Whether to write the page, beside the file and under its name: ``predictions.html``.
    """

    def __init__(self, file: str | None = None, compare: list[TokenCredit] | None = None, page: bool = True) -> None:
        if file and Path(file).is_dir():
            raise ValueError(f"`predictions.file` must be a file, but {file} is a folder. Name a file in it.")
        if file and Path(file).suffix != ".parquet":
            raise ValueError(f"`predictions.file` must end with .parquet, since that is its form, but got {file}.")
        self.file, self.compare, self.page = file, compare or [], page
        self._path = Path()
        self._names: list[str] = []
        self._writer: Any = None
        self._groups = 0  # Of this rank, until now.
        self._process = ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have the services opened that the further methods use, and refuse those that train a model."""
        if stage != "predict":
            return
        module = module_of(pl_module)
        options = ["model.credit", *["predictions.compare"] * len(self.compare)]
        for option, method in zip(options, (module.credit, *self.compare), strict=True):
            if any(kind.trains_model for kind in listed([method])):
                remedy = "Set" if option == "model.credit" else "Leave it out, or give"
                raise ValueError(
                    f"`{option}` must not be `{type(method).__name__}` in `predict`, since it trains a model "
                    f"beside the policy. {remedy} another method, such as TreeAdvantage."
                )
        for method in self.compare:
            module.services.add(method)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open this rank's partial file."""
        import pyarrow.parquet as pq

        tell_policy(trainer, pl_module)
        self._path = Path(self.file) if self.file else RunFolder(trainer).path / "predictions.parquet"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._process = str(trainer.strategy.broadcast(f"{socket.gethostname()}.{os.getpid()}"))
        self._groups = 0
        self._names = _method_names([module_of(pl_module).credit, *self.compare])
        # Whether there are turns and pictures is known at the end; without any, `_join` leaves their columns out.
        schema = table_of(dict.fromkeys(self._columns, ()), self._columns).schema
        self._writer = pq.ParquetWriter(self._part(trainer.global_rank), schema)

    @property
    def _columns(self) -> list[str]:
        """All columns, with those of the methods that are compared with the first one."""
        return [*PREDICTION, *(f"{column}.{name}" for name in self._names[1:] for column in _OF_A_METHOD)]

    @torch.inference_mode(False)  # As for the module's `predict_step`.
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add the rollouts of a batch."""
        output, module = output_of(outputs), module_of(pl_module)
        policy = policy_of(module)
        columns: dict[str, list[Any]] = {name: [None] * len(output.batch) for name in OPTIONAL}
        # Lightning opens the context of the precision for steps alone, but the passes here are like those of a step.
        with trainer.precision_plugin.predict_step_context():
            # Collectives: every rank takes part, also without rows.
            compared = {
                name: weigh_batch(method, module.control, policy, rollouts_of(output), module.credit_context())
                for name, method in zip(self._names[1:], self.compare, strict=True)
            }
            if policy.vision is not None:
                batch = rollouts_of(output)
                answer = (output.weights and output.weights.answer) or batch.answer
                budget = module.execution.token_budget
                columns["pictures"] = _picture_column(policy, batch, answer.whole, budget)
        if len(output.batch):
            columns |= prediction_rows(output, module.tokenizer, self._names[0], compared)
            # Groups have numbers of their own in each batch, and get those of this rank.
            columns["group"] = [(self._groups + k) * trainer.world_size + trainer.global_rank for k in columns["group"]]
            self._groups += int(output.batch.group.max()) + 1
            self._writer.write_table(table_of(columns, self._columns))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the partial files of all ranks. The file appears when it is complete."""
        self._writer.close()
        trainer.strategy.barrier("predictions")
        if trainer.is_global_zero:
            for file in (self._path, self._path.with_suffix(".html")):
                if file.exists():
                    rank_zero_info(f"{file} was there before, and is now {file.rename(unused(file))}.")
            rows = _join([self._part(rank) for rank in range(trainer.world_size)], self._path)
            rank_zero_info(f"Wrote {rows} predictions to {self._path}.")
            if self.page and rows:
                rank_zero_info(write_page(self._path, self._path.with_suffix(".html")))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the partial file, and remove it."""
        if self._writer is not None:
            self._writer.close()
            self._part(trainer.global_rank).unlink(missing_ok=True)

    def _part(self, rank: int) -> Path:
        # With the first rank's process: two commands may predict for one run at once.
        return self._path.with_name(f".{self._path.name}.{self._process}.rank{rank}")


def _join(parts: list[Path], file: Path) -> int:
    """Join several files into one, remove them, and return the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sources = [pq.ParquetFile(part) for part in parts]
    schema = sources[0].schema_arrow
    empty = [n for n in OPTIONAL if not any(source.read([n]).drop_null().num_rows for source in sources)]
    schema = pa.schema([column for column in schema if column.name not in empty])
    with whole_file(file) as unfinished, pq.ParquetWriter(unfinished, schema) as writer:
        for source in sources:
            for group in range(source.num_row_groups):
                writer.write_table(source.read_row_group(group, schema.names))
    for source, part in zip(sources, parts, strict=True):
        source.close()
        part.unlink()
    return int(pq.read_metadata(file).num_rows)


def prediction_rows(
    output: StepOutput, tokenizer: PreTrainedTokenizerBase, method: str, compared: Mapping[str, TokenWeights]
) -> dict[str, list[Any]]:
    """The columns of a batch, ``B`` values each; `method` is the configured credit, `compared` are further weights."""
    batch, columns = rollouts_of(output), rows_of(output.batch, PREDICTION, output.advantages)
    decode = tokenizer.decode
    columns["tokens"] = [[decode([token]) for token in row] for row in columns["token_ids"]]
    for ids, tokens in zip(columns["token_ids"], columns["tokens"], strict=True):
        for k, (before, token) in enumerate(pairwise([0, *ids])):
            if before < FIRST_PICTURE_ID <= token:  # The first one of a picture, or of a part of it.
                tokens[k] = PLACE
    for row in (row for row, played in enumerate(batch.in_environment) if played):
        # `response` is the last turn: what the others say is not to be read there.
        whole = align(columns["token_ids"][row], tokenizer)
        places = list(zip(whole.starts, whole.stops, strict=True))
        columns["tokens"][row] = pieces_of(whole.text, places, columns["tokens"][row])
    columns["method"] = [method] * len(batch)
    for suffix, weights in {"": output.weights, **{f".{name}": w for name, w in compared.items()}}.items():
        token_weights = None if weights is None else effective_weights(batch, weights)
        columns[f"weights{suffix}"] = _of_tokens(token_weights, batch)
        columns[f"scores{suffix}"] = _of_tokens(None if weights is None else weights.scores, batch)
        columns[f"fallback{suffix}"] = [None] * len(batch) if weights is None else weights.fallback.tolist()
    alignments = align_rows(batch, tokenizer)
    columns["token_starts"] = [list(aligned.starts) for aligned in alignments]
    columns["token_stops"] = [list(aligned.stops) for aligned in alignments]
    answers = [answer_place(output, row, aligned) for row, aligned in enumerate(alignments)]
    for end, (of_text, of_tokens) in enumerate((("box_start", "box_first_token"), ("box_stop", "box_last_token"))):
        columns[of_text] = [place and place[end] for place, _ in answers]
        columns[of_tokens] = [tokens[-end] if tokens else None for _, tokens in answers]
    steps = [labelled_steps(a.text, prompt) for a, prompt in zip(alignments, batch.prompts, strict=True)]
    for name in ("start", "stop", "kind"):
        columns[f"step_{name}s"] = [None if row is None else [getattr(step, name) for step in row] for row in steps]
    return columns


def _method_names(methods: Sequence[TokenCredit]) -> list[str]:
    """A name for each method: its class, with the options in which methods of one class differ; numbered if none do."""
    names: list[str] = []
    for method in methods:
        others = [vars(other) for other in methods if type(other) is type(method)]
        options = {name: vars(method).get(name) for name in inspect.signature(type(method)).parameters}
        differing = [f"{k}={v}" for k, v in options.items() if any(other.get(k) != v for other in others)]
        name = " ".join([type(method).__name__, *differing])
        number = sum(other == name or other.startswith(f"{name} (") for other in names) + 1
        names.append(name if number == 1 else f"{name} ({number})")
    return names


def _of_tokens(values: Tensor | None, batch: RolloutBatch) -> list[Any]:
    """``[B, T]`` as lists without padding; None for a token that the policy did not sample."""
    if values is None:
        return [None] * len(batch)
    rows = zip(values.detach().float().cpu(), batch.response_mask.cpu(), batch.valid_mask.cpu(), strict=True)
    return [sampled_values(row[valid], sampled[valid]) for row, sampled, valid in rows]


def _picture_column(policy: Policy, batch: RolloutBatch, explained: Tensor, token_budget: int) -> list[str | None]:
    """JSON of the pictures of each row, those of its prompt first; None for a row without any.

    Each has `src`, a data URL of the picture at most 256 pixels wide and high, `layers` of grids as
    `core.policy.vision.PictureTokens.layers` says, and `scores`, the saliency of its tokens for the tokens
    ``explained [B, T]``; null if none is explained. A collective where weights are sharded.
    """
    assert policy.vision is not None
    with gathered(policy):
        scores = picture_saliency(policy, batch, explained, token_budget=token_budget)
    column: list[str | None] = []
    for row, (prompt, picture_scores) in enumerate(zip(batch.prompts, scores, strict=True)):
        pictures = pictures_in(prompt.messages)
        pictures += [] if batch.episodes is None else [p for call in batch.episodes[row].calls for p in call.pictures]
        entries, begun, tokens = [], 0, policy.vision.pictures
        num_picture_tokens = int((batch.input_ids[row] >= FIRST_PICTURE_ID).sum())
        for picture in pictures:
            stop = begun + len(tokens.hold(picture))
            if stop > num_picture_tokens:  # Those of the last turn's calls, if no turn followed.
                break
            entries.append(
                {"src": _url(picture), "layers": tokens.layers(picture), "scores": picture_scores[begun:stop] or None}
            )
            begun = stop
        column.append(json.dumps(entries) if entries else None)
    return column


def _url(picture: Picture) -> str:
    """A data URL in the shorter one of two formats."""
    image, written = picture.open(), []
    image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    for kind in ("PNG", "JPEG"):
        file = io.BytesIO()
        image.save(file, kind)
        written.append(f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}")
    return min(written, key=len)
