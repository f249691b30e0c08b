"""A folder of Transformers: its config, its tokenizer, its model without values, and a new folder like it."""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import overspill
from overspill.cli.ranks import Ranks
from overspill.errors import OptionError

log = logging.getLogger("overspill")

COMPANIONS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
"""What stands beside the weights: config, tokenizer, chat template, code. An index of weights does not."""

Found = TypeVar("Found")


def read_config(folder: Path) -> Any:
    """The model's config, of a kind that predicts the next token and is held in plain numbers."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not (folder / "config.json").is_file():
        raise OptionError(
            f"expected --model to be a folder with a config.json, found none in {str(folder)!r}; give that of a model"
        )
    config = _loaded(lambda: AutoConfig.from_pretrained(folder, local_files_only=True), "a config", folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        found = ", ".join(config.architectures or [config.model_type])
        raise OptionError(
            f"expected a causal language model in {str(folder)!r}, found {found}; write a loop of your own around "
            "overspill.prepare"
        )
    if getattr(config, "quantization_config", None):
        raise OptionError(
            f"expected weights in bf16, fp16 or fp32 in {str(folder)!r}, found quantized ones; give the "
            "model as it was before"
        )
    config.use_cache = False
    return config


def read_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return _loaded(lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True), "a tokenizer", folder)


def check_weights(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        others = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_file())) or "nothing"
        raise OptionError(f"expected weights as *.safetensors in {str(folder)!r}, found {others}; convert them")


def positions(config: Any) -> int | None:
    """The longest sample that the model was made for, where it says so."""
    found: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found


def build(config: Any, recompute: bool) -> nn.Module:
    """The model on the meta device, of the dtype that its folder says: in that it will be exported."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    if recompute and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif recompute:
        log.warning("%s does not support recomputing activations: they are kept", type(model).__name__)
    trained: nn.Module = model.train()
    return trained


def vocabulary(model: Any) -> int:
    """Rows of the embedding."""
    rows: int = model.get_input_embeddings().weight.shape[0]
    return rows


def digest(folder: Path) -> str:
    """The same for the same architecture, wherever its folder is."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()


def check_target(path: Path, replaces: bool = False) -> None:
    """To be called before training, not after it. `replaces`: one may be there, of the run that goes on."""
    if replaces and (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OptionError(f"expected --export to be a new or empty folder, found {str(path)!r}; give another one")


def export(model: nn.Module, source: Path, target: Path, ranks: Ranks) -> None:
    """A folder that `from_pretrained` loads: the weights as they are now, everything else as in the model's own folder.

    It gets its name when it is complete, and takes the place of an earlier one. All ranks together; the first writes.
    """
    partial, old = (target.with_name(f".{target.name}.{part}") for part in ("partial", "old"))
    if ranks.first:
        if old.exists() and not target.exists():
            # Killed between the two names.
            old.rename(target)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
    overspill.export(model, partial)
    if not ranks.first:
        return
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in COMPANIONS and not path.name.endswith(".index.json"):
            shutil.copyfile(path, partial / path.name)
    if target.exists():
        _copy_others(target, partial)
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


_EXPORTED = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""Files of weights, of which an earlier export may have made more."""


def _copy_others(folder: Path, into: Path) -> None:
    """What somebody else put beside an earlier export."""
    for path in sorted(folder.iterdir()):
        if _EXPORTED.fullmatch(path.name) or os.path.lexists(into / path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, into / path.name, symlinks=True)
        else:
            shutil.copy2(path, into / path.name, follow_symlinks=False)


def _loaded(load: Callable[[], Found], what: str, folder: Path) -> Found:
    try:
        return load()
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise OptionError(
            f"expected {what} that Transformers can load in {str(folder)!r}, found: {error}; give a whole model"
        ) from error
