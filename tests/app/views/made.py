"""Files of predictions with rollouts that a test writes down."""

from zlib import crc32

from grail_lightning.core.records.columns import OPTIONAL, PREDICTION, write_parquet
from grail_lightning.core.records.episode import episode_json


def rollout(tokens, prompt="Compute 1+1.", correct=False, method="GRAIL", **columns):
    """A row of predictions; tokens of the same text have the same id."""
    stops = [sum(map(len, tokens[: k + 1])) for k in range(len(tokens))]
    row = {
        "dataset": "made",
        "prompt": prompt,
        "reference": "2",
        "response": "".join(tokens),
        "reward": float(correct),
        "correct": correct,
        "status": "right" if correct else "wrong",
        "advantage": 1.0 if correct else -1.0,
        "finished": True,
        "num_tokens": len(tokens),
        "group": 0,
        "token_ids": [crc32(token.encode("utf-8", "surrogatepass")) % 2**31 for token in tokens],
        "tokens": list(tokens),
        "token_starts": [0, *stops[:-1]] if tokens else [],
        "token_stops": stops,
        "method": method,
        "weights": [1.0 + k / 10 for k in range(len(tokens))],
        "scores": [0.001 * (k + 1) for k in range(len(tokens))],
        "fallback": False,
    }
    return row | columns


def in_turns(parts, episode, **columns):
    """A rollout whose parts are in turn the tokens of the policy and of an environment."""
    tokens = [token for part in parts for token in part]
    turns = [-1 if number % 2 else number // 2 for number, part in enumerate(parts) for _ in part]
    row = rollout(
        tokens, **{"response": "".join(parts[-1]), "turns": turns, "episode": episode_json(episode)} | columns
    )
    before = len(tokens) - len(parts[-1])
    stops = [sum(map(len, parts[-1][: k + 1])) for k in range(len(parts[-1]))]
    own = [None if turn < 0 else weight for turn, weight in zip(turns, row["weights"], strict=True)]
    places = {"token_starts": [0] * before + [0, *stops[:-1]], "token_stops": [0] * before + stops}
    return row | places | {"weights": own} | columns


def write(file, rows, compared=()):
    """A Parquet file as `PredictionWriter` writes it; columns that a row does not have are null."""
    names = [name for name in PREDICTION if name not in OPTIONAL or any(name in row for row in rows)]
    names += [f"{name}.{method}" for method in compared for name in ("weights", "scores", "fallback")]
    write_parquet(file, {name: [row.get(name) for row in rows] for name in names}, names)
    return file
