"""Steps that every method is compared with: uniform credit, lower baselines, and the limit from resampled values.

Their products are data of the package, so that no benchmark of a method computes their gradients again.

Shapes: ``N`` batches, ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from grail_lightning.app.benchmark.gradients import Products, References, policy_gradients, products
from grail_lightning.app.benchmark.labels import q_and_v
from grail_lightning.app.benchmark.rollouts import GROUP_SIZE, OBJECTIVE, OpenWorld
from grail_lightning.app.benchmark.stored import read_arrays
from grail_lightning.app.benchmark.worlds import DATA, World
from grail_lightning.core.advantages import GroupMean
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.step.assign import compute_advantages

NUMBER = 32
"""The batches of the shipped products, those of a benchmark without options."""
CONSTANTS = {"r - 3 mean/4": 0.75, "r - mean/2": 0.5, "r - mean/4": 0.25, "r": 0.0}
LIMITS = {"Q - V": 1.0, "Q - 3 V/4": 0.75, "Q - V/2": 0.5, "Q - V/4": 0.25, "Q": 0.0}
BEST = "Q - b*"
_PARTS = ("own", "along", "adam")
_GROUPS = ("uniform", "constants", "limits")


# --- token advantages -------------------------------------------------------------------------------------------------


def uniform_batches(opened: OpenWorld, share: float = 1.0) -> list[RolloutBatch]:
    """The batches with the advantages of Dr. GRPO: rewards less a share of the group's mean."""
    estimator = GroupMean(share=share)
    return [
        compute_advantages(batch, GROUP_SIZE, estimator, OBJECTIVE, opened.policy, opened.context(number, 0))
        for number, batch in enumerate(opened.batches)
    ]


def on_every_token(batch: RolloutBatch) -> Tensor:
    """``[B, T]``: the advantage of the rollout on each of its tokens, uniform credit."""
    return batch.advantages[:, None] * batch.response_mask


def _resampled(opened: OpenWorld) -> dict[str, list[Tensor]]:
    """Token advantages ``Q``, ``V`` and ``b*`` on each batch, from either half of the draws; empty without values."""
    arrays = read_arrays(opened.world.file, ("value", "best"), len(opened.batches))
    if not arrays:
        return {}
    tables: dict[str, list[Tensor]] = {f"{name}{half}": [] for name in ("Q", "V", "b*") for half in (0, 1)}
    for number, batch in enumerate(opened.batches):
        for half in (0, 1):
            q, v = q_and_v(arrays, half, number, batch)
            _, best = q_and_v(arrays, half, number, batch, "best")
            for name, table in (("Q", q), ("V", v), ("b*", best)):
                tables[f"{name}{half}"].append(table * batch.response_mask)
    return tables


# --- products ---------------------------------------------------------------------------------------------------------


def compute_references(opened: OpenWorld, done: Callable[[int], None] | None = None) -> References:
    """The products of all references on the batches of a world; `done` is that of `policy_gradients`.

    A gradient is linear in the token advantages, so those of ``r − c·mean`` and ``Q − c·V`` are sums of a few.
    """
    credits = {name: [*map(on_every_token, uniform_batches(opened, share))] for name, share in (("u", 1.0), ("r", 0.0))}
    found = policy_gradients(opened.policy, opened.batches, credits | _resampled(opened), done=done)
    uniform, right = found["u"], found["r"]
    constants = {name: products(right.lerp(uniform, c), uniform) for name, c in CONSTANTS.items()}
    limits = {}
    if "Q0" in found:
        rows = [(name, "V", c) for name, c in LIMITS.items()] + [(BEST, "b*", 1.0)]
        for name, baseline, c in rows:
            one, other = (found[f"Q{half}"] - c * found[f"{baseline}{half}"] for half in (0, 1))
            limits[name] = products(one, uniform, other)
    return References(uniform=products(uniform, uniform), constants=constants, limits=limits)


# --- files ------------------------------------------------------------------------------------------------------------


def file_of(world: World) -> Path:
    """The file of the shipped products of a world."""
    return DATA / f"{world.name}_gain.npz"


def _rows(references: References) -> Iterator[tuple[str, Products]]:
    yield "uniform", references.uniform
    for group in _GROUPS[1:]:
        for name, one in getattr(references, group).items():
            yield f"{group}: {name}", one


def write_references(references: References, file: Path) -> None:
    """Write the products to a file: of each table the mean of a pair's two entries, which is all that is used."""
    names, tables = zip(*_rows(references), strict=True)
    upper = np.triu_indices(references.number)
    arrays = {"names": np.array(names), "power": np.stack([one.power.float().numpy() for one in tables])}
    for part in _PARTS:
        whole = torch.stack([getattr(one, part) for one in tables])
        arrays[part] = ((whole + whole.mT) / 2).float().numpy()[:, *upper]
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes no dict of arrays.


def read_references(world: World, file: Path | None = None) -> References | None:
    """The products of a world in a file, default the shipped one; None if there is none."""
    file = file or file_of(world)
    if not file.exists():
        return None
    with np.load(file) as arrays:
        read = {name: arrays[name] for name in arrays.files}
    number = read["power"].shape[1]
    rows, columns = np.triu_indices(number)
    found: dict[str, dict[str, Products]] = {group: {} for group in _GROUPS}
    for k, name in enumerate(read["names"].tolist()):
        tables = {}
        for part in _PARTS:
            table = torch.zeros(number, number, dtype=torch.float64)
            table[rows, columns] = table[columns, rows] = torch.from_numpy(read[part][k]).double()
            tables[part] = table
        group, _, own = name.partition(": ")
        found[group][own] = Products(power=torch.from_numpy(read["power"][k]).double(), **tables)
    return References(uniform=found["uniform"][""], constants=found["constants"], limits=found["limits"])


def check_references(references: References, uniform: Products, world: World) -> None:
    """Check that shipped products are those of these rollouts and weights.

    Raises:
        ValueError: If the norms of uniform credit's gradients differ by more than other processors' roundings.
    """
    shipped = references.uniform.power[: len(uniform.power)]
    if not torch.allclose(shipped, uniform.power, rtol=1e-3):
        raise ValueError(
            f"The reference gradients of `{world.name}` must be those of the packaged policy and its stored rollouts, "
            f"but got the squared norm {shipped[0]:.6g} of the first one where the policy has {uniform.power[0]:.6g}. "
            f"Make {file_of(world).name} again: python scripts/make_benchmark_data.py {world.name} --products"
        )
