"""The named algorithms: their published values however they are chosen, their losses, and how a run names its own."""

import math
from dataclasses import asdict, dataclass

import pytest
import torch
import yaml

from grail_lightning import BNPO, CISPO, DAPO, GRPO, SDPG, DrGRPO, GrailModule, GroupMean, GSPOToken, Objective
from grail_lightning.app.cli.app import FitOptions, main
from grail_lightning.core.functional.tokens import TokenStats
from grail_lightning.core.objective import described
from grail_lightning.core.step.loss import LossInputs, micro_batch_loss
from grail_lightning.credit import GRAIL
from tests.runs import SAMPLING

# Section by section as the papers have it: advantage, aggregation, clips, truncated rollouts left out, what else.
KEPT, LEFT_OUT = False, True
ROWS = {
    GRPO: ("group", "grpo", 0.2, 0.2, KEPT, {}),
    DrGRPO: ("none", "dr_grpo", 0.2, 0.2, KEPT, {}),
    DAPO: ("group", "dapo", 0.2, 0.28, LEFT_OUT, {}),
    CISPO: ("group", "dapo", 1.0, 4.0, KEPT, {"surrogate": "cispo"}),
    GSPOToken: ("group", "grpo", 3e-4, 4e-4, KEPT, {"level": "sequence"}),
}
COMMON = {
    **{"ratio_cap": None, "level": "token", "surrogate": "clip", "entropy_coefficient": 0.0},
    **{"kl_coefficient": 0.0, "kl_estimator": "k3", "kl_corrected": True},
}
KINDS = pytest.mark.parametrize("kind", ROWS, ids=lambda kind: kind.__name__)


def published(kind):
    """The fields of a row of the table."""
    _, how, low, high, left_out, more = ROWS[kind]
    return COMMON | {"aggregation": how, "clip_low": low, "clip_high": high, "mask_truncated": left_out} | more


def values(objective):
    """The class of an objective, its fields, and those of its own estimator of the advantage."""
    estimator = objective.advantage()
    return type(objective), asdict(objective), type(estimator), vars(estimator)


def row(kind, **changes):
    """The same of a row of the table, with changes."""
    own = {"scale": ROWS[kind][0], "share": 1.0, "train_equal": False, "trains_equal_groups": False}
    return kind, published(kind) | changes, GroupMean, own


@pytest.fixture(scope="module")
def options():
    return FitOptions()


@pytest.fixture
def chosen(options, tmp_path):
    """The objective that arguments choose, over files with the given options of the model, if there are any."""

    def choose(*arguments, files=()):
        given = []
        for number, content in enumerate(files):
            file = tmp_path / f"{number}.yaml"
            file.write_text(yaml.safe_dump({"model": {"objective": content}}))
            given.append(f"--config={file}")
        parsed = options.parse(["--config=configs/quickstart.yaml", *given, *arguments])
        assert parsed.model.objective.class_path.startswith("grail_lightning.")  # What the saved config names.
        return options._cli.parser.instantiate_classes(options._cli.config).fit.model.objective

    return choose


@KINDS
def test_each_algorithm_has_the_values_of_its_paper_from_python_the_command_line_and_a_file(kind, chosen):
    name = kind.__name__
    assert values(kind()) == row(kind)
    changed = {"clip_high": 0.28, "mask_truncated": True}  # By the quickstart's file, which names this class.
    over = changed if kind is DrGRPO else {}
    assert values(chosen(f"--model.objective={name}")) == row(kind, **over)
    assert values(chosen(files=[{"class_path": name}])) == row(kind, **over)
    # Over another class that a file has configured.
    other = {"class_path": "SDPG", "init_args": {"clip_low": 0.1, "clip_high": 0.3, "coefficient": 0.5}}
    assert values(chosen(f"--model.objective={name}", files=[other])) == row(kind)
    assert values(chosen(files=[other, {"class_path": name}])) == row(kind)
    # One field beside it.
    beside = chosen(f"--model.objective={name}", "--model.objective.clip_low=0.15", files=[other])
    assert values(beside) == row(kind, clip_low=0.15)
    file = {"class_path": name, "init_args": {"kl_coefficient": 0.04}}
    beside = chosen("--model.objective.clip_low=0.15", files=[file])
    assert values(beside) == row(kind, clip_low=0.15, kl_coefficient=0.04, **over)


def test_a_field_alone_changes_the_class_that_is_configured_or_the_default_one(options):
    parsed = options.parse(["--config=configs/quickstart.yaml", "--model.objective.clip_high=0.3"]).model.objective
    assert (parsed.class_path, parsed.init_args.clip_high) == ("grail_lightning.DrGRPO", 0.3)
    assert parsed.init_args.mask_truncated
    bare = ["--model.policy=arithmetic", "--model.sampling.max_response_length=8", "--data=ArithmeticData"]
    parsed = options.parse([*bare, "--model.objective.clip_high=0.3"]).model.objective
    assert (parsed.class_path, parsed.init_args.clip_high) == ("grail_lightning.DrGRPO", 0.3)
    assert not parsed.init_args.mask_truncated


@KINDS
def test_the_algorithms_own_advantage_is_used_unless_another_one_is_chosen(kind):
    module = GrailModule("arithmetic", SAMPLING, objective=kind())
    assert module.advantage.scale == ROWS[kind][0]
    assert module.advantage.share == 1
    other = BNPO()
    assert GrailModule("arithmetic", SAMPLING, objective=kind(), advantage=other).advantage is other


def test_the_default_is_dr_grpo_and_a_class_in_place_of_an_object_is_refused():
    assert GrailModule("arithmetic", SAMPLING).objective == DrGRPO()
    with pytest.raises(ValueError, match=r"`objective` must be an object, .*GRPO.*\. Call the class"):
        GrailModule("arithmetic", SAMPLING, objective=GRPO)
    with pytest.raises(TypeError, match="abstract"):
        Objective()


def by_loops(kind, logprobs, old, advantages, mask, limit):
    """The loss of a batch as the paper of each algorithm writes it, token by token."""
    _, how, low, high, _, more = ROWS[kind]
    rollouts, tokens, total = int(mask.any(1).sum()), int(mask.sum()), 0.0
    for row in range(len(mask)):
        places = mask[row].nonzero().flatten().tolist()
        length, of_row = len(places), 0.0
        log_ratios = [(logprobs[row][t] - old[row][t]).item() for t in places]
        for t, log_ratio in zip(places, log_ratios, strict=True):
            ratio = math.exp(sum(log_ratios) / length if more.get("level") == "sequence" else log_ratio)
            clipped, advantage = min(max(ratio, 1 - low), 1 + high), advantages[row][t].item()
            if more.get("surrogate") == "cispo":
                of_row -= clipped * advantage * logprobs[row][t].item()
            else:
                of_row -= min(ratio * advantage, clipped * advantage)
        match how:
            case "grpo":
                total += of_row / max(length, 1) / rollouts
            case "dr_grpo":
                total += of_row / (rollouts * limit)
            case "dapo":
                total += of_row / tokens
    return total


@KINDS
def test_the_loss_of_each_algorithm_is_that_of_its_paper(kind):
    random = torch.Generator().manual_seed(0)
    mask = torch.arange(9) < torch.tensor([9, 4, 6, 1, 7, 0])[:, None]
    old = -torch.rand(6, 9, generator=random, dtype=torch.float64) * 2
    spread = 1e-3 if kind is GSPOToken else 0.4  # So that ratios leave the range on both sides.
    logprobs = old + spread * torch.randn(6, 9, generator=random, dtype=torch.float64)
    if kind is CISPO:
        logprobs[0, 0] = old[0, 0] + 2  # Beyond the bound of 5, the only one.
    advantages = torch.randn(6, 9, generator=random, dtype=torch.float64)
    counts = {"num_rollouts": 5, "num_tokens": int(mask.sum()), "max_response_length": 12}
    inputs = LossInputs(
        stats=TokenStats(logprobs.requires_grad_(), entropy=torch.zeros_like(old)),
        old_logprobs=old,
        token_advantages=advantages,
        mask=mask,
    )
    loss, sums = micro_batch_loss(inputs, kind(), counts)
    assert loss.item() == pytest.approx(by_loops(kind, logprobs, old, advantages, mask, 12), rel=1e-12)
    assert sums["clip_ratio/region_mean"] > 0 or kind is CISPO
    widened = micro_batch_loss(inputs, kind(clip_low=1.0, clip_high=math.inf), counts)[0]
    assert widened.item() != pytest.approx(loss.item(), rel=1e-6)  # The bounds have acted.


@dataclass(frozen=True, kw_only=True)
class Halved(DAPO):
    """An objective of a user's own."""

    factor: float = 0.5

    def token_losses(self, logprobs, old_logprobs, advantages, mask):
        return self.factor * super().token_losses(logprobs, old_logprobs, advantages, mask)


def test_a_class_of_ones_own_is_chosen_by_its_import_path(options):
    parsed = options.parse(["--config=configs/quickstart.yaml", "--model.objective=tests.test_objective.Halved"])
    assert parsed.model.objective.class_path == "tests.test_objective.Halved"
    assert parsed.model.objective.init_args.clip_high == 0.28
    assert parsed.model.objective.init_args.factor == 0.5


@pytest.mark.parametrize(
    ("objective", "advantage", "sentence"),
    [
        (GRPO(), GroupMean(scale="group"), "Objective: GRPO."),
        (
            DrGRPO(clip_high=0.28, mask_truncated=True),
            GroupMean(),
            "Objective: DrGRPO, with clip_high=0.28, mask_truncated=True in place of its defaults.",
        ),
        (
            SDPG(coefficient=0.1),
            GroupMean(share=0.5),
            "Objective: SDPG, with coefficient=0.1 in place of its defaults. "
            "Advantage: GroupMean(share=0.5), in place of GroupMean().",
        ),
    ],
)
def test_a_run_names_its_algorithm_and_what_differs_from_it(objective, advantage, sentence):
    assert described(objective, advantage) == sentence


def test_the_first_lines_of_a_run_and_its_config_name_the_algorithm(tmp_path, caplog):
    place = [f"--trainer.logger.save_dir={tmp_path}", "--trainer.enable_progress_bar=false", "--trainer.max_steps=1"]
    small = ["--data.num_train=8", "--data.prompts_per_batch=2", "--trainer.limit_val_batches=0"]
    plain = ["--model.objective=GRPO", "--model.objective.kl_coefficient=0.04", "--model.credit=Uniform"]
    with caplog.at_level("INFO"):
        main(["fit", "--config=configs/quickstart.yaml", *place, *small, *plain])
    said = [record.getMessage() for record in caplog.records]
    assert "Objective: GRPO, with kl_coefficient=0.04 in place of its defaults." in said
    saved = yaml.safe_load((tmp_path / "quickstart" / "config.yaml").read_text())["model"]["objective"]
    assert saved["class_path"] == "grail_lightning.GRPO"
    assert saved["init_args"] == published(GRPO) | {"kl_coefficient": 0.04}


def test_saliency_is_fused_under_every_algorithm_but_not_beside_a_companion():
    assert all(kind().companion(None, None, None) is None for kind in ROWS)
    module = GrailModule("arithmetic", SAMPLING, objective=SDPG(), credit=GRAIL())
    assert module.objective.trains_all_rows
    assert not SDPG(only_positive=True).trains_all_rows
