"""How tests run the real module: short, on the packaged policy, with a real Trainer."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from grail_lightning import ArithmeticTask, GrailModule, HFEngine, Sampling
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.rollout.grading import grade_and_locate
from grail_lightning.core.step.fused import SaliencyForward
from grail_lightning.credit import GRAIL, SaliencyOptions, TrainedModel
from grail_lightning.worlds.sums.task import ProblemSpace
from tests.batches import rollouts
from tests.steps import backward, configured, update_of

TASK = ArithmeticTask()
GROUP, LIMIT = 4, 36  # Of `graded_rollouts`.
SAMPLING = Sampling(max_response_length=48)


def trained_model(ours):
    """The model that a fit trains beside the policy of a module; None without one."""
    return ours.services.opened("fit").get(TrainedModel)


def problems(number, split="train", seed=0):
    """Prompts of the arithmetic world."""
    return [TASK.prompt({"problem": p.expression}) for p in ProblemSpace().draw(number, split, seed)]


def sampled(policy, prompts, group_size, sampling, seed):
    """Responses of a policy to prompts, as the engine gives them."""
    engine = HFEngine()
    engine.update_weights(policy)
    return engine.generate(prompts, group_size, sampling, seed=seed)


def graded_rollouts(number, seed=1, limit=LIMIT):
    """Groups of four rollouts of the packaged policy as our own trainer grades them; some may be truncated."""
    policy = load_policy("arithmetic")
    made = sampled(policy, problems(number), GROUP, Sampling(max_response_length=limit), seed=seed)
    with TASK.make_verifier() as verifier:
        return grade_and_locate(made, verifier, policy.tokenizer)


def one_in_four(number, sampling):
    """Groups of four rollouts of the packaged policy; only the first of each is counted as right."""
    policy = load_policy("arithmetic")
    made = sampled(policy, problems(number), 4, sampling, seed=3)
    return rollouts(made, torch.tensor([1.0, 0.0, 0.0, 0.0] * number), tokenizer=policy.tokenizer)


def uneven(policy, number, limit):
    """Groups of four rollouts in float64, of uneven length; one group is dead."""
    made = sampled(policy, problems(number), 4, Sampling(max_response_length=limit), seed=1)
    rewards = torch.randint(2, (4 * number,), generator=torch.Generator().manual_seed(0)).double()
    rewards[4:8] = 1.0
    return rollouts(made, rewards)


def beside_the_update(policy, batch, leaf, sampling, token_budget, **options):
    """Gradients of one optimiser step with GRAIL on its forward pass, and the token weights."""
    credit, limit = GRAIL(saliency=SaliencyOptions(leaf=leaf)), sampling.max_response_length
    update = update_of(policy, batch, credit=credit, limit=limit, token_budget=token_budget, **options)
    assert isinstance(update.forward, SaliencyForward)
    assert update.forward.pending.any()
    update.accumulate(0, backward)
    return {name: p.grad for name, p in policy.named_parameters()}, update.final_weights()


def batches(number, size=4, seed=0):
    """A list of batches of prompts, as a DataLoader that Lightning takes."""
    prompts = problems(number * size, seed=seed)
    cut = [prompts[k * size : (k + 1) * size] for k in range(number)]
    return torch.utils.data.DataLoader(cut, batch_size=None)


def module(objective=None, **changes):
    """A module on the packaged policy with a learning rate that shows.

    `objective` holds options of the objective and of `Execution` alike.
    """
    options = {"sampling": SAMPLING, "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.0)} | changes
    what, how = configured(objective or {})
    return GrailModule("arithmetic", objective=what, execution=how, **options)


class Drawing(torch.optim.SGD):
    """Adds noise of torch's random state in each step, as stochastic rounding does."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(1e-3 * (torch.rand(parameter.shape) - 0.5))
        return super().step(closure)


class Watch(pl.Callback):
    """Keeps what each step handed out."""

    def __init__(self):
        self.outputs, self.steps = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs["output"])
        self.steps.append(trainer.global_step)


def trainer(max_steps, *callbacks, **changes):
    """A quiet Trainer on one CPU process."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(max_steps=max_steps, callbacks=list(callbacks), **(quiet | changes))


def strategy_of(name, ranks=2):
    """What a Trainer takes for `fsdp2`; other names are Lightning's."""
    return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1) if name == "fsdp2" else name


def weights(pl_module):
    """A copy of all parameters."""
    return {name: p.detach().clone() for name, p in pl_module.policy.named_parameters()}
