"""Loss and gradients beside TRL's own GRPOTrainer, on the same tensors; TRL's code runs, no formula is copied.

Ours goes through `Update` (micro-batches, denominators, live rows), TRL's through `_compute_loss` of a trainer built
from a real `GRPOConfig`. Where the definitions differ, and which case shows it:

- Truncated rollouts. With `mask_truncated` we leave them out of numerator and denominator. TRL leaves them out of the
  numerator alone: `grpo` and `dr_grpo` still count them in their number; `dapo` counts tokens and agrees.
- Level "sequence". Ours is GSPO-token: each token keeps its own gradient. With one advantage a row that is TRL's
  gradient; with token weights TRL's ratio spreads each token's advantage over the row, and its KL likewise.
- CISPO. TRL bounds the ratio above by `epsilon_high` itself and not below: ours with ``1 + clip_high`` and
  ``clip_low = 1``.
- Micro-batches. TRL averages `grpo` and `dr_grpo` over micro-batches of equal numbers of rows, ours divides by what the
  whole step has, whatever the cut.
- A row of advantage 0 takes no part in our passes; in TRL's it adds zeros. Our clip ratios and entropies are therefore
  means over the tokens of the other rows.
"""

import warnings
from dataclasses import dataclass

import pytest
import torch

from grail_lightning import CISPO, DAPO, GRPO, DrGRPO, GSPOToken, RolloutBatch, Sampling
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.micro_batch import MicroBatch
from grail_lightning.core.step.loss import loss_mask
from grail_lightning.functional import group_advantages
from tests.batches import rollouts
from tests.runs import problems, sampled
from tests.steps import backward, update_of
from tests.tolerance import assert_near, near, roundings

with warnings.catch_warnings():
    # Of the peer and its dependencies while they are imported; nothing of ours.
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", minversion="1.16")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

# TRL uses names that Transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")

LIMIT, GROUP, ROWS = 36, 4, 24
FLOAT32 = roundings(2000, torch.float32)  # Of a share.
HOW = ["grpo", "dr_grpo", "dapo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored(RolloutBatch):
    """Rollouts with log-probabilities ``[B, T]`` under the weights that sampled, and under a reference."""

    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None


@pytest.fixture(scope="module")
def policy():
    return load_policy("arithmetic").train()


@pytest.fixture(scope="module")
def reference():
    made = load_policy("arithmetic", trainable=False)
    for number, p in enumerate(made.parameters()):
        p.data *= 1 + 0.03 * (-1) ** number
    return made


@pytest.fixture(scope="module")
def batch(policy):
    """24 rollouts of uneven length, some truncated; one group dead; old log-probabilities that clip at both ends."""
    made = sampled(policy, problems(ROWS // GROUP), GROUP, Sampling(max_response_length=LIMIT), seed=1)
    random = torch.Generator().manual_seed(0)
    rewards = torch.randint(2, (ROWS,), generator=random).float()
    rewards[GROUP : 2 * GROUP] = 1.0
    with torch.no_grad():
        logprobs = policy(policy.layout(made))
    noise = 0.4 * torch.randn(logprobs.shape, generator=random)
    assert 0 < (~made.finished).sum() < ROWS
    ready = rollouts(made, rewards, group_size=GROUP)
    return Scored(**ready.fields(), old_logprobs=(logprobs + noise).masked_fill(~made.response_mask, 0))


@pytest.fixture
def peer(tmp_path):
    """Builds TRL's trainer on a policy of its own; options are those of `GRPOConfig`."""

    def build(rollout=None, reward=None, **options):
        mine = load_policy("arithmetic").train()
        usual = {"per_device_train_batch_size": ROWS, "epsilon": 0.2, "epsilon_high": 0.28, "scale_rewards": "none"}
        config = GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            num_generations=GROUP, max_completion_length=LIMIT, **(usual | options),
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=mine.model,
            reward_funcs=reward or (lambda completions, **_: [0.0] * len(completions)),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": p.messages} for p in problems(ROWS // GROUP)]),
            processing_class=mine.tokenizer,
            rollout_func=rollout,
        )
        trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
        trainer.model.train()
        return trainer

    return build


def _inputs(batch, advantages=None, truncated_out=False):
    """A batch under TRL's names."""
    kept = batch.finished | (not truncated_out)
    mask = (batch.response_mask & kept[:, None]).long()
    width = batch.prompt_width
    made = {
        "prompt_ids": batch.input_ids[:, :width],
        "prompt_mask": batch.attention_mask[:, :width].long(),
        "completion_ids": batch.response_ids,
        "completion_mask": mask,
        "advantages": batch.advantages if advantages is None else advantages,
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": batch.old_logprobs,
        "ref_per_token_logps": batch.ref_logprobs,
    }
    return {name: value for name, value in made.items() if value is not None}


def _theirs(trainer, *inputs):
    """Summed loss and gradients of micro-batches."""
    trainer.model.zero_grad(set_to_none=True)
    total = 0.0
    for part in inputs:
        loss = trainer._compute_loss(trainer.model, part)
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def _ours(policy, batch, weights=None, reference=None, temperature=1.0, **options):
    policy.zero_grad(set_to_none=True)
    options = {"mask_truncated": False, "group_size": GROUP, "limit": LIMIT, "temperature": temperature} | options
    update = update_of(policy, batch, weights, reference, **options)
    assert len(update.steps) == 1
    if batch.old_logprobs is not None:
        update.old_logprobs.record(MicroBatch(rows=torch.arange(len(batch))), batch.old_logprobs)
    metrics = update.accumulate(0, backward).figures()
    return metrics, {n.removeprefix("model."): p.grad.clone() for n, p in policy.named_parameters()}


def _gap(ours, theirs, factor=1.0):
    """The largest difference as a share of the largest entry of the whole gradient."""
    assert ours.keys() == theirs.keys()
    scale = max(g.abs().max().item() for g in theirs.values()) * factor
    assert scale > 1e-6
    return max((ours[name] - factor * theirs[name]).abs().max().item() for name in ours) / scale


def _assert_equal(ours, theirs, scale=0.0):
    """Loss and gradients; returns our figures."""
    (metrics, gradients), (loss, expected) = ours, theirs
    assert metrics["loss"] == near(loss, 1000, torch.float32, scale=scale)
    assert _gap(gradients, expected) <= FLOAT32
    return metrics


WEIGHTED = "token weights are advantages of each token"
NARROW = {"epsilon": 0.03, "epsilon_high": 0.05}  # So that row means of the log-ratio leave the range, too.
NAMED = {  # TRL's options of each algorithm; its `epsilon_high` of CISPO is the bound itself.
    GRPO: {"loss_type": "grpo", "scale_rewards": "group", "epsilon_high": 0.2},
    DrGRPO: {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon_high": 0.2},
    DAPO: {"loss_type": "dapo", "scale_rewards": "group", "epsilon_high": 0.28, "mask_truncated_completions": True},
    CISPO: {"loss_type": "cispo", "scale_rewards": "group", "epsilon_high": 5.0},
    GSPOToken: {"loss_type": "grpo", "scale_rewards": "group", "importance_sampling_level": "sequence"}
    | {"epsilon": 3e-4, "epsilon_high": 4e-4},
}
CASES = {  # The aggregation, TRL's options, ours.
    **{f"clips at both ends and both signs, {how}": (how, {}, {}) for how in HOW},
    WEIGHTED: ("grpo", {}, {}),
    "the cap on the ratio is delta": ("dr_grpo", {"delta": 1.5}, {"ratio_cap": 1.5}),
    "cispo with the bounds of TRL": (
        "dapo",
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.3},
    ),
    **{
        f"the sequence ratio, one advantage a row, {how}": (
            how,
            {"importance_sampling_level": "sequence"} | NARROW,
            {"level": "sequence", "clip_low": 0.03, "clip_high": 0.05},
        )
        for how in ("grpo", "dapo")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_trl_whatever_the_cut(case, policy, batch, peer):
    how, options, mine = CASES[case]
    weights = None
    if case == WEIGHTED:
        weights = torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(1)) + 0.5
    trainer = peer(**{"loss_type": how} | options)
    theirs = _theirs(trainer, _inputs(batch, None if weights is None else batch.advantages[:, None] * weights))
    metrics = _assert_equal(_ours(policy, batch, weights, aggregation=how, token_budget=200, **mine), theirs)
    assert metrics["clip_ratio/region_mean"] > 0.02  # What a case is about is at work.
    if mine:
        assert _ours(policy, batch, aggregation=how)[0]["loss"] != near(theirs[0], 1000, torch.float32)
        return
    # Neither bound, and neither sign, is idle in this batch; TRL counts the same tokens as clipped.
    assert min(metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]) > 0.02
    live = batch.response_mask[batch.advantages != 0].sum() / batch.response_mask.sum()
    for name in ("low_mean", "high_mean", "region_mean"):
        counted = trainer._metrics["train"][f"clip_ratio/{name}"][0]
        assert metrics[f"clip_ratio/{name}"] * live.item() == near(counted, 1000, torch.float32)


@pytest.mark.parametrize("how", HOW)
def test_two_even_micro_batches_of_trl_and_its_truncated_rollouts_beside_ours(how, policy, batch, peer):
    trainer = peer(loss_type=how, per_device_train_batch_size=ROWS // 2, gradient_accumulation_steps=2)
    halves = slice(ROWS // 2), slice(ROWS // 2, ROWS)
    parts = [{k: v[rows] if v.ndim else v for k, v in _inputs(batch).items()} for rows in halves]
    _assert_equal(_ours(policy, batch, aggregation=how, token_budget=100), _theirs(trainer, *parts))
    # Truncated rollouts leave our denominators, but not all of TRL's.
    _, theirs = _theirs(peer(loss_type=how), _inputs(batch, truncated_out=True))
    _, ours = _ours(policy, batch, aggregation=how, mask_truncated=True)
    assert _gap(ours, theirs, factor=1.0 if how == "dapo" else ROWS / int(batch.finished.sum())) <= FLOAT32


@pytest.mark.parametrize(("how", "corrected"), [("grpo", True), ("dr_grpo", False), ("dapo", True)])
def test_the_kl_term_k3_equals_trl_with_and_without_the_ratio(how, corrected, policy, reference, batch, peer):
    with torch.no_grad():
        found = reference(reference.layout(batch))
    trainer = peer(loss_type=how, use_bias_correction_kl=corrected)
    trainer.beta = 0.3  # Not in the config: it would load a second model by name. The log-probabilities are given.
    options = {"aggregation": how, "kl_coefficient": 0.3, "kl_corrected": corrected}
    theirs = _theirs(trainer, _inputs(batch.replace(ref_logprobs=found)))
    metrics = _assert_equal(_ours(policy, batch, reference=reference, **options), theirs)
    if not corrected:  # TRL logs the corrected estimate; we log the estimate itself, always.
        assert metrics["kl"] == near(trainer._metrics["train"]["kl"][0], 1000, torch.float32)


def test_with_token_weights_the_sequence_ratio_keeps_each_tokens_own_gradient(policy, batch, peer):
    weights = torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(1)) + 0.5
    wide = {"epsilon": 0.99, "epsilon_high": 99.0}
    trainer = peer(loss_type="dapo", importance_sampling_level="sequence", **wide)
    loss, theirs = _theirs(trainer, _inputs(batch, batch.advantages[:, None] * weights))
    how = {"aggregation": "dapo", "level": "sequence", "clip_low": 0.99, "clip_high": 99.0}
    metrics, ours = _ours(policy, batch, weights, **how)
    assert metrics["loss"] == near(loss, 1000, torch.float32)  # One value,
    with pytest.raises(AssertionError):  # two gradients.
        assert _gap(ours, theirs) <= 1e-2
    # TRL's is that of the row's mean weight at every token.
    mean = (weights * batch.response_mask).sum(1) / batch.response_mask.sum(1)
    _, flat = _ours(policy, batch, mean[:, None].expand_as(weights), **how)
    assert _gap(flat, theirs) <= FLOAT32


def test_logprobs_entropies_and_a_first_step_at_a_temperature_equal_trls_own(policy, batch, peer):
    trainer, columns = peer(temperature=0.6), batch.response_mask.shape[1]
    with torch.no_grad():
        logprobs, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, batch.input_ids, batch.attention_mask.long(), columns, compute_entropy=True
        )
        ours = policy.token_stats(policy.layout(batch), temperature=0.6)
    assert ours.logprobs.min() < -1
    assert_near(ours.logprobs, logprobs, 400, torch.float32)
    assert_near(ours.entropy, entropies, 400, torch.float32)
    fresh = batch.replace(old_logprobs=None)  # The ratio is 1.
    found = _ours(policy, fresh, aggregation="dapo", temperature=0.6)
    _assert_equal(found, _theirs(trainer, _inputs(fresh)), scale=0.01)


def _scored_by(trainer, batch):
    """What TRL makes of the responses of a batch: masks, advantages."""
    return trainer._generate_and_score_completions([{"prompt": p.messages} for p in batch.prompts])


def _handing_over(batch):
    """Options of `peer` with which TRL takes the responses and rewards of a batch for its own."""
    begun = batch.input_ids[:, : batch.prompt_width], batch.attention_mask[:, : batch.prompt_width]
    prompts = [row[m].tolist() for row, m in zip(*begun, strict=True)]
    responses = [row[m].tolist() for row, m in zip(batch.response_ids, batch.response_mask, strict=True)]
    return {
        "rollout": lambda prompts_, _: {"prompt_ids": prompts, "completion_ids": responses, "logprobs": None},
        "reward": lambda completions, **_: batch.rewards.tolist(),
    }


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
@pytest.mark.parametrize("kind", NAMED, ids=lambda kind: kind.__name__)
def test_each_named_algorithm_makes_trls_step_from_responses_and_rewards_on(kind, policy, batch, peer):
    """Nothing of ours is changed: the class has the clips, the aggregation, the advantage and what is left out."""
    far = batch.sampling_logprobs + 4 * (batch.old_logprobs - batch.sampling_logprobs)  # Beyond the bound of CISPO.
    old = (far if kind is CISPO else batch.old_logprobs).masked_fill(~batch.response_mask, 0)
    trainer = peer(**_handing_over(batch), **NAMED[kind])
    theirs = _scored_by(trainer, batch) | {"old_per_token_logps": old}
    objective = kind()
    advantages = objective.advantage()(batch, GROUP, None)  # It asks for nothing beside the rewards.
    assert_near(theirs["advantages"], advantages, 100, torch.float32)
    assert theirs["completion_mask"].sum() == loss_mask(batch, objective).sum()
    rows = batch.replace(advantages=advantages, old_logprobs=old)
    options = {"mask_truncated": objective.mask_truncated, "algorithm": kind, "token_budget": 200}
    _assert_equal(_ours(policy, rows, **options), _theirs(trainer, theirs), scale=0.1)
    wide = _ours(policy, rows, **options, clip_low=1.0, clip_high=1e6)[0]
    assert wide["loss"] != near(_ours(policy, rows, **options)[0]["loss"], 1000, torch.float32)  # Its clip acts.


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_from_responses_and_rewards_on_trl_makes_the_same_step(scale, policy, batch, peer):
    """TRL pads, masks and scores the rollouts itself; we hand over ids and rewards alone."""
    trainer = peer(**_handing_over(batch), scale_rewards=scale, loss_type="dr_grpo")
    made = _scored_by(trainer, batch)
    std = batch.rewards.std() if scale == "batch" else None
    advantages = group_advantages(batch.rewards, GROUP, scale, std)
    assert_near(made["advantages"], advantages, 100, torch.float32)
    ours = _ours(policy, batch.replace(advantages=advantages, old_logprobs=None), aggregation="dr_grpo")
    _assert_equal(ours, _theirs(trainer, made), scale=0.01)
