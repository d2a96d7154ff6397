r"""One training step. The files are listed about in the order in which a step needs them.

==================  ================================================================================================
`execution`         The options that say how a training step is run; `core.objective` has what is optimised.
`sampler`           Prompts → sampled, graded rollouts.
`collect`           The rollouts of a batch: on policy, where groups that are all right or all wrong may be replaced, or
                    sampled while the batch before trained (`Ahead`).
`assign`            Rewards → advantages of rollouts ``[B]``; the credit method → token weights.
                    `credit.base.token_advantages` makes advantages of tokens of both.
`forward`           Micro-batch → log-probabilities: of the policy, or of the reference.
`loss`              The tokens in the loss, the counts by which it is divided, and its summand for each micro-batch.
`update`            The optimiser steps of a batch: for each micro-batch one forward pass, one loss, one backward pass.
`optimizer`         Clips the gradients, whose norm must be finite, and takes the step; options after a resume.
`figures`           Figures of rollouts, credit and loss, over all ranks; and what callbacks receive.
==================  ================================================================================================

A *training step* is all that happens with one batch of rollouts. An *optimiser step*, or *step* alone, is one change
of the weights. The *update* is all optimiser steps of a batch; an *iteration* of it goes over all rollouts once. A
*pass* is a forward or backward pass of one micro-batch. `reference/glossary.md` has these words and others.

Two files are not loaded for plain GRPO, and its reader can leave them out: `fused` (saliency from the update's own
passes, as GRAIL has it by default) and `episodes` (rollouts of several turns). The prefix trees of `policy.trees`
(`execution.share_prefixes`, on by default) lower the number of tokens of a pass, and change no result. Such a reader
needs no `Companion`, `Service` or control, and no additive stage: plain GRPO's token weights are 1. What objective,
estimator and credit method use beside the policy and the rollouts, such as the frozen reference, are services: the
module opens those that they list (`credit.service`), and hands them on in the context of credit.

The calls of one training step. The loop over optimiser steps is in the module, since it calls Lightning's optimisers::

    GrailModule.training_step
    ├── collect.collect                               prompts → GradedBatch
    │   ├── sampler.Sampler, collect.refill           on policy: weights to the engine, sample, grade; or
    │   └── collect.Ahead                             one batch off-policy
    ├── assign.compute_advantages                     → RolloutBatch
    ├── assign.scored_rows                           → the rows that have a reward; from here on there are no others
    ├── assign.assign_credit                          → Forward of the update, which fused saliency changes, and the
    │   │                                             token weights, which **become known here**, but for fused
    │   │                                             saliency (below)
    │   └── assign.weigh_batch                        the credit method, with the services that it lists
    ├── update.Update                                 splits the rows over the optimiser steps
    ├── Update.compute_before_steps                   old log-probabilities of rows of later steps; with a KL term, also
    │                                                 log-probabilities under the reference
    ├── GrailModule.take_steps                        for each optimiser step:
    │   ├── Update.set_token_weights                  from the second step on, if credit is refreshed
    │   ├── Update.accumulate                         for each micro-batch: forward, loss, backward
    │   └── optimizer.take_step
    └── figures.batch_figures

A batch in which no rank has a live row, one that can contribute a gradient, takes exactly one step, without rows,
whatever number is configured. Ranks reduce the denominators of the loss, whether any row is live, the number of
micro-batches, figures and gradients; beyond these a rank's loss depends on no other rank, unless the estimator of the
advantage or the credit method says so. A rollout is trained on by the rank that sampled it.

With *fused saliency* (GRAIL's default; `fused.method_to_fuse` lists the exceptions) the weights of a row become known
later: the first pass of the row returns them beside its log-probabilities, in `Update.compute_before_steps` or in
`Update.accumulate`, which then computes the loss with them. The weights of all other rows are known before: of those
that need no saliency, such as rows outside GRAIL's gate, and of those that the update does not run, such as truncated
ones that the objective leaves out, whose saliency has a pass of its own. Either way saliency is that of the policy
before the update: a row has its first pass in the first optimiser step, or before it. With sharded weights (FSDP2), and
only then, ranks also have equally many passes with saliency.

An example in numbers: one prompt, ``Compute 2+3.``, has two rollouts, ``\boxed{5}<end>`` and ``\boxed{6}<end>``. Each
has four tokens (``\boxed{``, the digit, ``}`` and the end token). The first one is right.

>>> import torch
>>> from grail_lightning.core.credit.base import TokenWeights
>>> from grail_lightning.core.functional.advantages import group_advantages
>>> from grail_lightning.core.functional.tokens import TokenStats
>>> from grail_lightning.core.credit.base import token_advantages
>>> from grail_lightning.core.objective import DrGRPO
>>> from grail_lightning.core.step.loss import LossInputs, micro_batch_loss
>>> rewards = torch.tensor([1.0, 0.0])
>>> advantages = group_advantages(rewards, group_size=2)  # rewards minus the group's mean
>>> advantages
tensor([ 0.5000, -0.5000])

An invented credit method gave the digit of the wrong answer three times the weight of its other tokens, and left the
right rollout at weight 1.

>>> values = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 3.0, 1.0, 1.0]])
>>> weights = TokenWeights(values=values)
>>> of_tokens = token_advantages(advantages, weights)
>>> of_tokens
tensor([[ 0.5000,  0.5000,  0.5000,  0.5000],
        [-0.5000, -1.5000, -0.5000, -0.5000]])

In the first optimiser step the old log-probabilities equal the present ones, so every ratio is 1 and the loss of a
token is minus its advantage. The sum is -(4 · 0.5 - 1.5 - 3 · 0.5) = 1. Dr. GRPO divides it by the number of rollouts
times the limit of 10 tokens, which gives 1 / 20.

>>> logprobs = torch.full((2, 4), 0.25).log().requires_grad_()
>>> loss, _ = micro_batch_loss(
...     LossInputs(
...         stats=TokenStats(logprobs, entropy=torch.zeros(2, 4)),
...         old_logprobs=logprobs.detach(),
...         token_advantages=of_tokens,
...         mask=torch.ones(2, 4, dtype=torch.bool),
...     ),
...     DrGRPO(),
...     {"num_rollouts": 2, "num_tokens": 8, "max_response_length": 10},
... )
>>> loss.detach()
tensor(0.0500)

The gradient makes each token of the right answer more likely. It makes the tokens of the wrong answer less likely, and
the wrong digit three times as much as the others.

>>> loss.backward()
>>> logprobs.grad * 20
tensor([[-0.5000, -0.5000, -0.5000, -0.5000],
        [ 0.5000,  1.5000,  0.5000,  0.5000]])
"""
