"""The built-in training: a byte-level GPT on the source text of Python's own library, and the same by torch alone."""

import itertools
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overspill.cli.loop import Batch, Trainee, build_optimizer, build_scheduler
from overspill.cli.settings import BuiltIn
from overspill.errors import OptionError

VOCABULARY = 256
CORPUS_BYTES = 8 << 20
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
"""Folders that are not the library's own code, and two that are little but tables."""


def read_corpus(limit: int = CORPUS_BYTES) -> Tensor:
    """The library's text: uint8 [bytes], host."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(root).parts[:-1]):
            text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < 1 << 16:
        raise OptionError(
            f"expected the source text of Python's standard library in {str(root)!r} to train on, found {len(text)} "
            "bytes of it; install it, or use a Python that comes with it"
        )
    return torch.frombuffer(text, dtype=torch.uint8)[:limit]


def batches(corpus: Tensor, settings: BuiltIn, device: torch.device, rank: int = 0) -> Iterator[Batch]:
    """Random windows of the text, the same for the same seed: int64 [batch, seq], device. Ranks take turns."""
    generator = torch.Generator().manual_seed(settings.seed)
    for turn in itertools.count():
        starts = torch.randint(0, len(corpus) - settings.seq, (settings.batch,), generator=generator)
        if turn % settings.ranks != rank:
            continue
        window = corpus[starts[:, None] + torch.arange(settings.seq)].long().to(device)
        yield {"input_ids": window, "labels": window}


def build_model(settings: BuiltIn) -> nn.Module:
    """A stock GPT-2 with new weights, in host memory; the same for the same seed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(settings.seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=settings.seq,
        n_embd=settings.hidden,
        n_layer=settings.layers,
        n_head=settings.heads,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own formula, without its six intermediate tensors
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    if settings.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model.train()


def own_optimizer(model: nn.Module, settings: BuiltIn) -> torch.optim.Optimizer:
    return build_optimizer(model, settings.optimizer, settings.lr, settings.weight_decay)


def plain_trainee(settings: BuiltIn, device: torch.device) -> Trainee:
    """The same training by torch alone; over ranks by its DistributedDataParallel."""
    model = build_model(settings).to(device)
    optimizer = own_optimizer(model, settings)
    if settings.ranks > 1:
        model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    return Trainee(model, optimizer, build_scheduler(optimizer, settings, settings.steps), clip)
