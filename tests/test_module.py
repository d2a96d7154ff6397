"""The whole module under a real Trainer: Dr. GRPO to the bit, clocks, what is logged, and what stops a run."""

import math
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy

from grail_lightning import ArithmeticTask, Evaluation, HFEngine, Loading, RewardSpec, Sampling
from grail_lightning.core.credit.base import TokenWeights
from grail_lightning.core.distributed.gradients import Gradients
from grail_lightning.core.policy.layout import padded_layout
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.core.step.figures import GROUP_OF, GROUPS, tag
from grail_lightning.credit import GRAIL, PRIME, FrozenReference, Shuffled, TokenCredit, TrainedModel
from tests.runs import SAMPLING, Watch, batches, module, problems, trainer, weights
from tests.tolerance import near


def _grpo_by_hand(loader, updates, group_size=4, lr=1e-4):
    """Dr. GRPO with nothing but a policy, its sampler and torch; losses and final weights."""
    policy = load_policy("arithmetic").train()
    engine = HFEngine()
    engine.update_weights(policy)
    alone = SingleDeviceStrategy("cpu")
    gradients = Gradients(policy, alone)
    optimizer = gradients.make_optimizer(lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.0))
    losses, step = [], 0
    for prompts in loader:
        batch = engine.generate(prompts, group_size, SAMPLING, derive_seed(0, "train", step, 0, 0))
        right = [_last_box(text) == p.reference for text, p in zip(batch.texts, batch.prompts, strict=True)]
        rewards = torch.tensor(right, dtype=torch.float32).reshape(-1, group_size)
        advantages = (rewards - rewards.mean(1, keepdim=True)).reshape(-1)
        kept = ((advantages != 0) & batch.finished).nonzero().flatten()
        rows = batch.select(kept)
        old = None
        for _ in range(updates):
            layout = padded_layout(rows.input_ids, rows.attention_mask, rows.response_mask)
            lp = policy.token_stats(layout, in_place=gradients.in_place).logprobs
            old = lp.detach() if old is None else old
            ratio, a = (lp - old).exp(), advantages[kept][:, None]
            token_losses = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
            loss = token_losses.masked_fill(~rows.response_mask, 0).sum() / (
                batch.finished.sum().item() * SAMPLING.max_response_length
            )
            optimizer.zero_grad()
            with gradients.accumulating(last=True):  # The same sums in the same order.
                loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            step += 1
    return losses, {name: p.detach() for name, p in policy.named_parameters()}


def _last_box(text):
    return text.rpartition("\\boxed{")[2].partition("}")[0].strip() if "\\boxed{" in text else None


class Logged(CSVLogger):
    """Keeps the figures of every optimiser step, unrounded."""

    def __init__(self, folder):
        super().__init__(folder)
        self.figures, self.at = [], []

    def log_metrics(self, metrics, step=None):
        if "policy/loss" in metrics:
            self.figures.append(metrics)
            self.at.append(step)


@pytest.mark.parametrize(("updates", "number"), [(1, 2), (3, 1)])
def test_uniform_credit_is_grpo_written_by_hand_bit_for_bit(updates, number, tmp_path):
    loader = batches(number)
    expected_losses, expected = _grpo_by_hand(loader, updates)
    ours = module({"num_iterations": updates, "share_prefixes": False})
    logger = Logged(tmp_path)
    trainer(number * updates, logger=logger).fit(ours, loader)
    assert [figures["policy/loss"] for figures in logger.figures] == expected_losses
    assert all(torch.equal(p, expected[name]) for name, p in ours.policy.named_parameters())
    assert len(set(expected_losses)) > 1
    assert not ours.services.opened("fit")


def test_a_run_is_reproduced_bit_for_bit_and_neither_a_control_nor_its_weights_change_what_is_drawn_first(monkeypatch):
    runs = []
    for seed, control in (("0", None), ("0", None), ("1", None), ("0", Shuffled())):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        ours, watch = module(credit=GRAIL(), control=control), Watch()
        trainer(1, watch).fit(ours, batches(1, size=2))
        runs.append((weights(ours), watch.outputs[0].batch.texts))
    (first, texts), (again, _), (other, _), (shuffled, drawn) = runs
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert any(not torch.equal(first[name], shuffled[name]) for name in first)
    assert drawn == texts


def test_a_run_stops_at_max_steps_inside_a_batch_and_schedules_and_logs_count_optimiser_steps(tmp_path):
    watch, logger = Watch(), Logged(tmp_path)
    ours = module(
        {"num_iterations": 2, "mini_batches": 2},
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    )
    run = trainer(6, watch, logger=logger)
    run.fit(ours, batches(5))
    assert run.global_step == 6
    assert watch.steps == [4, 6]
    assert logger.at == [1, 2, 3, 4, 5, 6]
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-4 / 7)


def test_a_dead_run_ends_and_moves_nothing():
    """Rollouts that all earn the same have no advantage, so that no row is live: each batch is one skipped step."""
    ours = module({"num_iterations": 4}, sampling=Sampling(max_response_length=48))
    watch, begun, nothing = Watch(), {}, RewardSpec(function="correctness", weight=0)
    watch.on_train_start = lambda trainer, pl_module: begun.update(weights(pl_module))
    unpaid = ArithmeticTask(rewards=[nothing])
    data = [[replace(prompt, task=unpaid) for prompt in problems(1, seed=seed)] for seed in range(3)]
    trainer(2, watch).fit(ours, torch.utils.data.DataLoader(data, batch_size=None))
    assert watch.steps == [1, 2]
    assert all(torch.equal(begun[name], p) for name, p in ours.policy.named_parameters())
    assert all(math.isfinite(v) for v in watch.outputs[-1].metrics.values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0}, "but got `sampling.temperature` 0, with which each token is the most likely one. Set"),
        ({"top_k": 1}, "but got `sampling.top_k` 1, with"),
    ],
)
def test_greedy_training_is_refused_before_a_model_is_loaded_and_greedy_evaluation_runs(options, said):
    greedy = Sampling(max_response_length=4, **options)
    ours = module(sampling=greedy)
    with pytest.raises(ValueError, match=said):
        trainer(1).fit(ours, batches(1))
    assert ours.policy is None
    data = torch.utils.data.DataLoader([problems(1)], batch_size=None)
    trainer(1).validate(ours, data, verbose=False)
    trainer(1).predict(ours, data)
    trainer(1, Evaluation(sampling=greedy)).fit(module(sampling=SAMPLING), batches(1), data)


def test_the_reference_is_loaded_once_for_a_fit_alone_and_neither_trained_nor_saved(tmp_path):
    ours, watch = module({"kl_coefficient": 0.1}), Watch()
    trainer(1).validate(ours, torch.utils.data.DataLoader([problems(1)], batch_size=None), verbose=False)
    assert not ours.services.opened("fit")
    run = trainer(2, watch)
    run.fit(ours, batches(2))
    assert watch.outputs[0].metrics["kl"] == near(0, 16, torch.float32, scale=1.0)
    assert watch.outputs[-1].metrics["kl"] > 1e-5
    given = {id(p) for group in run.optimizers[0].param_groups for p in group["params"]}
    assert given == {id(p) for p in ours.policy.parameters()}
    kept = ours.services.opened("fit")[FrozenReference]
    assert not any(p.requires_grad for p in kept.policy.parameters())
    run.save_checkpoint(tmp_path / "some.ckpt")
    saved = torch.load(tmp_path / "some.ckpt", weights_only=False)["state_dict"]
    assert not [name for name in saved if "reference" in name]
    trainer(1).fit(ours, batches(1, size=1))
    assert ours.services.opened("fit")[FrozenReference] is kept


class Third(TokenCredit):
    """Reports a figure that half precision would round."""

    def __call__(self, policy, batch, context):
        return TokenWeights(values=batch.response_mask.float(), metrics={"third": 1 / 3})


def test_half_precision_of_the_trainer_is_that_of_loading_and_rounds_neither_figures_nor_rotary_frequencies():
    """Rounded frequencies turn by other angles: a reference beside an unrounded policy would differ from the start."""
    first = []
    for precision, dtype, credit in (("bf16-true", "float32", Third()), ("32-true", "bfloat16", PRIME())):
        watch, ours = Watch(), module({"kl_coefficient": 0.1}, loading=Loading(dtype=dtype), credit=credit)
        trainer(1, watch, precision=precision).fit(ours, batches(1, size=2))
        opened = ours.services.opened("fit")
        for policy in (ours.policy, *(service.policy for service in opened.values())):
            assert policy.model.dtype == torch.bfloat16
            assert {buffer.dtype for buffer in policy.buffers()} == {torch.float32}
        (output,) = watch.outputs
        assert output.batch.rewards.dtype == torch.float64
        assert output.batch.advantages.dtype == torch.float32
        assert output.metrics["kl"] == 0
        first.append(output)
    assert first[0].metrics["credit/third"] == 1 / 3, "the plugin changes torch's default dtype"
    assert opened.keys() == {FrozenReference, TrainedModel}
    one, other = (output.batch for output in first)
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.sampling_logprobs, other.sampling_logprobs)


def test_a_policy_that_does_not_move_is_told():
    class Still(torch.optim.SGD):
        def step(self, closure=None):
            return closure() if closure else None

    ours = module(optimizer=lambda p: Still(p, lr=1e-3))
    with pytest.warns(UserWarning, match="No parameter moved in a step with gradient norm"):
        trainer(1).fit(ours, batches(1, size=2))


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_step():
    class Huge(TokenCredit):
        def __call__(self, policy, batch, context):
            values = batch.response_mask * (1.0 if context.step < 1 else torch.finfo(torch.float32).max)
            return TokenWeights(values=values)

    watch, seen = Watch(), []
    watch.on_train_batch_end = lambda trainer, pl_module, *rest: seen.append(weights(pl_module))
    ours = module(credit=Huge())
    with pytest.raises(ValueError, match=r"`grad_norm` must be finite, but got (nan|inf) at learning rate 0.0001"):
        trainer(2, watch).fit(ours, batches(2))
    (after_one,) = seen
    assert all(torch.equal(p, after_one[name]) for name, p in ours.policy.named_parameters())
    assert all(p.isfinite().all() for p in ours.policy.parameters())


def test_a_step_without_a_row_logs_no_other_steps_figures(tmp_path):
    """One group in three mini-batches: two of them are empty."""
    logger = Logged(tmp_path)
    ours = module({"mini_batches": 3, "group_size": 16, "max_grad_norm": None})
    trainer(3, logger=logger).fit(ours, batches(1, size=1))
    full, *empty = logger.figures
    assert full["policy/entropy"] > 0
    assert full["policy/grad_norm"] > 0
    assert empty[0] == {"policy/loss": 0.0, "policy/grad_norm": 0.0, "policy/learning_rate": 1e-4}
    assert empty[1].items() >= empty[0].items()
    assert not {"policy/entropy", "policy/clip_ratio/region_mean"} & empty[1].keys()


def test_weights_are_refreshed_before_every_optimiser_step_and_predicted_at_the_step_of_those_in_memory():
    steps = []

    class Steps(TokenCredit):
        refresh = "step"

        def __call__(self, policy, batch, context):
            steps.append(context.step)
            return TokenWeights(values=batch.response_mask.float())

    ours = module({"num_iterations": 2}, credit=Steps())
    loader, run = torch.utils.data.DataLoader([problems(1)], batch_size=None), trainer(4)
    run.fit(ours, batches(2, size=2))
    run.predict(ours, loader)
    trainer(1).predict(ours, loader)
    assert steps == [0, 1, 2, 3, 4, 4]


def test_figures_have_the_names_that_users_know_and_a_group_of_their_own_choice():
    watch = Watch()
    objective = {"kl_coefficient": 0.1, "entropy_coefficient": 0.1, "num_iterations": 2}
    trainer(2, watch).fit(module(objective, credit=GRAIL()), batches(1, size=8))
    (output,) = watch.outputs
    names = {"reward", "reward_std", "frac_reward_zero_std", "accuracy", "entropy", "loss", "grad_norm", "kl"}
    names |= {"learning_rate", "completions/clipped_ratio", "credit/fork_auroc_slip", "time/sample", "time/credit"}
    names |= {f"clip_ratio/{k}" for k in ("low_mean", "high_mean", "region_mean")}
    names |= {f"credit/{k}" for k in ("weight_mean", "weight_std", "span_missing", "ess_ratio", "top10_mass")}
    assert output.metrics.keys() >= names | {"sampling/sampling_logp_difference/mean"}
    lengths = output.batch.response_mask.sum(1).float()
    for figure, expected in (("mean", lengths.mean()), ("min", lengths.min()), ("max", lengths.max())):
        assert output.metrics[f"completions/{figure}_length"] == pytest.approx(expected.item())
    assert output.metrics["reward"] == pytest.approx(output.batch.correct.float().mean().item())
    assert output.metrics["reward_std"] == pytest.approx(output.batch.rewards.std().item())
    assert not [name for name in output.metrics if name.partition("/")[0] not in (*GROUP_OF, *GROUPS)]


def test_a_figure_keeps_its_name_as_the_last_part_of_its_tag():
    tags = {"clip_ratio/region_mean": "policy", "time/sample": "speed", "of_a_users_module": "train", "credit": "train"}
    for figure, group in tags.items():
        assert tag(figure) == f"{group}/{figure}" == tag(f"{group}/{figure}")
    assert tag("val/accuracy") == "val/accuracy"
