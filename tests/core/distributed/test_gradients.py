import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from grail_lightning import Loading, LoRA
from grail_lightning.core.distributed.gradients import Gradients
from grail_lightning.core.policy.layout import padded_layout
from grail_lightning.core.policy.load import load_policy
from grail_lightning.credit import GRAIL
from tests.architectures import tiny
from tests.runs import Watch, batches, module, trainer
from tests.tolerance import assert_near

ALONE = SingleDeviceStrategy("cpu")


def _losses(policy, in_place=False):
    """Two micro-batches of uneven lengths with tokens that occur twice; one head in several chunks, one in one."""
    for width, response in ((9, 5), (7, 3)):
        ids = torch.arange(2 * width).reshape(2, width) % 6
        mask = torch.ones(2, width, dtype=torch.bool)
        mask[1, :2] = False
        layout = padded_layout(ids, mask, torch.ones(2, response, dtype=torch.bool))
        yield policy.token_stats(layout, temperature=0.8, in_place=in_place).logprobs.square().sum()


@pytest.mark.parametrize(
    ("architecture", "tied", "chunk_tokens", "lora"),
    [
        ("qwen3", True, 2, None),
        ("qwen3", False, 100, LoRA(rank=2)),
        ("gemma2", True, 100, None),
        ("gemma3", False, 2, None),
    ],
)
def test_gradients_add_up_to_those_of_autograd(architecture, tied, chunk_tokens, lora, tmp_path):
    policy = tiny(architecture, tmp_path, lora, tie_word_embeddings=tied).eval()
    policy.loading = type(policy.loading)(chunk_tokens=chunk_tokens)
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    expected = torch.autograd.grad(sum(_losses(policy)), list(trained.values()))
    gradients = Gradients(policy, ALONE)
    assert gradients.in_place
    for number, loss in enumerate(_losses(policy, in_place=True)):
        with gradients.accumulating(last=number == 1):
            loss.backward()
    number = 1000 if architecture == "gemma2" else 64  # Norms run in float32, Gemma 2 altogether.
    for (name, parameter), wanted in zip(trained.items(), expected, strict=True):
        assert not parameter.grad.is_sparse, name
        assert_near(parameter.grad, wanted, number, torch.float32)
    assert all(p.grad is None for name, p in policy.named_parameters() if name not in trained)


def test_on_one_cpu_a_step_makes_no_second_gradient_of_the_vocabulary():
    """Neither the embeddings nor the head may hand autograd one: their weight's would be as large again."""
    handed = []
    ours = module({"token_budget": 300}, credit=GRAIL())

    class Listen(Watch):
        def on_train_start(self, trainer, pl_module):
            weight = pl_module.policy.model.get_input_embeddings().weight
            assert weight is pl_module.policy.model.get_output_embeddings().weight
            weight.register_hook(lambda gradient: handed.append(gradient))

    trainer(1, Listen()).fit(ours, batches(1))
    assert len(handed) > 1
    assert all(gradient.is_sparse for gradient in handed)
    ours.policy.embed(torch.arange(6)).square().sum().backward()  # Dense afterwards, as other loops need them.
    assert torch.nn.utils.clip_grad_norm_(ours.policy.parameters(), 1.0) > 0


def test_where_ranks_exchange_gradients_autograd_keeps_them(tmp_path):
    policy = tiny("qwen3", tmp_path)
    for strategy in (ALONE, DDPStrategy()):  # The latter in a second fit.
        assert Gradients(policy, strategy).in_place == (strategy is ALONE)
        assert policy.model.get_input_embeddings().sparse == (strategy is ALONE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_without_masters_trains_on_one_cpu(dtype):
    policy = load_policy("arithmetic", Loading(dtype=str(dtype).removeprefix("torch."), master_weights=False))
    gradients = Gradients(policy, ALONE)
    optimizer = gradients.make_optimizer(torch.optim.SGD)
    for number, loss in enumerate(_losses(policy, in_place=gradients.in_place)):
        with gradients.accumulating(last=number == 1):
            loss.backward()
    optimizer.step()
    assert all(p.grad.dtype == dtype and not p.grad.is_sparse for p in gradients.weights)
