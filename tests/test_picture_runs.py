"""Runs on prompts with pictures, and what is said of pictures that cannot be used."""

import importlib.util
import json
import re
import struct
import zlib

import datasets
import lightning.pytorch as pl
import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from grail_lightning import (
    SDPG,
    DatasetSpec,
    DrGRPO,
    Execution,
    FewShot,
    GrailModule,
    Loading,
    LoRA,
    MathData,
    MathTask,
    Preflight,
    RolloutEngine,
    Sampling,
    VLLMServer,
    build_batch,
)
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.source import LoadedPolicy
from grail_lightning.core.records.picture import pictures_in
from grail_lightning.credit import GRAIL, PRIME, OARPerturbation
from tests.picture_models import TEXT, checkpoint, cut_off, image, letters, pictures, question
from tests.processes import on_ranks
from tests.runs import Watch, strategy_of, trainer, weights
from tests.steps import sums
from tests.tolerance import near

SAMPLING = Sampling(max_response_length=8)


def _folder(folder, number=4):
    """A table of problems with a picture each, and the pictures beside it."""
    rows = []
    for seed in range(number):
        image(seed).save(folder / f"{seed}.png")
        told = {"answer": 3 + seed, "solution": f"\\boxed{{{3 + seed}}}"}
        rows.append({"problem": f"what is 3 + {seed} ?", "picture": f"{seed}.png"} | told)
    return rows, _table(folder, rows)


def _table(folder, rows):
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def data_of(train, **options):
    task = MathTask(instruction="", rewards=[letters])
    return MathData(train=DatasetSpec(train, images="picture"), task=task, prompts_per_batch=2, **options)


def module_of(policy, **changes):
    options = {
        "sampling": SAMPLING,
        "execution": Execution(group_size=4),
        "objective": DrGRPO(clip_high=0.28),
        "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }
    return GrailModule(policy, **options | changes)


def _sees(weight):
    return "vision" in weight or "visual" in weight


class _Weights(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        self.before = weights(pl_module)


def _moved(module, train, *callbacks):
    """The outputs of a fit of two steps, and the names of the weights that it moved."""
    watch, begun = Watch(), _Weights()
    trainer(2, watch, begun, *callbacks).fit(module, data_of(train))
    assert len(watch.outputs) == 2
    return watch.outputs, {n for n, p in weights(module).items() if not torch.equal(p, begun.before[n])}


KL = {"kl_coefficient": 0.1}
LORA, PACKED = {"loading": Loading(lora=LoRA(rank=2))}, {"loading": Loading(packing=True), "credit": OARPerturbation()}
SEEING, CHECKPOINTED = ({"loading": Loading(train_vision=True, gradient_checkpointing=g)} for g in (False, True))
HALF = {"loading": Loading(dtype="bfloat16"), "credit": GRAIL()}


@pytest.mark.parametrize(
    ("name", "options", "changes"),
    [
        ("idefics3", {}, {}),
        ("llava", SEEING, {}),
        ("qwen2.5-vl", SEEING, {}),
        ("idefics3", LORA, KL),
        ("qwen2.5-vl", CHECKPOINTED, KL),
        ("qwen2.5-vl", PACKED, {}),
        ("llava", HALF, {"algorithm": SDPG}),
        ("idefics3", {"credit": PRIME(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))}, {}),
    ],
)
def test_a_fit_on_pictures_moves_what_is_trained_and_nothing_else(name, options, changes, tmp_path):
    kind, fields = changes.get("algorithm", DrGRPO), {n: v for n, v in changes.items() if n != "algorithm"}
    objective = kind(**{"clip_high": 0.28} | fields)
    module = module_of(checkpoint(name, tmp_path / "model"), objective=objective, **options)
    outputs, moved = _moved(module, _folder(tmp_path)[1])
    assert any("layers" in n and not _sees(n) for n in moved)
    assert all(output.batch.sampling_logprobs.isfinite().all() for output in outputs)
    assert any(_sees(n) for n in moved) is module.loading.train_vision


def test_a_policy_that_was_saved_takes_pictures_again(tmp_path):
    policy, messages = load_policy(checkpoint("llava", tmp_path / "model")), question(*pictures(1))
    policy.save(tmp_path / "export")
    assert load_policy(str(tmp_path / "export")).encode(messages) == policy.encode(messages)


def _broken(folder):
    """A row for each kind of bad picture, with the words of what is said of it."""
    (folder / "short.png").write_bytes(cut_off())
    (folder / "drawn.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (folder / "note.png").write_text("hello")
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (folder / "bomb.png").write_bytes(bomb + struct.pack(">I", 0) + b"IDAT")
    return {
        "no_such.png": "there is no",
        "short.png": "its pixels cannot be read",
        "drawn.svg": "an SVG is not drawn: save it as PNG",
        "note.png": "must be one of BMP, GIF",
        "bomb.png": "decompression bomb",
        "https://example.com/a.png": "which is never fetched",
        "data:image/png;base64,AAAA": "which is never fetched",
        7: "a path, bytes or an image of Pillow, but got int",
    }


def test_a_picture_that_cannot_be_used_is_named_with_its_row_before_the_weights_are_loaded(tmp_path):
    rows, _ = _folder(tmp_path)
    folder = checkpoint("llava", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    for bad, words in _broken(tmp_path).items():
        train = _table(tmp_path, [*rows, rows[0] | {"picture": bad}])
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            trainer(1, Preflight()).fit(module_of(folder), data_of(train))
        assert str(caught.value).startswith(f"{train}, line 5: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"problem": "<image> and <image> ?"}, "got 1 pictures and 2 places"),
        ({"problem": "<image> ?", "picture": None}, "got 0 pictures and 1 places"),
        ({"problem": "<image> ?", "picture": ["0.png", "1.png"]}, "got 2 pictures and 1 places"),
        ({"problem": "how many ?", "picture": ["0.png"] * 40}, "longer than"),
    ],
)
def test_a_prompt_has_a_place_for_each_picture_and_room_for_all(row, words, tmp_path):
    rows, _ = _folder(tmp_path)
    train = _table(tmp_path, [rows[0] | row])
    with pytest.raises(ValueError, match=words) as caught:
        trainer(1, Preflight()).fit(module_of(checkpoint("llava", tmp_path / "model")), data_of(train))
    assert str(train) in str(caught.value)
    assert "line 1" in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "options", "examples", "words"),
    [
        ("arithmetic", {}, {}, "line 1: a prompt has a picture, but the policy takes text alone"),
        (None, {"engine": VLLMServer(["http://127.0.0.1:1"])}, {}, "`VLLMServer` does not sample from prompts"),
        (None, {}, {"few_shot": FewShot(number=1)}, "`few_shot` takes prompts without pictures"),
    ],
)
def test_what_does_not_take_pictures_says_so_before_the_weights_are_loaded(policy, options, examples, words, tmp_path):
    train = _folder(tmp_path)[1]
    folder = policy or checkpoint("llava", tmp_path / "model")
    with pytest.raises(ValueError, match=re.escape(words)):
        trainer(1, Preflight()).fit(module_of(folder, **options), data_of(train, **examples))


def test_cells_may_be_paths_bytes_images_and_those_of_datasets(tmp_path):
    rows, _ = _folder(tmp_path, 1)
    content = (tmp_path / "0.png").read_bytes()
    cells = [str(tmp_path / "0.png"), content, image(0), {"bytes": content, "path": None}, [image(0)]]
    table = datasets.Dataset.from_list([rows[0] | {"picture": str(tmp_path / "0.png")}])
    table = table.cast_column("picture", datasets.Image())
    tables = [*([rows[0] | {"picture": cell}] for cell in cells), table]
    for given in tables:
        (part,) = data_of(given).load("train")
        (picture,) = pictures_in(part.prompts[0].messages)
        assert picture.open().tobytes() == image(0).tobytes()
        assert part.prompts[0].messages[0]["content"][1]["text"] == "what is 3 + 0 ?"
        assert "picture" not in part.prompts[0].columns


def test_a_model_whose_pictures_enter_deeper_layers_is_refused_in_one_line(tmp_path):
    qwen = load_policy(checkpoint("qwen2.5-vl", tmp_path))
    processor, rope = qwen.vision.pictures.processor, {"rope_type": "default", "mrope_section": [2, 1, 1]}
    vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}
    config = Qwen3VLConfig(
        text_config=TEXT | {"vocab_size": len(qwen.tokenizer), "head_dim": 8, "rope_parameters": rope},
        vision_config=vision | {"patch_size": 4, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        image_token_id=processor.image_token_id,
    )
    model = LoadedPolicy(Qwen3VLForConditionalGeneration(config), qwen.tokenizer, processor)
    with pytest.raises(ValueError, match="its logits behind a picture differ by") as caught:
        load_policy(model)
    assert "\n" not in str(caught.value)


def test_a_model_whose_pictures_fail_in_an_index_is_refused_in_one_line(tmp_path, monkeypatch):
    """ShieldGemma 2's processor makes three rows of one text."""
    policy = load_policy(checkpoint("llava", tmp_path))
    monkeypatch.setattr(type(policy.model), "get_image_features", lambda *_, **__: [][1])
    with pytest.raises(ValueError, match="cannot be a policy that takes pictures: list index out of range") as caught:
        load_policy(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
@pytest.mark.parametrize("name", ["Qwen2_5_VL", "SmolVLM"])
def test_a_package_that_a_processor_lacks_is_named(name, tmp_path):
    checkpoint("qwen2.5-vl", tmp_path)
    videos = {"Qwen2_5_VL": "Qwen2VLVideoProcessor", "SmolVLM": "SmolVLMVideoProcessor"}[name]
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": videos}))
    for file in ("processor_config.json", "tokenizer_config.json"):
        content = json.loads((tmp_path / file).read_text()) | {"processor_class": f"{name}Processor"}
        (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{videos} requires the Torchvision library .* Install it.") as caught:
        load_policy(str(tmp_path))
    assert "\n" not in str(caught.value)


class Written(RolloutEngine):
    """An engine whose responses depend on the prompt alone, and not on the rank."""

    takes_pictures = True

    def update_weights(self, policy):
        self.policy = policy

    def generate(self, prompts, group_size, sampling, seed):
        seeds = [10 * int(prompt.reference) + k for prompt in prompts for k in range(group_size)]
        ids = [torch.randint(8, 99, (4,), generator=torch.Generator().manual_seed(own)).tolist() for own in seeds]
        return build_batch(self.policy, prompts, group_size, ids, [True] * len(ids))


def _fit(ranks, strategy, engine, model, table):
    """A fit with a frozen tower on prompts of which some have pictures."""
    options = {
        "engine": engine,
        "credit": GRAIL(),
        "objective": DrGRPO(clip_high=0.28, kl_coefficient=0.1),
        "execution": Execution(group_size=2, token_budget=100, share_prefixes=False),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
    }
    ours, watch = module_of(model, **options), Watch()
    trainer(2, watch, devices=ranks, strategy=strategy_of(strategy, ranks)).fit(ours, data_of(table))
    return {"weights": sums(ours.policy.parameters()), "texts": [output.batch.texts for output in watch.outputs]}


@pytest.mark.slow
def test_ranks_agree_with_each_other_and_with_one_process_where_one_may_have_no_picture(tmp_path):
    rows, _ = _folder(tmp_path)
    train = _table(tmp_path, [row | {"picture": row["picture"] if k % 2 else None} for k, row in enumerate(rows)])
    model = checkpoint("llava", tmp_path / "model")
    sampled = [on_ranks(_fit, 2, strategy, None, model, train) for strategy in ("ddp", "fsdp2")]
    for ddp, fsdp2 in zip(*sampled, strict=True):
        assert ddp["texts"] == fsdp2["texts"]
        assert ddp["weights"] == near(fsdp2["weights"], 256, torch.float32, scale=1.0)
    (one,) = on_ranks(_fit, 1, "auto", Written(), model, train, ranks=1)
    first, second = on_ranks(_fit, 2, "ddp", Written(), model, train)
    assert [a + b for a, b in zip(first["texts"], second["texts"], strict=True)] == one["texts"]
    assert first["weights"] == second["weights"] == near(one["weights"], 256, torch.float32, scale=1.0)
