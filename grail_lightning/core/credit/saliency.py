"""Input-gradient saliency: the effect of each position on the log-likelihood of some of the response's tokens.

Shapes: ``B`` rows, ``P`` prompt tokens, ``T`` response tokens, ``R × N`` places for tokens, ``M`` predictions,
``D`` width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from grail_lightning.core.credit.base import CreditContext, TokenCredit, TokenWeights
from grail_lightning.core.functional.tokens import TokenStats, full_precision, token_logprobs
from grail_lightning.core.policy.layout import ReadAt, TokenLayout, padded_layout
from grail_lightning.core.policy.micro_batch import cut_rows, scatter, zero_table
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.weights import requiring_grad
from grail_lightning.core.records.picture import FIRST_PICTURE_ID
from grail_lightning.core.rollout.batch import RolloutBatch, cut_responses, last_marked
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.core.runtime.seeds import preserved

Leaf = Literal["embeddings", "first", "middle", "last"]


@dataclass(frozen=True, kw_only=True)
class SaliencyTarget:
    """The saliency that a method needs.

    Attributes:
        explained: ``[B, T]`` bool, the tokens whose likelihood is explained.
        rows: ``[B]`` bool, the rows that need scores.
        leaf: The activation; see `input_saliency`.
        read_at: The position that is read for each token; see `input_saliency`.
    """

    explained: Tensor
    rows: Tensor
    leaf: Leaf | int = "embeddings"
    read_at: ReadAt = "predictor"


class SaliencyCredit(TokenCredit):
    """A method whose weights of a row are a function of the saliency in that row.

    A subclass defines the saliency that it needs (`target`) and the map from scores to weights (`weights_from`). The
    training step decides whether the scores need a forward pass of their own, so a subclass must not define `__call__`.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "__call__" in vars(cls):
            raise TypeError(
                f"`{cls.__name__}.__call__` must not be defined, since a `SaliencyCredit` is not always called. Define "
                "`weights_from`, or derive the class from `TokenCredit`."
            )

    @abstractmethod
    def target(self, policy: Policy, batch: RolloutBatch) -> SaliencyTarget:
        """The saliency from which the weights of `batch` are computed."""

    @abstractmethod
    def weights_from(self, scores: Tensor, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of some rows from their saliency ``[B, T]``, which is zero on rows that `target` leaves out.

        The weights have no additive stage, and a row's weights depend on that row alone. Neither function may run the
        policy: sharded weights (FSDP2) are not whole here.
        """

    @property
    def fuses(self) -> bool:
        """True: see `TokenCredit`."""
        return True

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of a batch, from saliency in a forward pass of its own."""
        target = self.target(policy, batch)
        return self.weights_from(saliency_of_rows(policy, batch, target, context), policy, batch, context)


def input_saliency(
    policy: Policy,
    batch: RolloutBatch,
    objective_mask: Tensor,
    *,
    leaf: Leaf | int = "embeddings",
    read_at: ReadAt = "predictor",
    temperature: float = 1.0,
) -> Tensor:
    r"""Gradient times activation of the negative log-likelihood of the masked tokens.

    .. math:: \phi = -\sum_{t \in mask} \log\pi(y_t \mid x, y_{<t}), \qquad
              s_t = \lVert \partial\phi/\partial a \odot a \rVert_2

    The head runs on the masked positions alone. Parameters receive no gradient, and for a block leaf no graph is kept
    below that block. Gradients, training mode, hooks and the random state are unchanged afterwards, also if this
    raises.

    Args:
        policy: The policy whose log-probabilities are explained.
        batch: The rollouts. Columns after the last masked token cannot change the result; remove them to save time.
        objective_mask: ``[B, T]`` bool, the tokens whose likelihood is explained, within the response mask.
        leaf: "embeddings", or the output of a block: "first" (block 1), "middle" (n // 2), "last" (n − 1, the
            penultimate), or its number from 1 to n.
        read_at: The position that is read for token ``t``: "predictor" is ``t − 1``, which predicts it; "token" is
            ``t``.
        temperature: The number by which the logits are divided.

    Returns:
        ``[B, T]`` float32 (float64 for a float64 policy), zero outside the response mask.

    Source: GRAIL, arXiv 2606.04889, published trainer.
    """
    if (objective_mask & ~batch.response_mask).any():
        raise ValueError("`objective_mask` must lie within the response mask.")
    target = SaliencyTarget(explained=objective_mask, rows=objective_mask.any(1), leaf=leaf, read_at=read_at)
    check_options(target, read_at=ReadAt)
    with explaining(policy):
        layout = policy.layout(batch)
        return layout.read(_effects_alone(policy, layout, target, temperature), read_at)


def forward_with_saliency(
    policy: Policy,
    layout: TokenLayout,
    target: SaliencyTarget,
    *,
    temperature: float = 1.0,
    frozen: bool = False,
    in_place: bool = False,
) -> tuple[TokenStats, Callable[[], Tensor]]:
    """`Policy.token_stats`; and a function, to be called once, that returns the saliency of every row.

    Both are of one forward pass, whose graph is kept for the caller's backward pass. The layout must be made without
    `share_responses` if rows have common tokens. If `frozen`, the log-probabilities are computed without gradient, in
    evaluation mode. For `in_place`, see `HeadGradient`.
    """
    forward: list[Tensor] = []  # The decoder's output and the leaf.

    def decode(layout: TokenLayout) -> Tensor:
        with torch.enable_grad():
            # A compiled block computes the gradients of its weights in every backward pass, in the leaf's as well.
            forward.extend(_forward_from_leaf(policy, layout, target.leaf, cut_off=frozen, compiled=frozen))
        return forward[0]

    def mode() -> AbstractContextManager[None]:
        return explaining(policy, checkpointed=True) if frozen else nullcontext()

    with mode(), torch.set_grad_enabled(not frozen):
        stats = policy.token_stats(layout, temperature=temperature, in_place=in_place, decode=decode)

    def saliency() -> Tensor:
        # Checkpointed blocks run once more in here, which must be in the mode of the first time.
        with mode(), torch.enable_grad():
            effects = _effects(policy, layout, target, forward[0], forward[1], temperature, keep=not frozen)
            return layout.read(effects, target.read_at)

    return stats, saliency


def saliency_of_rows(policy: Policy, batch: RolloutBatch, target: SaliencyTarget, context: CreditContext) -> Tensor:
    """``[B, T]``: `input_saliency` of the target's rows in micro-batches, zero elsewhere."""
    # Tokens after the last explained one cannot change its likelihood.
    short = cut_responses(batch, last_marked(target.explained))
    explained = short.response_mask & target.explained
    scores = zero_table(policy, batch)
    with explaining(policy):
        rows = target.rows.nonzero().flatten()
        for micro in cut_rows(policy, short, rows, context.token_budget, share_responses=False):
            some = short.select(micro.rows)
            micro_target = replace(
                target, explained=explained[micro.rows.to(scores.device), : some.response_mask.shape[1]]
            )
            layout = policy.layout(some, micro.starts, share_responses=False)
            effects = _effects_alone(policy, layout, micro_target, context.temperature)
            scatter(scores, micro.rows, layout.read(effects, target.read_at))
    return scores


def picture_saliency(
    policy: Policy, batch: RolloutBatch, explained: Tensor, *, token_budget: int, temperature: float = 1.0
) -> list[list[float]]:
    """The saliency of each picture token of each row, in their order, for the tokens ``explained [B, T]``.

    It is that of the token's own embedding; see `input_saliency`. A row without an explained token has none.
    """
    by_row: list[list[float]] = [[] for _ in range(len(batch))]
    rows = explained.any(1)
    with explaining(policy):
        for micro in cut_rows(policy, batch, rows.nonzero().flatten(), token_budget, share=False):
            some = batch.select(micro.rows)
            micro_mask = explained[micro.rows.to(explained.device), : some.response_mask.shape[1]]
            target = SaliencyTarget(explained=micro_mask, rows=rows)
            layout = padded_layout(some.input_ids, some.attention_mask, some.response_mask)
            effects = _effects_alone(policy, layout, target, temperature)
            for row, ids, values in zip(micro.rows.tolist(), layout.ids, effects, strict=True):
                by_row[row] = values[ids >= FIRST_PICTURE_ID].tolist()
    return by_row


def block_number(leaf: Leaf | int, num_blocks: int) -> int:
    """The number of the block whose output is the leaf, counted from 1; 0 stands for the embeddings."""
    named = {"embeddings": 0, "first": 1, "middle": num_blocks // 2, "last": num_blocks - 1}
    number = named.get(leaf, -1) if isinstance(leaf, str) else leaf
    if not 0 <= number <= num_blocks or (number == 0 and leaf not in ("embeddings", 0)):
        raise ValueError(
            f"`leaf` must be embeddings, first, middle, last or a block number up to {num_blocks}, but got {leaf!r}."
        )
    return number


def _forward_from_leaf(
    policy: Policy, layout: TokenLayout, leaf: Leaf | int, *, cut_off: bool, compiled: bool
) -> tuple[Tensor, Tensor]:
    """The decoder's output ``[R, N, D]`` and the leaf ``[R, N, D]``. If `cut_off`, the graph starts at the leaf."""
    number = block_number(leaf, len(policy.blocks))
    _ = policy.compiled_blocks  # Its trial comes before the hook, which would catch the trial's activation.
    caught: list[Tensor] = []

    def catch(tensor: Tensor) -> Tensor:
        if caught:  # Models that loop over their blocks (Dory) call one again. The leaf is its first output.
            return tensor
        leaf = tensor.detach() if cut_off else tensor
        # With frozen weights below (adapters, for example) the tensor may need no gradient. The graph then starts here.
        caught.append(leaf if leaf.requires_grad else leaf.requires_grad_(True))
        return caught[0]

    def catch_output(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> object:
        return (catch(output[0]), *output[1:]) if isinstance(output, tuple) else catch(output)

    if number == 0 and policy.vision is not None:  # Pictures stand among the embeddings that the model is given.
        return policy.decode(layout, catch(policy.embed(layout.ids)), compiled=compiled), caught[0]
    module = policy.blocks[number - 1] if number else policy.model.get_input_embeddings()
    hook = module.register_forward_hook(catch_output)
    try:
        states = policy.decode(layout, compiled=compiled)
    finally:
        hook.remove()
    return states, caught[0]


def _effects(
    policy: Policy,
    layout: TokenLayout,
    target: SaliencyTarget,
    states: Tensor,
    activation: Tensor,
    temperature: float,
    keep: bool = False,
) -> Tensor:
    """``[R, N]``: gradient times activation at each token that was run. `keep` retains the graph."""
    explained = layout.from_rows(target.explained)
    logprobs = token_logprobs(
        states.flatten(0, 1)[layout.predictors[explained]],
        policy.head,
        layout.targets[explained],
        temperature=temperature,
        chunk_tokens=policy.chunk_tokens,
    )
    gradient: Tensor = torch.autograd.grad(-logprobs.sum(), activation, retain_graph=keep)[0]
    product = full_precision(gradient) * full_precision(activation.detach())
    effects: Tensor = torch.linalg.vector_norm(product, dim=-1)
    return effects


def _effects_alone(policy: Policy, layout: TokenLayout, target: SaliencyTarget, temperature: float) -> Tensor:
    """``[R, N]``: the effects in a forward pass of their own."""
    with torch.enable_grad():
        forward = _forward_from_leaf(policy, layout, target.leaf, cut_off=True, compiled=True)
        return _effects(policy, layout, target, *forward, temperature)


@contextmanager
def explaining(policy: Policy, *, checkpointed: bool = False) -> Iterator[None]:
    """Evaluation mode and frozen parameters inside the context; blocks that use checkpointing still do so.

    With `checkpointed` they do so even if they were in evaluation mode before.
    """
    modules = [m for m in policy.modules() if m.training or checkpointed]
    recomputed = [m for m in modules if getattr(m, "gradient_checkpointing", False)]
    trainable = [p for p in policy.parameters() if p.requires_grad]
    with preserved(policy.device), policy.evaluating(), requiring_grad(trainable, False):
        for module in recomputed:
            # Transformers recomputes a block only in training mode. Its children, dropout included, stay in evaluation.
            module.training = True
        yield
