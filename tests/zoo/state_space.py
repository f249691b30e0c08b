"""State spaces and other recurrences, alone and between layers of attention."""

from tests.zoo.base import IDS, VOCABULARY, Architecture, Builder, llama_like, stock
from tests.zoo.batches import text

MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "state_size": 5,
    "num_hidden_layers": 3,
    "conv_kernel": 3,
    **IDS,
}
MAMBA2 = {"num_heads": 6, "head_dim": 12, "n_groups": 2, "chunk_size": 4}
HYBRID = {"mamba_d_state": 5, "mamba_d_conv": 3}
HEADS = {"mamba_n_heads": 8, "mamba_d_head": 10, "mamba_chunk_size": 4, **HYBRID}
JAMBA = {
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "expert_layer_period": 2,
    "use_mamba_kernels": False,
    "output_router_logits": True,
}
ZAMBA = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "use_mamba_kernels": False,
    "num_key_value_heads": 4,
}
"""Both hybrid layers have the same block of attention."""
RECURRENT_GEMMA = {"lru_width": 36, "attention_window_size": 5, "conv1d_width": 3, "num_attention_heads": 4}
RWKV = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "attention_hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "context_length": 24,
    **IDS,
}


def recurrent(name: str, builder: Builder) -> Architecture:
    return Architecture(name, "state-space", builder, text, generates=True)


STATE_SPACE = [
    recurrent("mamba", stock("Mamba", "ForCausalLM", **MAMBA)),
    recurrent("falcon_mamba", stock("FalconMamba", "ForCausalLM", **MAMBA)),
    recurrent("mamba2", stock("Mamba2", "ForCausalLM", **MAMBA, **MAMBA2)),
    recurrent("jamba", llama_like("Jamba", **HYBRID, **JAMBA)),
    recurrent("bamba", llama_like("Bamba", **HEADS, attn_layer_indices=[1])),
    recurrent("zamba", llama_like("Zamba", **HYBRID, **ZAMBA)),
    recurrent("falcon_h1", llama_like("FalconH1", **HEADS, mamba_d_ssm=80, mamba_rms_norm=True)),
    recurrent("recurrent_gemma", llama_like("RecurrentGemma", **RECURRENT_GEMMA)),
    recurrent("rwkv", stock("Rwkv", "ForCausalLM", **RWKV)),
]
