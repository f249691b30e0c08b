"""A small folder of Transformers, as one downloads it: config, safetensors, tokenizer."""

from pathlib import Path
from typing import Any

import torch

TEXT = "".join(f"The {i}th line of a text that says little: {i * i} is {i} times {i}.\n" for i in range(400))
CHAT_TEMPLATE = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\n' }}{% endfor %}{{ eos_token }}"
VOCABULARY = 300


def make_tokenizer(eos: str | None = "<eos>", chat: bool = False) -> Any:
    """Bytes and a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_llama(folder: Path, **changes: Any) -> Path:
    """A Llama of two layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    rest = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 0}
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**{**sizes, **rest, "attention_dropout": 0.1, **changes})).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
