"""A model larger than the memory that its process may use: built on meta, loaded, trained on nvme, exported.

    python -m tests.large_run make FOLDER GIB DTYPE   writes a model folder of random weights, piece by piece
    python -m tests.large_run train FOLDER NVME OUT   trains it under a limit of what the process has now + 512 MiB

Prints a JSON line: the losses, the limit and the peak of resident memory, both beyond what was there before.
"""

import json
import math
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

LIMIT = 512 << 20
LENGTH = 16


def config(gib: float, dtype: str):
    from transformers import LlamaConfig

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "vocab_size": 16000}
    block = 4 * 1024 * 1024 + 3 * 1024 * 2816
    layers = max(1, math.ceil((gib * 2**30 / getattr(torch, dtype).itemsize - 2 * 16000 * 1024) / block))
    return LlamaConfig(**sizes, num_hidden_layers=layers, tie_word_embeddings=False, use_cache=False, dtype=dtype)


def build(folder: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    found = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(found, dtype=found.dtype)


def make(folder: Path, gib: float, dtype: str) -> None:
    from overspill.checkpoint.export import write_export
    from overspill.checkpoint.writer import Stored

    config(gib, dtype).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)

    def pieces(p: Tensor) -> Iterator[Tensor]:
        for _ in range(p.shape[0]):
            row = torch.randn(p[0].numel(), generator=generator).mul_(0.02) if p.dim() > 1 else torch.ones(1)
            yield row.to(p.dtype)

    model = build(folder)
    write_export(
        folder,
        [Stored(n, p.dtype, tuple(p.shape), lambda p=p: pieces(p)) for n, p in model.named_parameters()],
        max_bytes=300 << 20,
    )


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10


def limit_memory() -> int:
    """What the process may have from here on: its private writable memory now, and 512 MiB."""
    limit = status("VmData") + LIMIT
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def warm_up() -> None:
    """What torch and its libraries take when they are first used is not the model's."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32, **sizes)).bfloat16()
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()


def train(folder: Path, nvme: Path, out: Path) -> None:
    import overspill

    warm_up()
    before = status("VmRSS")
    limit_memory()
    model = build(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    places = dict.fromkeys(("weight", "grad", "state"), "nvme")
    model, optimizer = overspill.prepare(
        model, optimizer, weights=folder, nvme=nvme, gpu="400MiB", host="64MiB", place=places
    )
    losses = []
    torch.manual_seed(0)
    for _ in range(3):
        tokens = torch.randint(0, 16000, (1, LENGTH))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    overspill.export(model, out)
    found = {"losses": losses, "limit": LIMIT, "peak": status("VmHWM") - before, "data": status("VmData")}
    print(json.dumps({**found, "weights": sum(f.stat().st_size for f in folder.glob("*.safetensors"))}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
    else:
        train(*map(Path, sys.argv[2:5]))
