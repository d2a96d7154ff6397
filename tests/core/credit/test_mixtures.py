"""Credit in batches of several tasks: a rollout has the weights that it has without the rollouts of other groups."""

import copy
from dataclasses import replace

import pytest
import torch

import grail_lightning.credit as credits
from grail_lightning import EnvironmentTask, MathTask, build_batch
from grail_lightning.core.credit.base import check_weights
from grail_lightning.core.rollout.batch import join
from grail_lightning.core.step.figures import Tally, add_episodes
from grail_lightning.credit import EGCA, GRAIL, CriticSearch, ExecutedMask, GiGPO, Judge, SpanScores, TurnRewards
from grail_lightning.worlds.code.python import Python
from grail_lightning.worlds.search.environment import Search
from tests.batches import rollouts
from tests.core.credit.groups import FLAWED, GROUP, LATE, OTHER, SOUND, groups
from tests.core.credit.rollouts import elsewhere
from tests.core.credit.test_contract import METHODS, PARTS, REFERENCE, Seen, given_by
from tests.gallery.test_egca import TASK as PROGRAMS
from tests.runs import TASK
from tests.tolerance import assert_near
from tests.turns import trained

PLAYED = EnvironmentTask(Python)
WITHOUT = MathTask(instruction="")
# What their definitions compare or scale over the batch of all ranks; the rest of their weights is the row's own.
POOLED = {
    "HighEntropy": "the threshold of the entropy",
    "UCAS": "the range of the logits, in the additive stage",
    "PRIME": "the step of the reward model, the largest return, mean and deviation",
    "CriticSearch-random": "the share of good labels",
}
# Rollouts of several turns are refused.
ONE_TURN = ["TreeAdvantage-numbers", "Resampled"]


@pytest.fixture(scope="module")
def policy(golden_policy):
    return copy.deepcopy(golden_policy).double()


@pytest.fixture(scope="module")
def parts(policy):
    """Groups of four: steps with labels; turns in an environment that scores them; programs; nothing but answers."""
    plain = groups(policy, GROUP, OTHER)
    turned = trained(policy)
    for row, episode in enumerate(turned.episodes):
        turns = tuple(replace(turn, score=(row + k) % 2) for k, turn in enumerate(episode.turns))
        turned.episodes[row] = replace(episode, turns=turns)
    # The third row is one turn of a task without an environment, the eighth one turn in an environment.
    tasks = [TASK] * 4 + [PLAYED] * 4
    turned = turned.replace(prompts=[replace(p, task=t) for p, t in zip(turned.prompts, tasks, strict=True)])
    asked = {"problem": "Write f.", "entry": "f", "tests": [[[2], 2], [[1], 1]], "reference": REFERENCE}
    texts = [f"```\ndef f(a):\n if a: return a{part}\n return 1\n```" for part in (*PARTS, "*3")]
    programs = _given(policy, PROGRAMS.prompt(asked), texts, [1.0, 0.0, 0.0, 0.0])
    other = WITHOUT.prompt({"problem": "Which?", "answer": ""})
    answers = _given(policy, other, ["\\boxed{1}", "so 7+5=2 \\boxed{2}", "7", "7+5=12"], [1.0, 0.0, 0.0, 1.0])
    found, row, group = {}, 0, 0
    for name, part in (("plain", plain), ("turned", turned), ("programs", programs), ("answers", answers)):
        found[name] = part.replace(
            row=part.row + row,
            group=part.group + group,
            rewards=part.rewards.double(),
            advantages=part.advantages.double(),
        )
        row, group = row + len(part), group + int(part.group.max()) + 1
    return found


def _given(policy, prompt, texts, rewards):
    ids = [[*policy.tokenizer(text)["input_ids"], policy.end_token_ids[0]] for text in texts]
    batch = build_batch(policy, [prompt], len(ids), ids, [True] * len(ids))
    return rollouts(batch, torch.tensor(rewards), group_size=len(ids), tokenizer=policy.tokenizer)


def _joined(parts):
    """All rows in one batch; turns first, then last."""
    names = [*parts]
    batch = parts[names[0]]
    for name in names[1:]:
        batch = join(batch, parts[name])
    return batch


def _method(name):
    made = METHODS[name]()
    return made.inner if isinstance(made, Seen) else made


def _each(parts, whole, found):
    """The weights of each part within those of the whole batch."""
    begun = 0
    for name, part in parts.items():
        rows = slice(begun, begun + len(part))
        width, begun = part.response_mask.shape[1], begun + len(part)
        yield name, rows, width
    assert begun == len(whole) == len(found.values)


@pytest.mark.parametrize("name", METHODS)
def test_a_rollout_has_the_weights_that_it_has_without_the_rollouts_of_other_tasks(name, policy, parts):
    """Turns, scores, labels, answers, programs and references of other rows do not matter."""
    some = {k: part for k, part in parts.items() if k != "turned" or name not in ONE_TURN}
    frozen, whole = elsewhere(policy), _joined(some)
    found = _method(name)(policy, whole, given_by(policy, frozen))
    check_weights(_method(name), found, whole)
    for part, rows, width in _each(some, whole, found):
        alone = _method(name)(policy, some[part], given_by(policy, frozen))
        assert torch.equal(found.fallback[rows], alone.fallback), part
        if name not in ("HighEntropy", "PRIME"):
            assert_near(found.values[rows, :width], alone.values, 1e4, torch.float32)
        if name not in POOLED:
            assert (found.additive is None) == (alone.additive is None)
            if alone.additive is not None:
                assert_near(found.additive[rows, :width], alone.additive, 1e4, torch.float32)
        if name == "HighEntropy":
            kept = (alone.scores >= found.metrics["entropy_threshold"]) & some[part].response_mask
            assert torch.equal(found.values[rows, :width] > 0, kept)
    if name in ("HighEntropy", "UCAS", "PRIME"):
        stage = "values" if name == "HighEntropy" else "additive"
        apart = [getattr(_method(name)(policy, p, given_by(policy, frozen)), stage) for p in some.values()]
        each = zip(_each(some, whole, found), apart, strict=True)
        assert any(not torch.allclose(getattr(found, stage)[rows, :width], own) for (_, rows, width), own in each), (
            "what is pooled shows"
        )


def test_token_rewards_of_prime_before_its_step_are_those_of_the_row(policy, parts):
    """Its advantages are scaled and whitened over the batch."""
    frozen, whole, method = elsewhere(policy), _joined(parts), credits.PRIME(accuracy=(0.0, 1.0))
    found = method(policy, whole, given_by(policy, frozen))
    for part, rows, width in _each(parts, whole, found):
        alone = method(policy, parts[part], given_by(policy, frozen))
        assert_near(found.scores[rows, :width], alone.scores, 1e4, torch.float32)
        assert alone.scores.any()


@pytest.mark.parametrize("control", [credits.AnswerOnly(), credits.Random(), credits.Shuffled()])
def test_a_control_changes_a_rollout_as_without_the_others(control, policy, parts):
    whole, told = _joined(parts), given_by(policy, elsewhere(policy))
    found = control(GRAIL(gate="all")(policy, whole, told), whole, told)
    for part, rows, width in _each(parts, whole, found):
        alone = control(GRAIL(gate="all")(policy, parts[part], told), parts[part], told)
        assert_near(found.values[rows, :width], alone.values, 1e4, torch.float32)


@pytest.mark.parametrize("control", [credits.Balanced(), credits.SameMagnitude()])
def test_a_control_that_scales_the_credit_of_a_batch_has_one_factor_for_all_tasks(control, policy, parts):
    """Balanced: one for right rollouts, and one for wrong ones."""
    whole, told = _joined(parts), given_by(policy, elsewhere(policy))
    before = GRAIL(gate="all")(policy, whole, told)
    after, mask = control(before, whole, told).values, whole.response_mask
    kinds = [whole.correct, ~whole.correct] if isinstance(control, credits.Balanced) else [whole.correct | True]
    for kind in kinds:
        factors = (after / before.values)[mask & kind[:, None]]
        assert_near(factors, factors[:1].expand_as(factors), 100, torch.float32)


def test_labelled_steps_are_spans_beside_rollouts_of_several_turns(policy, parts):
    labelled = groups(policy, ("7+5-3+8", [SOUND, FLAWED, LATE, SOUND]))
    both = join(parts["turned"], labelled.replace(group=labelled.group + 9, row=labelled.row + 99))
    weights = SpanScores()(policy, both, given_by(policy, None))
    assert not weights.fallback[8:].any()
    flaw = weights.values[9][: len(FLAWED)].tolist()
    assert max(flaw) == 2.0, "the slip is blamed"
    # In the environment a row without a scored turn has no steps in their place.
    silent = [replace(e, turns=tuple(replace(turn, score=None) for turn in e.turns)) for e in parts["turned"].episodes]
    weights = SpanScores()(policy, parts["turned"].replace(episodes=silent), given_by(policy, None))
    assert weights.fallback.tolist() == [True, True, False, *[True] * 5]


def test_scores_of_turns_are_those_of_rows_that_have_them(policy, parts):
    """A batch of plain prompts, which a mixture may draw, has rewards alone."""
    plain, told = parts["plain"], given_by(policy, None)
    mean = plain.rewards.reshape(2, 4).mean(1).repeat_interleave(4)
    found = TurnRewards()(policy, plain, told)
    assert_near(found.additive, (plain.rewards - mean)[:, None] * plain.response_mask, 64, torch.float32)
    found = CriticSearch()(policy, plain, told)
    assert torch.equal(found.values, plain.response_mask.to(found.values))
    assert not found.additive.any()
    expected, found = (GiGPO(scores=scores)(policy, plain, told) for scores in (False, True))
    assert torch.equal(found.additive, expected.additive)
    judged = SpanScores(judge=Judge(url="http://127.0.0.1:1", model="m", retries=0))
    assert judged(policy, plain, told).fallback.all()


@pytest.mark.parametrize("method", [EGCA(), EGCA(right="balanced"), ExecutedMask()])
def test_rollouts_that_are_no_programs_stay_uniform(method, policy, parts):
    plain = parts["plain"]
    found = method(policy, plain, given_by(policy, None))
    assert torch.equal(found.values, plain.response_mask.to(found.values))
    assert not found.fallback.any()


ONE = MathTask().prompt({"problem": "1+1", "answer": "2"})
SCORED, UNSCORED = (EnvironmentTask(kind).prompt({"problem": "1+1", "answer": "2"}) for kind in (Search, Python))
JUDGE = Judge(url="http://127.0.0.1:1", model="m")


@pytest.mark.parametrize(
    ("method", "otherwise"),
    [
        (TurnRewards(), "Rewards alone act."),
        (GiGPO(scores=True), "Rewards alone act."),
        (CriticSearch(), "Their rollouts keep their advantage."),
    ],
)
def test_a_set_without_scores_beside_one_with_scores_is_told_before_a_model_is_loaded(method, otherwise):
    said = method.check_prompts([[SCORED], [], [ONE]])
    assert said == (
        f"`{type(method).__name__}` reads the scores of the environment's method `score_turn`, but 1 of 2 training "
        f"sets lack it: that of `MathTask` has none. {otherwise}"
    )
    assert method.check_prompts([[SCORED], [SCORED]]) == ""


def test_spans_of_a_mixture_are_turns_and_steps():
    assert SpanScores().check_prompts([[SCORED], [ONE]]) == ""
    said = SpanScores().check_prompts([[UNSCORED], [ONE]])
    assert said.endswith("that of `EnvironmentTask` has none. Their rollouts are uniform.")
    with pytest.raises(ValueError, match="`SpanScores` needs an environment with the method `score_turn`, but that of"):
        SpanScores().check_prompts([[UNSCORED]])


@pytest.mark.parametrize("method", [CriticSearch(judge=JUDGE), SpanScores(judge=JUDGE)])
def test_a_judge_without_turns_to_label_is_named_before_a_model_is_loaded(method):
    assert method.check_prompts([[UNSCORED]]) == ""
    assert "1 of 2 training sets have none: `MathTask` is a task of one turn." in method.check_prompts(
        [[UNSCORED], [ONE]]
    )
    with pytest.raises(ValueError, match="asks its judge about turns in an environment, but got `MathTask`, a task of"):
        method.check_prompts([[ONE]])


@pytest.mark.parametrize("method", [credits.Resampled(), credits.TreeAdvantage(state="numbers")])
def test_a_set_with_an_environment_is_refused_before_a_model_is_loaded_by_what_needs_one_response(method):
    assert method.check_prompts([[ONE], []]) == ""
    with pytest.raises(ValueError, match=r"but got a training set whose task has an environment\. Set "):
        method.check_prompts([[ONE], [UNSCORED]])
    assert credits.TreeAdvantage().check_prompts([[ONE], [UNSCORED]]) == ""


def test_references_are_asked_of_programs_alone():
    row = {"problem": "", "entry": "f", "tests": [[[2], 2]], "reference": REFERENCE}
    lacking = PROGRAMS.prompt({name: value for name, value in row.items() if name != "reference"})
    with pytest.raises(ValueError, match=r"that of `reference`, which 1 of 1 rows do not have\. Add the column"):
        EGCA().check_prompts([[lacking], [ONE, ONE]])
    said = EGCA().check_prompts([[lacking, PROGRAMS.prompt(row)], [ONE]])
    assert "which 1 of 2 rows do not have" in said


def test_figures_of_episodes_count_rollouts_in_an_environment(parts):
    """Else a mixture with few of them warns that most rollouts call no tool."""

    def figures(batch):
        tally = Tally()
        add_episodes(tally, batch)
        return tally.compute()

    alone = figures(parts["turned"])
    assert alone["episodes/no_call"] == pytest.approx(1 / 4), "of the four rollouts whose task has tools"
    assert figures(join(parts["plain"], parts["turned"])) == alone
