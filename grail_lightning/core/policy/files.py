"""The files of a checkpoint in Hugging Face format: which of them is damaged, if a model cannot be loaded."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

_POINTER = b"version https://git-lfs"
_PICKLE = b"\x80"  # The first byte of weights as torch wrote them before 1.6.
_WEIGHTS = ("*.safetensors", "*.bin")


def damaged_file(path: str) -> str:
    """What is wrong with the files of a model, and what to do; empty if they are whole, as far as this can tell.

    Args:
        path: A folder, or the name of a model on the hub, whose files are in the hub's cache.
    """
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config_file = try_to_load_from_cache(path, "config.json") if path.count("/") <= 1 else None
        if not isinstance(config_file, str):
            return ""
        folder = Path(config_file).parent
        again = f"Download it again: `hf download {path} --force-download`."
    else:
        again = "Download or copy it again: a transfer that was interrupted is the usual reason."
    for file in sorted(folder.iterdir()):
        if reason := _reason(file):
            return f"its file {file.name} is damaged or incomplete ({reason}). {again}"
    for index in sorted(folder.glob("*.index.json")):
        held = json.loads(index.read_bytes())
        shards = dict(held.get("weight_map") or {}).values() if isinstance(held, dict) else ()
        if lacking := sorted({str(name) for name in shards if not (folder / str(name)).is_file()}):
            return f"{index.name} lists {lacking[0]}, which is missing. {again}"
    adapters = (folder / "adapter_config.json").is_file()
    if adapters and not any(file for form in _WEIGHTS for file in folder.glob(form) if "adapter" not in file.name):
        return (
            "it holds adapters without their model. Merge them: `peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER)"
            ".merge_and_unload().save_pretrained(NEW_FOLDER)`, and save the tokenizer there, too."
        )
    return ""


def _reason(file: Path) -> str:
    """Why a file of weights or of JSON cannot be read; empty if it can. No weight is read."""
    if file.suffix not in (".safetensors", ".bin", ".json") or not file.is_file():
        return ""
    with file.open("rb") as stream:
        begin = stream.read(len(_POINTER))
    if not begin:
        return "it is empty"
    if begin == _POINTER:
        return "it is a pointer of Git LFS: run `git lfs pull`"
    from safetensors import SafetensorError, safe_open

    try:
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        elif file.suffix == ".safetensors":
            with safe_open(file, framework="numpy"):  # It compares the header with the length of the file.
                return ""
        elif not zipfile.is_zipfile(file) and not begin.startswith(_PICKLE):
            return "it is no file of torch's"
    except (SafetensorError, ValueError, OSError) as error:
        return str(error)
    return ""
