"""The configs for one GPU: four steps on a CPU with a small random model of the same architecture, export and test.

Their precision and options are those of the file; sizes of the run are cut. The problems have the form of GSM8K.
"""

import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grail_lightning import WordProblemData
from grail_lightning.core.policy.source import load_tokenizer
from tests.core.data.recorder import write
from tests.shell import main

ROOT = Path(__file__).parents[1]
SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048},
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
HYBRID = SIZES | LINEAR | {"layer_types": ["linear_attention", "full_attention"]}
RUNS = {
    "Qwen2.5": ("gsm8k", "qwen2", SIZES),
    "Qwen3": ("gsm8k", "qwen3", SIZES),
    "Qwen3.5, a hybrid": ("gsm8k", "qwen3_5", {"text_config": HYBRID}),
    "adapters": ("gsm8k_lora", "qwen3", SIZES),
    "first_run": ("first_run", "qwen3", SIZES),
}
CUT = [
    *("--trainer.accelerator=cpu", "--trainer.max_steps=4", "--trainer.enable_progress_bar=false"),
    *("--model.sampling.max_response_length=12", "--evaluation.sampling.max_response_length=12"),
    *("--model.execution.group_size=4", "--data.prompts_per_batch=4", "--pictures.every_n_batches=0"),
    # Responses of random weights hardly ever end.
    *("--model.objective.mask_truncated=false", "--model.optimizer.lr=1e-3"),
    "--data.task.rewards=[{function: correctness}, {function: varied.variety}]",
]
VARIETY = '''
def variety(responses, references, **columns):
    """A reward in which responses of random weights differ."""
    return [len(set(text)) / 10 for text in responses]
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with problems in the form of GSM8K on the hub, and a reward; it is the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("varied.py").write_text(VARIETY)
    for split, number in (("train", 300), ("test", 6)):
        made = WordProblemData(num_train=number, num_val=1, num_test=number).load(split)[0].prompts
        rows = [(p.columns["problem"], f"So {p.reference}.\n#### {p.reference}") for p in made]
        write(tmp_path, [{"question": problem, "answer": answer} for problem, answer in rows], f"gsm8k_{split}.jsonl")
        own = {"train": "train", "test": "val"}[split]  # Of first_run.yaml.
        write(tmp_path, [{"problem": problem, "answer": answer} for problem, answer in rows], f"{own}.jsonl")
    return tmp_path


def save_random_model(kind, sizes, folder):
    """A model with random weights, with the tokenizer of the packaged policy of word problems."""
    tokenizer = load_tokenizer("words")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    known = {"vocab_size": len(tokenizer)} | ends
    parts = {name: value | known if name == "text_config" else value for name, value in sizes.items()}
    config = CONFIG_MAPPING[kind](**(parts if "text_config" in parts else parts | known))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`HFEngine` samples from:UserWarning")  # The hybrid.
@pytest.mark.parametrize("name", RUNS)
def test_a_config_trains_a_small_model_of_its_architecture_and_tests_the_export(name, here):
    config, kind, sizes = RUNS[name]
    save_random_model(kind, sizes, here / "tiny")
    file, data = f"configs/{config}.yaml", [f"--data.folder={here}", "--data.eval_prompts_per_batch=6"]
    if config == "first_run":
        file, data = str(ROOT / "docs" / "examples" / "first_run.yaml"), []
    main(["fit", f"--config={file}", f"--model.policy={here / 'tiny'}", *CUT, *data])
    run = here / "runs" / config
    events = EventAccumulator(str(run)).Reload()
    curves = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert events.Scalars("policy/grad_norm")[-1].step == 4
    assert max(curves["policy/grad_norm"]) > 0, "a step has moved the weights"
    trained, given = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run / "export", here / "tiny"))
    pairs = zip(trained.parameters(), given.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)
    if config == "first_run":
        return
    adapters = ["--model.loading.lora=null"] if config == "gsm8k_lora" else []
    main(["test", f"--config={file}", f"--model.policy={run / 'export'}", *CUT, *data, *adapters])
    ((summary,),) = [[json.loads(found.read_text())] for found in run.rglob("evaluation.json")]
    assert summary["datasets"]
