"""SDPG's loss: the KL to the policy with the answer in its prompt, in gradients, in a run and in its options."""

import pytest
import torch

from grail_lightning import SDPG, ArithmeticTask, Loading, Prompt, Sampling
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.micro_batch import MIN_COMMON_TOKENS
from grail_lightning.core.rollout.batch import AnswerMasks
from grail_lightning.credit import GRAIL, RLSD, Uniform
from grail_lightning.gallery.distillation import SENTENCE, with_shown_answers
from tests import batches as ready
from tests.architectures import tiny
from tests.runs import sampled, uneven
from tests.steps import backward, largest_gap, token_weights, update_of, whole_logs
from tests.tolerance import roundings

LIMIT = 36


@pytest.fixture(scope="module")
def policy():
    return load_policy("arithmetic", Loading(chunk_tokens=50)).double().train()


@pytest.fixture(scope="module")
def batch(policy):
    """Twelve rollouts in float64, some truncated, one group dead."""
    return uneven(policy, 3, LIMIT)


def _gradients(policy, batch, options, **more):
    policy.zero_grad(set_to_none=True)
    update = update_of(
        policy,
        batch,
        credit=Uniform(),
        limit=LIMIT,
        algorithm=SDPG,
        coefficient=0.3,
        mask_truncated=True,
        **options | more,
    )
    metrics = update.accumulate(0, backward).figures()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}, metrics


@pytest.mark.parametrize(
    ("options", "cut"),
    [
        ({}, {"token_budget": 150}),
        ({"only_positive": True}, {"token_budget": 10**6, "share_prefixes": False}),
        ({"clamp": 0.02}, {"token_budget": 10**6}),
    ],
    ids=str,
)
def test_gradients_equal_a_loss_written_by_hand_however_the_batch_is_cut(options, cut, policy, batch):
    policy.zero_grad(set_to_none=True)
    student = (whole_logs(policy, batch) / 0.6).log_softmax(-1)
    with torch.no_grad():
        teacher = (whole_logs(policy, with_shown_answers(policy, batch, SENTENCE)) / 0.6).log_softmax(-1)
    kl = (student.exp() * (student - teacher)).sum(-1)
    assert 0 < (kl > 0.02)[batch.response_mask].sum() < batch.response_mask.sum()
    taught = (batch.advantages > 0) if options.get("only_positive") else torch.ones(len(batch), dtype=torch.bool)
    mask = batch.response_mask & batch.finished[:, None]
    lp = student.gather(-1, batch.response_ids[..., None].long()).squeeze(-1)
    token = -(lp - lp.detach()).exp() * batch.advantages[:, None]
    token = token + 0.3 * taught[:, None] * kl.clamp(max=options.get("clamp", 20.0))
    (token.masked_fill(~mask, 0).sum() / (mask.any(1).sum() * LIMIT)).backward()
    expected = {n: p.grad.clone() for n, p in policy.named_parameters()}
    found, metrics = _gradients(policy, batch, options, temperature=0.6, **cut)
    assert largest_gap(found, expected) <= roundings(64, torch.float32)
    if "only_positive" not in options:  # Else the dead group is not run.
        assert metrics["distillation_kl"] == pytest.approx(kl[mask].mean().item(), rel=1e-5)


@pytest.fixture(scope="module")
def asked_twice(policy):
    """A long prompt with two references, and another prompt: three groups of four rows, of which two groups are equal.

    Every quantity of a row that is not a function of its tokens differs between the equal rows.
    """
    task, text = ArithmeticTask(), "Compute 6+9-3+7-2+8-4+5-1+3.\n"
    problems = ((text, "28"), (text, "35"), (text[:-3] + "4.\n", "29"))
    prompts = [Prompt(messages=messages, reference=reference, task=task) for messages, reference in problems]
    made = sampled(policy, prompts, 4, Sampling(max_response_length=12), seed=1)
    again = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 8, 9, 10, 11])
    same = {n: getattr(made, n)[again] for n in ("input_ids", "attention_mask", "response_ids", "response_mask")}
    made = made.replace(**same, texts=[made.texts[k] for k in again], finished=torch.ones(12, dtype=torch.bool))
    assert made.prompt_lengths.min() > MIN_COMMON_TOKENS
    advantages = torch.randn(12, generator=torch.Generator().manual_seed(0))
    nowhere = torch.zeros_like(made.response_mask)
    last = nowhere.clone()
    # The tasks of the two groups may find the answer in different places.
    last[:, 2], last[4:8, 2], last[4:8, 1] = True, False, True
    last &= made.response_mask
    return ready.rollouts(
        made, advantages=advantages, answer=AnswerMasks(whole=last, content=last, marker=nowhere, after=nowhere)
    )


CASES = {
    "SDPG": {"algorithm": SDPG, "coefficient": 0.3, "credit": Uniform()},
    "RLSD": {"credit": RLSD(refresh_steps=1)},
    "GRAIL": {"credit": GRAIL(gate="all", answer_overwrite="never")},
    "KL": {"kl_coefficient": 0.1},
    "weights": {},
}


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_with_two_references_has_the_gradients_of_rows_run_apart(case, policy, asked_twice):
    random = torch.Generator().manual_seed(2)
    values, additive = torch.rand(2, *asked_twice.response_mask.shape, generator=random) * asked_twice.response_mask
    options, found = {"weights": token_weights(asked_twice, values, additive), **CASES[case]}, {}
    if case == "KL":
        options["reference"] = load_policy("arithmetic").double()
        for parameter in options["reference"].parameters():
            parameter.data *= 1.01
    for share in (True, False):
        policy.zero_grad(set_to_none=True)
        update = update_of(policy, asked_twice, limit=12, share_prefixes=share, **options)
        metrics = update.accumulate(0, backward).figures()
        found[share] = {n: p.grad.clone() for n, p in policy.named_parameters()}
        assert (metrics["shared_tokens"] > 0.5) is share
    assert largest_gap(found[True], found[False]) <= roundings(64, torch.float32)


def test_a_teacher_whose_rows_exceed_the_attention_window_runs_them_apart(batch, tmp_path):
    """The student's rows fit into it, and share prefixes; the teacher's are longer, by the sentence with the answer."""
    width = {"sliding_window": batch.input_ids.shape[1], "max_position_embeddings": 256, "attention_dropout": 0.0}
    policy = tiny("mistral", tmp_path, **width).train()
    found = [_gradients(policy, batch, {}, token_budget=10**6, share_prefixes=shares)[1] for shares in (True, False)]
    assert found[0]["shared_tokens"] > found[1]["shared_tokens"] == 0
    assert found[0]["distillation_kl"] == pytest.approx(found[1]["distillation_kl"], rel=1e-6)
