"""Mixtures of experts: which weights are used depends on the data."""

from tests.zoo.base import IDS, VOCABULARY, Architecture, Builder, llama_like, stock
from tests.zoo.batches import pairs, text

ROUTER = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
LOCAL = {"num_local_experts": 4, **ROUTER}
DEEPSEEK = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
JETMOE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "kv_channels": 10,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "aux_loss_coef": 0.1,
    "max_position_embeddings": 32,
    **IDS,
}
DBRX = {
    "vocab_size": VOCABULARY,
    "d_model": 40,
    "n_heads": 4,
    "n_layers": 3,
    "max_seq_len": 32,
    "resid_pdrop": 0.1,
    "output_router_logits": True,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    "ffn_config": {"hidden_size": 40, "ffn_hidden_size": 28, "moe_num_experts": 4, "moe_top_k": 2},
    **IDS,
}
SWITCH = {
    "vocab_size": VOCABULARY,
    "d_model": 36,
    "d_kv": 10,
    "d_ff": 50,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_heads": 3,
    "num_experts": 4,
    "expert_capacity": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}


def mixture(name: str, builder: Builder) -> Architecture:
    return Architecture(name, "moe", builder, text, generates=True)


MOE = [
    mixture("mixtral", llama_like("Mixtral", **LOCAL)),
    mixture(
        "qwen2_moe",
        llama_like("Qwen2Moe", num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=24, **ROUTER),
    ),
    mixture("qwen3_moe", llama_like("Qwen3Moe", num_experts=4, moe_intermediate_size=24, head_dim=10, **ROUTER)),
    mixture("olmoe", llama_like("Olmoe", num_experts=4, **ROUTER)),
    mixture("granitemoe", llama_like("GraniteMoe", **LOCAL)),
    mixture("phimoe", llama_like("Phimoe", **LOCAL)),
    mixture("gpt_oss", llama_like("GptOss", head_dim=10, sliding_window=4, **LOCAL)),
    mixture("deepseek_v3", llama_like("DeepseekV3", **DEEPSEEK)),
    mixture("jetmoe", stock("JetMoe", "ForCausalLM", **JETMOE)),
    mixture("dbrx", stock("Dbrx", "ForCausalLM", **DBRX)),
    Architecture(
        "switch_transformers",
        "moe",
        stock("SwitchTransformers", "ForConditionalGeneration", **SWITCH),
        pairs,
        generates=True,
    ),
]
