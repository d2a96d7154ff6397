import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM

from grail_lightning import Evaluation, ExportPolicy, Loading, LoRA
from grail_lightning.app.callbacks.export import _gathered, _is_sharded, _unsharded
from grail_lightning.core.policy.load import load_policy
from tests.app.callbacks.scripted import Scripted, box, loader, prompts, run
from tests.architectures import tiny
from tests.tolerance import assert_near


def _best_at_four(prompt, k, step):
    """Right at step 4 only."""
    return box(prompt.reference if step == 4 else "0")


def _weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def _moved(start, steps):
    """The first parameter after `steps` steps of gradient 1 at learning rate 1e-3."""
    expected = start.clone()
    for _ in range(steps):
        expected -= 1e-3
    return expected


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_the_last_weights_and_those_of_the_best_checkpoint_load_back_as_hugging_face_models(tmp_path):
    module = Scripted(_best_at_four)
    start = next(module.policy.parameters()).detach().clone()
    best = ModelCheckpoint(dirpath=tmp_path, monitor="val/accuracy", mode="max", filename="best")
    often = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1)  # Its newest file is its best.
    exports = ExportPolicy(), ExportPolicy(which="best", folder=str(tmp_path / "best"))
    options = {"enable_checkpointing": True, "val_check_interval": 1, "check_val_every_n_epoch": None}
    trainer = run(7, Evaluation(at_start=False), *exports, often, best, default_root_dir=tmp_path, **options)
    trainer.fit(module, loader(*[prompts(2)] * 5), loader(prompts(2)))
    name = next(name for name, _ in module.policy.model.named_parameters())
    last = _weights(tmp_path / "export")
    assert_near(_weights(tmp_path / "best")[name], _moved(start, 4), 16, torch.float32)
    assert_near(last[name], _moved(start, 7), 16, torch.float32)
    assert all(torch.equal(last[n], w) for n, w in module.policy.model.state_dict().items())


def test_an_earlier_policy_is_moved_aside_and_that_of_the_run_is_never_written_over(tmp_path):
    folder = tmp_path / "policy"
    for steps in (2, 4):
        module = Scripted(_best_at_four)
        run(steps, ExportPolicy(folder=str(folder)), default_root_dir=tmp_path).fit(module, loader(*[prompts(2)] * 2))
    name, start = next(load_policy("arithmetic").model.named_parameters())
    assert_near(_weights(folder)[name], _moved(start.detach(), 4), 16, torch.float32)
    assert_near(_weights(tmp_path / "policy.1")[name], _moved(start.detach(), 2), 16, torch.float32)
    module.policy_name = str(folder)
    with pytest.raises(ValueError, match="must not be `policy`'s own"):
        run(6, ExportPolicy(folder=f"{folder}/"), default_root_dir=tmp_path).fit(module, loader(prompts(2)))


def test_a_second_policy_of_gathered_weights_is_the_first(tmp_path):
    """How sharded weights are exported, here with weights in one piece: a plain model, one without SDPA, adapters."""
    pytest.importorskip("peft")
    plain, gemma, lora = (Scripted(_best_at_four) for _ in range(3))
    gemma.policy, gemma.policy_name = tiny("gemma2", tmp_path / "gemma"), str(tmp_path / "gemma")
    # What the second policy has no use for, and eager attention cannot do, stays behind.
    gemma.loading = Loading(from_scratch=True, packing=True, gradient_checkpointing=True)
    lora.loading = Loading(lora=LoRA(rank=2))
    lora.policy = load_policy("arithmetic", lora.loading)
    start = load_policy("arithmetic").model.state_dict()
    for name, module in {"plain": plain, "gemma": gemma, "lora": lora}.items():
        with torch.no_grad():
            for weight, parameter in module.policy.named_parameters():
                if name != "lora" or "lora_B" in weight:
                    parameter.normal_()
        assert not _is_sharded(module)
        _unsharded(module, _gathered(module)).save(tmp_path / "again")
        module.policy.save(tmp_path / "live")
        again, live = _weights(tmp_path / "again"), _weights(tmp_path / "live")
        assert all(torch.equal(again[weight], value) for weight, value in live.items())
    assert any(not torch.equal(live[weight], start[weight]) for weight in live)
