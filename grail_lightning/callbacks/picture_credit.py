"""The pictures of rollouts with the saliency of their tokens, for files and pages."""

from __future__ import annotations

import base64
import io
import json

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.saliency import picture_saliency
from grail_lightning.distributed.sharding import gathered
from grail_lightning.picture import FIRST_PICTURE_ID, Picture, pictures_in
from grail_lightning.policy import Policy

_LONGEST_SIDE = 256  # Pixels of a picture in a file.


@torch.inference_mode(False)
def picture_column(policy: Policy, batch: RolloutBatch, explained: Tensor, token_budget: int) -> list[str | None]:
    """JSON of the pictures of each row, those of its prompt first; None for a row without any.

    Each has `src`, a data URL of the picture at most 256 pixels wide and high, `layers` of grids as
    `grail_lightning.policy.pictures.PictureTokens.layers` says, and `scores`, the saliency of its tokens for the tokens
    ``explained [B, T]``; null if none is explained. A collective where weights are sharded.
    """
    assert policy.vision is not None
    with gathered(policy):
        scores = picture_saliency(policy, batch, explained, token_budget=token_budget)
    column: list[str | None] = []
    for row, (prompt, own) in enumerate(zip(batch.prompts, scores, strict=True)):
        shown = pictures_in(prompt.messages)
        shown += [] if batch.episodes is None else [p for call in batch.episodes[row].calls for p in call.pictures]
        made, begun, tokens = [], 0, policy.vision.pictures
        left = int((batch.input_ids[row] >= FIRST_PICTURE_ID).sum())
        for picture in shown:
            stop = begun + len(tokens.hold(picture))
            if stop > left:  # Those of the last turn's calls, if no turn followed.
                break
            made.append({"src": _url(picture), "layers": tokens.layers(picture), "scores": own[begun:stop] or None})
            begun = stop
        column.append(json.dumps(made) if made else None)
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
