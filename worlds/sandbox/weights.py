"""The small base's architecture and initial weights: GPT-2's, so nothing but random numbers.

Language Models are Unsupervised Multitask Learners (Radford et al. 2019), section 2.3, and its
code: every matrix is drawn from a normal distribution with standard deviation 0.02; the two
projections of each block that write into the residual stream are smaller by the square root of
their number; biases are 0 and norms 1.

A web agent must look up what stands behind a name, red lamp -> 12, which takes two layers that
agree with each other. From these weights that forms by itself, given time and small pages first:
assets/decisions.md tells how long, and assets/base/ has the losses.
"""

WIDTH = 128
HEADS = 2
LAYERS = 6
FEED_FORWARD = 256
THETA = 1e6  # base of the rotary positions' wavelengths


def initial_weights(vocab_size: int, seed: int = 0) -> dict:
    """Random weights under Hugging Face's names."""
    import torch
    generator = torch.Generator().manual_seed(seed)
    D = WIDTH
    F = FEED_FORWARD
    residual_std = 0.02 * (2 * LAYERS) ** -0.5

    def normal(rows, columns, std=0.02):
        return torch.randn(rows, columns, generator=generator) * std

    weights = {
        "model.embed_tokens.weight": normal(vocab_size, D),
        "model.norm.weight": torch.ones(D),
    }
    for layer in range(LAYERS):
        block = {
            "input_layernorm.weight": torch.ones(D),
            "post_attention_layernorm.weight": torch.ones(D),
        }
        for name in "qkv":
            block[f"self_attn.{name}_proj.weight"] = normal(D, D)
            block[f"self_attn.{name}_proj.bias"] = torch.zeros(D)
        block["self_attn.o_proj.weight"] = normal(D, D, residual_std)

        block["mlp.gate_proj.weight"] = normal(F, D)
        block["mlp.up_proj.weight"] = normal(F, D)
        block["mlp.down_proj.weight"] = normal(D, F, residual_std)

        for name, weight in block.items():
            weights[f"model.layers.{layer}.{name}"] = weight
    return weights
