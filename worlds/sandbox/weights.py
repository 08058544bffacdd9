"""The small base's architecture and initial weights: the first two layers start as a rough induction head.

What decided whether the model learns to look up an element's id by its name (running accuracy on pages of 14 to 16
two-word names, single runs) is this start:

    W_Q = W_K orthogonal                                                     0.7 M tokens    chance, on 4 names
    + layer 0 reads the two tokens before (biases under rotary positions)    0.7 M tokens    just above chance, on 4 names
    + layer 1 compares two tokens with two tokens                            0.95 M tokens   98%
"""

WIDTH, HEADS, LAYERS, FEED_FORWARD, THETA = 128, 2, 6, 256, 1e6


def initial_weights(vocab_size: int, seed: int = 0) -> dict:
    """Random weights under Hugging Face's names, with a look-up laid into the first two layers.

    Output projections start at zero, so that each block starts as the identity. W_Q = W_K is orthogonal, so that
    every token attends to its own earlier copies.
    """
    import torch
    generator, D, F = torch.Generator().manual_seed(seed), WIDTH, FEED_FORWARD
    normal = lambda rows, columns: torch.randn(rows, columns, generator=generator) * columns ** -0.5

    def orthogonal(rows, columns):
        return torch.nn.init.orthogonal_(torch.empty(rows, columns), generator=generator)

    weights = {"model.embed_tokens.weight": normal(vocab_size, D)}
    for layer in range(LAYERS):
        block = {"input_layernorm.weight": torch.ones(D), "post_attention_layernorm.weight": torch.ones(D)}
        for name in "qkv":
            block[f"self_attn.{name}_proj.weight"] = normal(D, D)
            block[f"self_attn.{name}_proj.bias"] = torch.zeros(D)
        block |= {"self_attn.o_proj.weight": torch.zeros(D, D), "mlp.gate_proj.weight": normal(F, D),
                  "mlp.up_proj.weight": normal(F, D), "mlp.down_proj.weight": torch.zeros(D, F)}
        weights |= {f"model.layers.{layer}.{name}": weight for name, weight in block.items()}
    for layer in range(LAYERS):
        query = orthogonal(D, D)
        weights |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": query.clone() for name in "qk"}
    weights["model.norm.weight"] = torch.ones(D)
    lay_look_up(weights, orthogonal)
    return weights


def lay_look_up(weights: dict, orthogonal, sharpness: float = 7.5, gain: float = 2.0, copied: float = 2.0):
    """Starts the first two layers as a rough "what followed these two tokens before?".

    A web agent needs it all the time (red lamp -> 12). From plain random weights gradient descent finds it very
    late, because two layers have to agree first. Layer 0 adds to each token the two tokens before it. Layer 1
    compares this token and the one before it with the two tokens before every position, and copies the token at
    the positions that match.
    """
    import torch
    first = lambda name: weights[f"model.layers.0.self_attn.{name}"]
    second = lambda name: weights[f"model.layers.1.self_attn.{name}"]
    D, H, E = WIDTH, HEADS, WIDTH // HEADS
    read_ED = orthogonal(E, D)                             # a token's code
    place_ED, place2_ED = orthogonal(2 * E, D).split(E)    # where codes are written
    pairs = torch.arange(4)                                # the fastest rotations separate neighbors
    frequencies = 1 / THETA ** (2 * pairs.float() / E)
    for h, back in enumerate((1, 2)):
        # Queries and keys come from biases alone. Rotated by their positions t and s, their product is a sum of
        # cos(f (t - s - back)): the same for any two tokens, and largest `back` tokens ago.
        here, angle, size = pairs + h * E, back * frequencies, (sharpness * E ** 0.5) ** 0.5
        first("q_proj.weight")[h * E:(h + 1) * E] = 0
        first("k_proj.bias")[here] = size
        first("q_proj.bias")[here] = size * angle.cos()
        first("q_proj.bias")[here + E // 2] = -size * angle.sin()
        first("v_proj.weight")[h * E:(h + 1) * E] = read_ED
        first("o_proj.weight")[:, h * E:(h + 1) * E] = (place_ED, place2_ED)[h].T * D ** -0.5
    turn_EE = orthogonal(E, E)  # keeps the two comparisons apart within one head
    second("q_proj.weight")[:] = (gain * (read_ED + turn_EE @ place_ED)).repeat(H, 1)
    second("k_proj.weight")[:] = (gain * (place_ED + turn_EE @ place2_ED)).repeat(H, 1)
    second("v_proj.weight")[:] = orthogonal(H * E, D)
    second("o_proj.weight")[:] = second("v_proj.weight").T * copied * D ** -0.5
