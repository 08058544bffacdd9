"""The policy: a Llama / Qwen decoder written by hand, its KV cache, its sampler, and the verbs to spread it over GPUs.

    x = x + Attention(RMSNorm(x));   x = x + SwiGLU(RMSNorm(x));   logits = RMSNorm(x) · W_head

The correctness argument of the whole project stands in this file: `sample` (what a rollout records) and
`token_logprobs` (what training differentiates) are two readings of the same forward pass, so their log-probs agree to
rounding.

    python model.py DIR "Once upon a time" --max-new-tokens 20 --temperature 0
    python model.py --plan Llama-3.1-8B --gpus 8 --context 16384     # how many GPUs do I need?

A checkpoint is a Hugging Face directory: config.json, *.safetensors, tokenizer.json; its keys are those of state_dict.
The classes know nothing of several GPUs; the last section applies FSDP2 to them from outside.

Dimension key: B rows, T tokens, D width, H query heads, K key/value heads, E head size, F feed-forward width,
V vocabulary, L layers, S cache slots, C cached positions, N scored tokens.
"""
import argparse
import json
import math
import os
import random
import shutil
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

# OpenMP's threads spin while they wait, and starve the browser that shares their cores; must be set before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

# --------------------------------------------------------------------------------------------------------------------
# Configuration: config.json, read strictly


LARGEST = {"vocab_size": 10**7, "hidden_size": 10**6, "intermediate_size": 10**7, "num_hidden_layers": 1000,
           "num_attention_heads": 10**4, "num_key_value_heads": 10**4, "head_dim": 10**4}  # beyond: a damaged file
REFUSED = {"quantization_config": "use the unquantised checkpoint", "attention_bias": "only Qwen2 has biases there",
           "use_sliding_window": "only full attention is supported", "mlp_bias": "biases there are not supported"}


@dataclass
class ModelConfig:
    """The part of Hugging Face's config.json that the forward pass needs. `raw` keeps the file for `save`."""
    raw: dict
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None
    tie_word_embeddings: bool
    qkv_bias: bool  # Qwen2
    qk_norm: bool   # Qwen3

    @classmethod
    def from_dict(cls, raw: dict, source: str = "config.json") -> "ModelConfig":
        kind = raw.get("model_type")
        if kind not in ("llama", "qwen2", "qwen3"):
            raise ValueError(f"{source}: model_type {kind!r:.60} is not supported; use a llama, qwen2 or qwen3 model.")
        for field, remedy in REFUSED.items():
            if raw.get(field):
                raise ValueError(f"{source}: {field} is {raw[field]!r:.60}; {remedy}.")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{source}: hidden_act is {raw['hidden_act']!r:.60}; only silu is supported.")
        layers = raw.get("layer_types") or []
        if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
            raise ValueError(f"{source}: layer_types is {layers!r:.60}; only full_attention is supported.")
        # Two spellings are in use: rope_theta + rope_scaling, and the newer rope_parameters that holds both. transformers
        # goes by rope_scaling where a file has the two: what a user adds to what it wrote then counts.
        spelled = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        settings = raw.get(spelled) or {}
        if not isinstance(settings, dict):
            raise ValueError(f"{source}: {spelled} is {settings!r:.60}; make it an object or null.")
        scaling = settings.get("rope_type", settings.get("type", "default"))
        if scaling not in ("llama3", "default"):
            raise ValueError(f"{source}: {spelled} asks for {scaling!r:.60}; only llama3 scaling is supported.")

        def number(field, values, default=None, kind=(int, float), largest=1e12):
            value = default if values.get(field) is None else values[field]
            if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value <= largest:  # NaN fails, too
                raise ValueError(f"{source}: {field} is {value!r:.60}; make it a positive "
                                 f"{'integer' if kind is int else 'number'} of at most {largest:g}.")
            return value

        size = lambda field, default=None: number(field, raw, default, int, LARGEST[field])
        heads, width = size("num_attention_heads"), size("hidden_size")
        kv_heads, head_dim = size("num_key_value_heads", heads), size("head_dim", width // heads)
        if heads % kv_heads or head_dim % 2 or raw.get("head_dim") is None and width % heads:
            raise ValueError(f"{source}: num_attention_heads {heads}, num_key_value_heads {kv_heads}, head_dim "
                             f"{head_dim}, hidden_size {width} do not divide; heads share keys evenly, and are of even "
                             "size.")
        tied = raw.get("tie_word_embeddings")
        if tied not in (True, False, None):
            raise ValueError(f"{source}: tie_word_embeddings is {tied!r:.60}; make it true or false.")
        if scaling == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            _, low, high, _ = (number(field, settings) for field in names)
            if low >= high:
                raise ValueError(f"{source}: low_freq_factor {low} must be below high_freq_factor {high}.")
        return cls(
            raw=raw, model_type=kind, vocab_size=size("vocab_size"), hidden_size=width,
            intermediate_size=size("intermediate_size"), num_hidden_layers=size("num_hidden_layers"),
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
            rms_norm_eps=number("rms_norm_eps", raw, 1e-6, largest=1.0),
            rope_theta=float(number("rope_theta", settings, number("rope_theta", raw, 10000.0))),
            rope_scaling=settings if scaling == "llama3" else None,
            tie_word_embeddings=bool(tied),
            qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3")


# --------------------------------------------------------------------------------------------------------------------
# The decoder


def recomputed(function, *inputs):
    """function(*inputs), of which the backward pass keeps the inputs alone and computes the rest a second time."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def normalize(self, x):  # which torch does in float32 whatever x is: squares of bfloat16 lose the small channels
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def forward(self, x):
        return recomputed(self.normalize, x)


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """Rotation speed of each of the E/2 coordinate pairs, radians a token. Llama 3.1 slows the slow ones further.

    NOTE in transformers' order of operations: a speed that is off by its last bit turns a head by another angle at position
    16,000, and logits drift by 5e-3.
    """
    exponent_E = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    freq_E = 1 / config.rope_theta ** exponent_E
    if (s := config.rope_scaling) is None:
        return freq_E
    turns = s["original_max_position_embeddings"] / (2 * math.pi / freq_E)  # full turns within the pre-training context
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast pairs stay; 0: slow pairs are slowed by `factor`
    return (1 - keep) * freq_E / s["factor"] + keep * freq_E


def rope(positions_BT, frequencies_E, dtype):
    """Tables for `rotate`, (B, 1, T, E) each: cosines, and sines with the minus of (a c - b s, b c + a s) in them."""
    angle_BTE = positions_BT[:, None, :, None].float() * frequencies_E
    cos, sin = angle_BTE.cos(), angle_BTE.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x_BHTE, cos_B1TE, sin_B1TE):
    """Rotary embedding in Hugging Face's layout: pair i is (x[i], x[i + E/2]), not (x[2i], x[2i+1])."""
    return torch.addcmul(x_BHTE * cos_B1TE, x_BHTE.roll(x_BHTE.shape[-1] // 2, dims=-1), sin_B1TE)


class KVCache:
    """Keys and values of S sequences side by side, so that many episodes decode in one batch.

    Position p of a slot is valid once written; what lies beyond a sequence's length is never attended to, so rolling
    back is only remembering a smaller length (the caller's), and idle slots may write rubbish at their end.
    Memory: 2 · L · S · K · C · E numbers.
    """

    def __init__(self, config: ModelConfig, slots: int, length: int, dtype=torch.float32, device="cpu"):
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, length, config.head_dim)
        self.k, self.v = torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
        self.slots, self.length = slots, length


@dataclass
class Place:
    """Where a forward pass with a cache reads and writes. Made once a pass, shared by all layers."""
    k_LBKCE: torch.Tensor  # what is attended to: views of the cache, no copies, because rows are consecutive slots
    v_LBKCE: torch.Tensor
    positions_BT: torch.Tensor
    mask_B1TC: torch.Tensor | None  # 0 where a query sees a key, else -inf; None where all rows write the last T positions

    @classmethod
    def of(cls, cache, rows, positions_BT, end=None):
        aligned, mask_B1TC = False, None
        if end is None:  # look the positions up, for which a GPU must be waited for
            low, high = torch.stack(positions_BT.aminmax()).tolist()
            assert high < cache.length, f"{high + 1} positions do not fit the cache's {cache.length}"
            # T rising positions in a span of T: the same in every row
            end, aligned = high + 1, high - low == positions_BT.shape[1] - 1
        if not aligned:  # as numbers: of a bool mask every layer would make some anew
            unseen_B1TC = torch.arange(end, device=positions_BT.device) > positions_BT[:, None, :, None]
            mask_B1TC = torch.zeros_like(unseen_B1TC, dtype=cache.k.dtype).masked_fill_(unseen_B1TC, -torch.inf)
        return cls(cache.k[:, rows, :, :end], cache.v[:, rows, :, :end], positions_BT, mask_B1TC)

    def update(self, layer: int, k_BKTE, v_BKTE):
        """Writes new keys and values; returns all that are attended to, (B, K, C, E) each."""
        both = self.k_LBKCE[layer], self.v_LBKCE[layer]
        for kept_BKCE, new_BKTE in zip(both, (k_BKTE, v_BKTE)):
            if self.mask_B1TC is None:
                kept_BKCE[:, :, -new_BKTE.shape[2]:] = new_BKTE
            else:
                kept_BKCE.scatter_(2, self.positions_BT[:, None, :, None].expand_as(new_BKTE), new_BKTE)
        return both


class BehindContext(torch.autograd.Function):
    """Causal attention of T queries to a context and to themselves, for CPUs, whose fused kernel knows no such mask.

    The kernel runs on the context whole and on the own part causally, each with its own softmax; their log-sum-exps say
    how much of the joint softmax each holds. Backward, either kernel needs only the joint output and log-sum-exp.
    """

    @staticmethod
    def forward(ctx, q, context_k, k, context_v, v):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        far, far_lse = kernel(q, context_k, context_v)
        near, near_lse = kernel(q, k, v, is_causal=True)
        lse = torch.logaddexp(far_lse, near_lse)
        out = torch.lerp(near, far, (far_lse - lse).exp()[..., None].to(q.dtype))
        ctx.save_for_backward(q, context_k, k, context_v, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, context_k, k, context_v, v, out, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        far = kernel(grad, q, context_k, context_v, out, lse, 0.0, False)  # the gradients of q, k and v
        near = kernel(grad, q, k, v, out, lse, 0.0, True)
        return far[0] + near[0], far[1], near[1], far[2], near[2]


def attend(q_BHTE, k_BKCE, v_BKCE, mask_B1TC=None):
    """Grouped-query attention of T queries to C >= T keys, causal: without a mask the last query meets the last key.

    NOTE is_causal aligns its triangle at the top left, which is wrong behind a context. Rows of unequal length are
    padded on the right, where causality hides the padding.
    """
    (B, H, T, E), (K, C) = q_BHTE.shape, k_BKCE.shape[1:3]
    if mask_B1TC is None and 512 <= T < C and q_BHTE.device.type == "cpu":
        k_BHCE, v_BHCE = (x.repeat_interleave(H // K, dim=1) for x in (k_BKCE, v_BKCE))
        return BehindContext.apply(q_BHTE, *k_BHCE.split((C - T, T), dim=2), *v_BHCE.split((C - T, T), dim=2))
    if mask_B1TC is None and T > 1:
        mask = None if T == C else causal_lower_right(T, C)
        return F.scaled_dot_product_attention(q_BHTE, k_BKCE, v_BKCE, mask, is_causal=T == C, enable_gqa=H != K)
    # Queries that share a key head become rows of one head: keys are read once, and no kernel has to repeat them.
    mask = None if mask_B1TC is None else mask_B1TC.repeat(1, 1, H // K, 1)
    out = F.scaled_dot_product_attention(q_BHTE.reshape(B, K, H // K * T, E), k_BKCE, v_BKCE, mask)
    return out.reshape(B, H, T, E)  # some kernels leave their result transposed in memory: no view


def attend_packed(q_BHTE, k_BKTE, v_BKTE, segments):
    """One `attend` a segment, to its context and itself; see `Transformer.forward`.

    NOTE the row is cut by `split`, whose backward pass writes a gradient once; that of a slice fills a whole row with
    zeros, which for a hundred short segments costs more than all else.
    """
    lengths = [stop - start for start, stop, *_ in segments]
    which = {start: i for i, (start, *_) in enumerate(segments)}
    q_parts, k_parts, v_parts = (x.split(lengths, dim=2) for x in (q_BHTE, k_BKTE, v_BKTE))
    out = []
    for q, k, v, (_, _, first, last) in zip(q_parts, k_parts, v_parts, segments):
        if last > first:  # the context is how an earlier segment begins
            k, v = (torch.cat((parts[which[first]][:, :, :last - first], own), dim=2)
                    for parts, own in ((k_parts, k), (v_parts, v)))
        out.append(attend(q, k, v))
    return torch.cat(out, dim=2)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.qk_norm = layer, c.qk_norm
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps), RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x_BTD, rope: tuple, place: Place | None, segments: list | None):
        B, T, _ = x_BTD.shape
        q = self.q_proj(x_BTD).view(B, T, self.heads, self.head_dim)
        k = self.k_proj(x_BTD).view(B, T, self.kv_heads, self.head_dim)
        v = self.v_proj(x_BTD).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)  # (B, K, T, E)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q.transpose(1, 2), *rope), rotate(k.transpose(1, 2), *rope)
        if segments is not None:
            y = attend_packed(q, k, v, segments)
        elif place is None:
            y = attend(q, k, v)
        else:
            y = attend(q, *place.update(self.layer, k, v), place.mask_B1TC)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        # Kept whole, silu and product are a quarter of all activations; done again, they cost next to nothing (the
        # recomputation ends where down_proj has its input).
        return recomputed(lambda gate, up: self.down_proj(F.silu(gate) * up), self.gate_proj(x), self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x_BTD, rope, place, segments):
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rope, place, segments)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Decoder(nn.Module):
    """Embedding, blocks, final norm: `model.*` in Hugging Face's names."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.recompute = config, False  # recompute: trade a second forward for activation memory
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.frequencies_E = rope_frequencies(config)  # a plain tensor: not a weight, must stay float32

    def logits(self, x):
        """(..., D) -> (..., V) by the LM head, which small models share with the embedding."""
        weight = self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        if x.ndim == 2 and 4 < len(x) <= 32:  # some decoded tokens: this way a CPU need not repack the matrix
            return (weight @ x.T).T.contiguous()
        return F.linear(x, weight)

    def forward(self, tokens_BT, positions_BT=None, cache: KVCache | None = None, rows: slice = slice(None), head=None,
                segments: list[tuple[int, int, int, int]] | None = None, end: int | None = None):
        """Token ids (B, T) -> logits (B, T, V).

        positions_BT: position of each token in its sequence, 0..T-1 by default. cache, rows: write keys and values into
        these slots at those positions, and attend to everything before. head: what to apply to the final hidden states
        (B, T, D) instead of the LM head on every position, which for a page of 8,000 tokens would cost 5 GB.
        segments: one packed row (B = 1) in place of many that share their beginnings, cut into (start, stop,
        context_start, context_stop): tokens start..stop see the whole context, which is how an earlier segment begins,
        and themselves causally. end: how much of the cache to read, where the caller knows that no row holds more.
        """
        B, T = tokens_BT.shape
        if positions_BT is None:
            positions_BT = torch.arange(T, device=tokens_BT.device).expand(B, T)
        if segments is not None:
            tiled = [s[0] for s in segments] + [T] == [0] + [s[1] for s in segments]
            assert B == 1 and tiled, "segments must tile the one row in order"
            alone = {start: stop for start, stop, first, last in segments if first == last}
            assert all(first == last or first < start and last <= alone.get(first, first) for start, _, first, last in
                       segments), "a context is the beginning of an earlier segment that has none"
        place = None if cache is None else Place.of(cache, rows, positions_BT, end)
        if self.frequencies_E.device != tokens_BT.device:
            self.frequencies_E = self.frequencies_E.to(tokens_BT.device)
        x_BTD = self.model.embed_tokens(tokens_BT)
        tables = rope(positions_BT, self.frequencies_E, x_BTD.dtype)
        for block in self.model.layers:
            inputs = x_BTD, tables, place, segments
            x_BTD = recomputed(block, *inputs) if self.recompute else block(*inputs)
        return (head or self.logits)(self.model.norm(x_BTD))

    def init_weights(self, seed: int = 0):
        """Random weights for a model that starts from nothing.

        Output projections start at zero, so that each block starts as identity; W_Q = W_K orthogonal, so that every
        token attends to its own earlier copies. Models with biases (Qwen2) start with a whole look-up laid in.
        """
        c, generator = self.config, torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                nn.init.constant_(weight, 0.0 if name.endswith("bias") else 1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            else:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
        for block in self.model.layers:
            query, key = block.self_attn.q_proj.weight, block.self_attn.k_proj.weight
            nn.init.orthogonal_(query, generator=generator)
            key.data.copy_(query.data[:len(key)])
        if (c.qkv_bias and c.num_hidden_layers > 1
                and c.num_attention_heads == c.num_key_value_heads == c.hidden_size // c.head_dim > 1):
            self._lay_look_up(generator)
        return self

    @torch.no_grad()
    def _lay_look_up(self, generator, sharpness: float = 7.5, gain: float = 2.0, copied: float = 2.0):
        """Starts the first two layers as a rough "what once followed these two tokens?".

        A web agent lives on it (red lamp -> 12), and from plain random weights gradient descent finds it very late,
        because two layers have to agree first. Layer 0 writes beside each token the one before and the one before that.
        Layer 1 compares (this token, the one before) with the two tokens behind every position, and copies what stands
        there.
        """
        c = self.config
        D, E, H = c.hidden_size, c.head_dim, c.num_attention_heads
        first, second = self.model.layers[0].self_attn, self.model.layers[1].self_attn

        def orthogonal(rows, columns):
            return nn.init.orthogonal_(torch.empty(rows, columns), generator=generator)

        read_ED = orthogonal(E, D)                             # a token's code
        place_ED, place2_ED = orthogonal(2 * E, D).split(E)    # where codes are written
        pairs = torch.arange(4)  # the fastest rotations: they tell neighbours apart
        for h, back in enumerate((1, 2)):
            # Queries and keys that are biases alone: rotated by their positions t and s, their product is a sum of
            # cos(f (t - s - back)), the same for any two tokens and largest `back` tokens ago.
            here, angle = pairs + h * E, back * self.frequencies_E[pairs]
            first.q_proj.weight[h * E:(h + 1) * E] = 0
            first.k_proj.bias[here] = (sharpness * E ** 0.5) ** 0.5
            first.q_proj.bias[here] = (sharpness * E ** 0.5) ** 0.5 * angle.cos()
            first.q_proj.bias[here + E // 2] = -(sharpness * E ** 0.5) ** 0.5 * angle.sin()
            first.v_proj.weight[h * E:(h + 1) * E] = read_ED
            first.o_proj.weight[:, h * E:(h + 1) * E] = (place_ED, place2_ED)[h].T * D ** -0.5
        turn_EE = orthogonal(E, E)  # keeps the two comparisons apart within one head
        second.q_proj.weight.copy_((gain * (read_ED + turn_EE @ place_ED)).repeat(H, 1))
        second.k_proj.weight.copy_((gain * (place_ED + turn_EE @ place2_ED)).repeat(H, 1))
        second.v_proj.weight.copy_(orthogonal(H * E, D))
        second.o_proj.weight.copy_(second.v_proj.weight.T * copied * D ** -0.5)


# --------------------------------------------------------------------------------------------------------------------
# Sampling and scoring: two readings of the same logits


def sample(logits_BV, uniform_B, temperature: float = 1.0, top_p: float = 1.0):
    """Draws one token a row; returns (ids_B, logp_B), the log-probs under the distribution drawn from.

    uniform_B: one number in [0, 1) a row, from the row's own generator: which token a row gets then does not depend on
    who shares its batch. In float64, because float32 rounds the last ones up to 1, which no token holds. temperature 0
    takes the most likely token and reports its log-prob at temperature 1.
    """
    logp_BV = (logits_BV.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        ids_B = logp_BV.argmax(-1)
    else:
        if top_p < 1:  # the smallest set of likeliest tokens that holds top_p, renormalised
            sorted_BV, order_BV = logp_BV.sort(-1, descending=True)
            outside = sorted_BV.exp().cumsum(-1) - sorted_BV.exp() >= top_p
            outside[:, 0] = False  # top_p 0 leaves the likeliest
            logp_BV = logp_BV.masked_fill(outside.gather(-1, order_BV.argsort(-1)), -torch.inf).log_softmax(-1)
        cdf_BV = logp_BV.exp().double().cumsum(-1)
        threshold_B1 = uniform_B.to(cdf_BV)[:, None] * cdf_BV[:, -1:]
        ids_B = torch.searchsorted(cdf_BV, threshold_B1, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
    return ids_B, logp_BV.gather(-1, ids_B[:, None])[:, 0]


def token_logprobs(model: Transformer, tokens_BT, action_BT, temperature: float = 1.0, chunk: int = 1024,
                   positions_BT=None, segments=None):
    """Log-prob and entropy of each token marked in the bool mask action_BT, given everything before it in its row.

    Returns (logp_N, entropy_N) in row-major order of the mask. Temperature as in `sample`; positions_BT and segments as
    in the forward pass. The first token of a row or segment cannot be marked: nothing before it in the row predicts it.
    The LM head runs on the N marked positions only, `chunk` at a time and recomputed in the backward pass, so that
    (N, V) float32 logits never exist whole.
    """
    first = [segment[0] for segment in segments or [(0,)]]
    assert not action_BT[:, first].any(), "the first token of a row or segment has no context to be scored in"
    targets_N = tokens_BT[action_BT]
    before_BT = action_BT.roll(-1, dims=1)  # token t is predicted by the hidden state at t-1

    def score(x_MD, target_M):
        logp_MV = (model.logits(x_MD).float() / (temperature or 1.0)).log_softmax(-1)
        return logp_MV.gather(-1, target_M[:, None])[:, 0], -(logp_MV.exp() * logp_MV).sum(-1).detach()

    def head(x_BTD):
        x_ND = x_BTD[before_BT]
        parts = [recomputed(score, x, t) for x, t in zip(x_ND.split(chunk), targets_N.split(chunk))]
        return tuple(torch.cat(column) for column in zip(*parts)) if parts else (x_ND.sum(-1).float(),) * 2

    return model(tokens_BT, positions_BT, head=head, segments=segments)


@torch.no_grad()
def generate(model: Transformer, prompt_ids: list[int], max_new_tokens: int, temperature: float = 0.0, stop=(),
             seed: int = 0):
    """Completes one prompt; returns (ids, logps). The teaching version: rollout.py serves many prompts at once."""
    device, rng = model.model.embed_tokens.weight.device, random.Random(seed)
    cache = KVCache(model.config, 1, len(prompt_ids) + max_new_tokens, model.model.embed_tokens.weight.dtype, device)
    ids, logps, new, start = [], [], list(prompt_ids), 0
    for _ in range(max_new_tokens):
        positions = torch.arange(start, start + len(new), device=device)[None]
        logits = model(torch.tensor([new], device=device), positions, cache, head=lambda x: model.logits(x[:, -1]))
        token, logp = sample(logits, torch.tensor([rng.random()], dtype=torch.float64), temperature)
        start, new = start + len(new), [int(token)]
        ids.append(new[0])
        logps.append(float(logp))
        if new[0] in stop:
            break
    return ids, logps


class RecordedStep:
    """Decoding on a GPU: one token for each slot of a cache, launched as one CUDA graph.

    A step of few rows is a thousand kernels, each of which the GPU ends before Python has launched the next; recorded
    once, they are launched together. A recording has fixed shapes and addresses: so all slots take part (idle ones write
    one unused position), tokens and positions lie in buffers, and what is read of the cache grows by STRIDE positions,
    each with a recording of its own. Valid as long as the weights stay where they are: inside `unsharded`.
    """
    STRIDE = 1024

    def __init__(self, model: Transformer, cache: KVCache):
        self.model, self.cache = model, cache
        self.tokens_S1, self.positions_S1 = torch.zeros((2, cache.slots, 1), dtype=torch.long, device=cache.k.device)
        self.recordings: dict[int, tuple] = {}  # how much of the cache is read -> (graph, the logits that it writes)

    def __call__(self, tokens_S1, positions_S1, longest: int):
        """The next token's logits (S, V), valid until the next call. longest: the largest position."""
        assert longest < self.cache.length, f"{longest + 1} positions do not fit the cache's {self.cache.length}"
        end = min((longest // self.STRIDE + 1) * self.STRIDE, self.cache.length)
        self.tokens_S1.copy_(tokens_S1)
        self.positions_S1.copy_(positions_S1)
        if end not in self.recordings:
            self.recordings[end] = self.record(end)
        graph, logits_SV = self.recordings[end]
        graph.replay()
        return logits_SV

    def step(self, end: int):
        return self.model(self.tokens_S1, self.positions_S1, self.cache, head=lambda x: self.model.logits(x[:, -1]),
                          end=end)

    def record(self, end: int):
        first = next(iter(self.recordings.values()), None)
        self.step(end)  # the libraries set themselves up at their first call, which cannot be recorded
        graph = torch.cuda.CUDAGraph()
        # One memory pool for all: only one is replayed at a time. NCCL's watchdog may go on in its thread meanwhile.
        with torch.cuda.graph(graph, pool=first and first[0].pool(), capture_error_mode="thread_local"):
            logits_SV = self.step(end)
        return graph, logits_SV


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints in Hugging Face's layout

INDEX = "model.safetensors.index.json"  # exists where the weights are spread over several files
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
                   "chat_template.jinja", "agent.json")  # agent.json: the prompt the policy was trained with


def parse_json(text: str, source, kind: type = dict):
    """A JSON value of this kind. Raises ValueError naming its source: a file, or a file's line."""
    def check(value, depth=0):
        if depth > 50:
            raise ValueError("it is nested more than 50 deep")
        if isinstance(value, str):
            value.encode()  # half a surrogate pair can be neither printed nor tokenized
        elif isinstance(value, (dict, list)):
            for inner in value if isinstance(value, list) else [*value, *value.values()]:
                check(inner, depth + 1)

    def refuse(constant):
        raise ValueError(f"{constant} is no number")

    try:
        value = json.loads(text, parse_constant=refuse)
        check(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON ({error}); copy it from the original again.") from None
    if not isinstance(value, kind):
        wanted = {dict: "an object", list: "a list"}[kind]
        raise ValueError(f"{source} holds {value!r:.60}, not {wanted}; copy it from the original again.")
    return value


def read_json(path: Path, kind: type = dict):
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; a checkpoint directory needs it.") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy it from the original again.") from None
    return parse_json(text, path, kind)


def resolve(path_or_hub_id: str) -> Path:
    """A directory as it is; anything else as a hub id, which needs huggingface_hub and its cache or a network."""
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    missing = (f"no checkpoint at {str(path_or_hub_id)!r}: it is neither a directory with config.json nor a model that the "
               "hub could give")
    # What begins with a directory of ours was meant as one: asking the hub would only make the user wait.
    if path.is_absolute() or len(path.parts) != 2 or path.parts[0] in ("runs", "worlds") or path.parent.is_dir():
        raise ValueError(f"{missing}; check the spelling, or train it first.")
    try:
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(str(path_or_hub_id), allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # the hub's client raises dozens of kinds; all mean the same to the user
        raise ValueError(f"{missing} ({type(error).__name__}); check the spelling, or train or download it.") from None


def load(path_or_hub_id: str, dtype=torch.float32, device="cpu", sharded=False, replicas: int = 1) -> Transformer:
    """Opens a checkpoint. sharded: already cut by `shard`, so that no rank ever holds more than its part of the model.

    The files' headers are held against config.json before any memory is taken. Tensors are then read one at a time into
    an empty model, so there is never a second full copy either.
    """
    path = resolve(path_or_hub_id)
    config = ModelConfig.from_dict(read_json(path / "config.json"), str(path / "config.json"))
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    files, state = weight_files(path), model.state_dict()
    with opened(files, device) as parts:
        found, twice = {}, None
        for name, part in zip(files, parts):
            for key in part.keys():
                if key.endswith("rotary_emb.inv_freq"):  # old writers store the rotation speeds, too
                    continue
                if key == "lm_head.weight" and config.tie_word_embeddings:  # some store the shared matrix twice
                    twice = part.get_tensor(key)
                    continue
                header = part.get_slice(key)
                shape, wanted = tuple(header.get_shape()), tuple(state[key].shape) if key in state else None
                if shape != wanted:
                    asks = f"shape {wanted}" if key in state else "no such tensor"
                    raise ValueError(f"{name}: {key} has shape {shape}, config.json asks for {asks}.")
                if header.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    raise ValueError(f"{name}: {key} is {header.get_dtype()}; use the unquantised checkpoint.")
                found[key] = part
        if missing := sorted(set(state) - set(found)):
            raise ValueError(f"{path}: {len(missing)} tensors are missing, the first is {missing[0]}.")
        if twice is not None:
            embedding = found["model.embed_tokens.weight"].get_tensor("model.embed_tokens.weight")
            if twice.shape != embedding.shape or not (twice == embedding).all():
                raise ValueError(f"{path}: lm_head.weight differs from model.embed_tokens.weight; set tie_word_embeddings "
                                 "to false in config.json.")
        model = (shard(model, replicas) if sharded else model).to_empty(device=device)
        state = model.state_dict()
        for key, part in found.items():
            tensor = part.get_tensor(key)
            if not tensor.isfinite().all():
                raise ValueError(f"{path}: {key} holds NaN or infinity; copy or train it again.")
            fill(state[key], tensor)
    return model


def weight_files(path: Path) -> list[Path]:
    """The files that hold a checkpoint's weights, all of them in its directory."""
    if (path / "model.safetensors").exists():  # transformers, too, looks here first; it leaves an old index beside it
        return [path / "model.safetensors"]
    index = path / INDEX
    names = read_json(index).get("weight_map") if index.exists() else {"": "model.safetensors"}
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index}: weight_map is {names!r:.60}; make it an object that names each tensor's file.")
    for name in names.values():
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise ValueError(f"{index}: weight_map names {name!r:.60}; it may name .safetensors files beside it alone.")
    return [path / name for name in sorted(set(names.values()))]


@contextmanager
def opened(files: list[Path], device="cpu"):
    """Safetensors files, open at once. Raises ValueError for one that is missing or damaged."""
    with ExitStack() as stack:
        parts = []
        for file in files:
            if not file.exists():
                raise ValueError(f"{file} does not exist; what it belongs to is incomplete, copy it again (as safetensors), "
                                 "or end the training that began it: the same command goes on.")
            try:
                parts.append(stack.enter_context(safe_open(file, framework="pt", device=str(device))))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is damaged ({error!s:.200}); copy or train it again.") from None
        yield parts


def new(path: str | Path, seed: int = 0) -> Transformer:
    """Random weights for the architecture that a directory's config.json describes."""
    path = Path(path) / "config.json"
    return Transformer(ModelConfig.from_dict(read_json(path), str(path))).init_weights(seed)


def save(model: Transformer, path: str | Path, like: str | Path | None = None, run: dict | None = None,
         max_bytes: float = 5e9):
    """Writes a directory that `load` and transformers open (vLLM: untried). All ranks call it; rank 0 writes.

    like: the checkpoint whose tokenizer files go along. run: what made it; kept under "run" in config.json, which other
    readers pass over. max_bytes: weights beyond it are spread over several files. Everything is written to a temporary
    directory first. A new checkpoint is then renamed into place. In a run's directory, which holds other files too,
    each is replaced whole; weights of several files take new names beside the old, until the index that names them is
    replaced, last: whoever reads or kills this finds one save whole, never parts of two.
    """
    state = {key: value.detach().cpu().contiguous() for key, value in full_state(model).items()}
    if rank() == 0:
        path, source = Path(path).absolute(), resolve(like) if like is not None else None
        fresh = path.with_name(path.name + ".tmp")
        with writing(path):
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            live = (path / INDEX).read_text() if (path / INDEX).exists() else ""
            write_weights(state, fresh, max_bytes, "model-again" if '"model-0' in live else "model")
            raw, dtype = model.config.raw, str(next(iter(state.values())).dtype).removeprefix("torch.")
            stored = {"dtype" if "dtype" in raw else "torch_dtype": dtype}  # of this file, not of the one it came from
            stored |= {"run": run} if run else {}
            (fresh / "config.json").write_text(json.dumps(raw | stored, indent=2) + "\n")
            for name in TOKENIZER_FILES:
                if source and (source / name).exists():
                    shutil.copy(source / name, fresh / name)
            flush(fresh)
            if not path.exists():
                fresh.rename(path)
            else:
                written = {file.name for file in fresh.iterdir()}
                ours = [INDEX, *(f.name for f in path.glob("model*.safetensors")), *(TOKENIZER_FILES if source else ())]
                for file in sorted(fresh.iterdir(), key=lambda f: (f.name == INDEX, f.suffix != ".safetensors")):
                    file.replace(path / file.name)
                for stale in filter(lambda name: name not in written, ours):  # the index first: it names the others
                    (path / stale).unlink(missing_ok=True)
                fresh.rmdir()
    barrier()


@contextmanager
def writing(path):
    """Says in one sentence what could not be written, and why."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {path} ({error}); what was saved there before is unharmed. Make room or give "
                         "another --out.") from None


def flush(directory: Path):
    """To the disk itself: else a machine that loses power may have carried out the renaming, and not the writing."""
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_weights(state: dict, path: Path, max_bytes: float, stem: str):
    """One file, or as many as it takes to keep each within max_bytes, with the index that says which holds what."""
    files, room = [{}], max_bytes
    for key, value in state.items():
        if files[-1] and value.nbytes > room:
            files.append({})
            room = max_bytes
        files[-1][key] = value
        room -= value.nbytes
    names = [f"{stem}-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    if len(files) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {key: name for name, part in zip(names, files) for key in part}
        index = {"metadata": {"total_size": sum(value.nbytes for value in state.values())}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for name, part in zip(names, files):
        save_file(part, path / name, metadata={"format": "pt"})


def load_tokenizer(path_or_hub_id: str) -> Tokenizer:
    path = resolve(path_or_hub_id) / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist; copy the tokenizer into the checkpoint directory.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception
        raise ValueError(f"{path} is not a tokenizer ({error!s:.200}); copy the original once more.") from None
    tokenizer.no_truncation()  # what some files ask for was meant for the training that wrote them
    tokenizer.no_padding()
    config = ModelConfig.from_dict(read_json(path.with_name("config.json")), str(path.with_name("config.json")))
    if (last := max(tokenizer.get_vocab().values(), default=0)) >= config.vocab_size:
        raise ValueError(f"{path} knows a token {last}, config.json has a vocab_size of {config.vocab_size}; they do "
                         "not belong together, copy both from one checkpoint.")
    return tokenizer


# --------------------------------------------------------------------------------------------------------------------
# Several processes: FSDP2 from outside. One process is the same code with world size 1.

def init_dist() -> torch.device:
    """Joins the other ranks if torchrun started us; returns this rank's device.

    One GPU without torchrun is a group of one: what `shard` says about precision then holds for any number of GPUs.
    """
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if (cuda or "RANK" in os.environ) and not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        # Ranks wait for the one whose episodes take longest. One that dies is noticed by torchrun, not by this limit.
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(hours=2), **alone)
    return device


def computing_dtype(device: torch.device) -> torch.dtype:
    """What a model computes in that is not trained: the precision in which `shard` lets it roll out."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def leave(status: int | str | None = None):
    """sys.exit for a script that may be one of several ranks; those end their process at once.

    Torch's caches keep the group and its threads until Python is torn down under them, which now and then aborts a rank
    whose work is done; destroy_process_group() does not reach them.
    """
    if dist.is_initialized():
        if isinstance(status, str):
            print(status, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))
    sys.exit(status)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier():
    if dist.is_initialized():
        dist.barrier()


def all_sum(values) -> torch.Tensor:
    """Element-wise sum of a list of numbers over all ranks, float64."""
    total = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        total = total.cuda() if torch.cuda.is_available() else total
        dist.all_reduce(total)
    return total.cpu()


def all_max(value: int) -> int:
    """The largest of the ranks' values; also a point where all ranks meet."""
    total = torch.tensor(value)
    if dist.is_initialized():
        total = total.cuda() if torch.cuda.is_available() else total
        dist.all_reduce(total, dist.ReduceOp.MAX)
    return int(total)


def gather(items: list) -> list:
    """The ranks' lists one after the other, on every rank."""
    if not dist.is_initialized():
        return items
    parts = [None] * world_size()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def shard(model: Transformer, replicas: int = 1) -> Transformer:
    """FSDP2: every block, then the rest, is cut into parts that are gathered just in time.

    bfloat16 compute with float32 masters and reductions on GPUs, float32 throughout on CPU. replicas: into how many
    groups the ranks divide, each holding the whole model between them (HSDP): one a node spares the network.
    """
    if not dist.is_initialized():
        return model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    if replicas < 1 or world_size() % replicas:
        raise ValueError(f"--replicas {replicas}: {world_size()} ranks do not divide into so many groups.")
    cuda = torch.cuda.is_available()
    shape = (world_size(),) if replicas == 1 else (replicas, world_size() // replicas)
    mesh = dist.init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape):])
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cuda else MixedPrecisionPolicy()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def clip_gradients(model: Transformer, limit: float) -> float:
    """Scales the gradients down to a norm of at most `limit`; returns the norm before, over all ranks' parts."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@torch.no_grad()
def fill(parameter, tensor):
    """Copies a whole tensor into a parameter; of a sharded one, this rank's part. No communication."""
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor
        tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(tensor)


@contextmanager
def unsharded(model: Transformer):
    """Yields the whole model, in the dtype that it computes in: plain modules on the gathered weights, valid inside.

    They know of no other rank, so each may run any number of forwards; sharded ranks that disagree about it hang.
    """
    parts = [m for m in model.modules() if hasattr(m, "unshard")]
    for part in parts:
        part.unshard()
    try:
        yield plain(model) if parts else model
    finally:
        for part in parts:
            part.reshard()


def plain(model: Transformer) -> Transformer:
    """Another model on the same weights, without what `shard` hung on the modules; not to be trained."""
    with torch.device("meta"):
        twin = Transformer(model.config)
    twin.load_state_dict({name: weight.detach() for name, weight in model.named_parameters()}, assign=True)
    return twin.requires_grad_(False)


def full_state(model: Transformer) -> dict:
    """The whole state dict; on several ranks gathered, complete on rank 0 only."""
    if not dist.is_initialized():
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def save_training(path: str | Path, model: Transformer, optimizer, extra: dict):
    """Writes all that a resumed run needs: weights, AdamW's state, `extra` (what JSON can hold; rank 0's counts).

    All ranks call it, each writes its part, and `load_training` reads it on any number of ranks. The directory appears
    whole: it is written beside and renamed; what it replaces stands as PATH.old until the new one is in place.
    """
    path = Path(path)
    fresh, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    tensors = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    mesh = getattr(next(model.parameters()), "device_mesh", None)
    parts = mesh.size(-1) if mesh else 1  # further replicas hold the same once more
    with writing(path):
        if rank() == 0:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
        barrier()
        if rank() < parts:
            local = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in tensors.items()}
            save_file({name: value.detach().cpu().contiguous() for name, value in local.items()},
                      fresh / f"part-{rank()}.safetensors")
        barrier()
        if rank() == 0:
            (fresh / "state.json").write_text(json.dumps({"parts": parts, "extra": extra}))
            flush(fresh)
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
                path.rename(old)
            fresh.rename(path)
            shutil.rmtree(old, ignore_errors=True)
    barrier()


def load_training(path: str | Path, model: Transformer, optimizer) -> dict:
    """Brings model and optimizer to where `save_training` left them; returns `extra`."""
    path = Path(path)
    path = path if path.exists() else path.with_name(path.name + ".old")
    saved, parameters = read_json(path / "state.json"), dict(model.named_parameters())
    count, extra = saved.get("parts"), saved.get("extra")
    if not isinstance(extra, dict) or not isinstance(count, int) or not 0 < count <= 10**5:
        raise ValueError(f"{path / 'state.json'}: parts must be a positive integer and extra an object.")
    with opened([path / f"part-{i}.safetensors" for i in range(count)]) as parts:
        names = set(parts[0].keys())
        moments = {f"{name}/{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")}
        if names not in (set(parameters), set(parameters) | moments) or any(set(p.keys()) != names for p in parts):
            raise ValueError(f"{path} holds the training state of another model; give the --model it began with, or "
                             "another --out.")
        for name in sorted(names):
            of, _, key = name.partition("/")
            parameter, state = parameters[of], optimizer.state[parameters[of]] if key else {}
            pieces = [part.get_tensor(name) for part in parts]
            if key == "step":
                state[key] = whole(pieces[:1], torch.Size(), f"{path}: {name}")
            else:
                target = state.setdefault(key, torch.zeros_like(parameter)) if key else parameter
                fill(target, whole(pieces, parameter.shape, f"{path}: {name}"))
    return extra


def whole(pieces: list, shape: torch.Size, name: str):
    """A tensor out of the ranks' parts of it: FSDP2 cuts along the first dimension."""
    fits = all(p.dtype == torch.float32 and p.ndim == len(shape) and p.shape[1:] == shape[1:] for p in pieces)
    if not fits or shape and sum(len(p) for p in pieces) != shape[0]:
        raise ValueError(f"{name} is not float32 of shape {tuple(shape)}; the state is damaged or another model's.")
    return torch.cat(pieces) if shape else pieces[0]


# --------------------------------------------------------------------------------------------------------------------
# How many GPUs do I need? From the config alone

SHAPES = {  # model_type, vocabulary, width, feed-forward width, layers, query heads, key/value heads, head size, tied
    "Llama-3.1-8B": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, False),
    "Llama-3.2-1B": ("llama", 128256, 2048, 8192, 16, 32, 8, 64, True),
    "Llama-3.2-3B": ("llama", 128256, 3072, 8192, 28, 24, 8, 128, True),
    "Qwen2.5-0.5B": ("qwen2", 151936, 896, 4864, 24, 14, 2, 64, True),
    "Qwen2.5-1.5B": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, True),
    "Qwen2.5-3B": ("qwen2", 151936, 2048, 11008, 36, 16, 2, 128, True),
    "Qwen2.5-7B": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, False),
    "Qwen3-0.6B": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, True),
    "Qwen3-1.7B": ("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, True),
    "Qwen3-4B": ("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, True),
    "Qwen3-8B": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, False),
}
CARDS = (24, 48, 80, 141)  # GiB
RESERVE = 1.1              # the CUDA context, communication buffers, and what the allocator cannot use


def shape_config(name: str) -> ModelConfig:
    """The config of a model in SHAPES, or of a directory's config.json."""
    if name not in SHAPES:
        path = Path(name) if (Path(name) / "config.json").exists() else None
        if path is None:
            raise ValueError(f"--plan {name}: neither a directory with config.json nor one of {', '.join(SHAPES)}.")
        return ModelConfig.from_dict(read_json(path / "config.json"), str(path / "config.json"))
    names = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "tie_word_embeddings")
    return ModelConfig.from_dict(dict(zip(names, SHAPES[name])))


def plan(c: ModelConfig, gpus: int, context: int, episodes: int, recompute: bool = True, replicas: int = 1) -> dict:
    """Bytes per GPU of one M-GRPO step, {phase: {what: bytes}}: one packed row of `context` tokens a micro-batch.

    The phases rollout, training and update take turns, so the largest counts; see `peak`.
    A block's activations are the tensors that autograd keeps in bfloat16 compute: input and output of two norms, q, k,
    v, the attention's output, and the two feed-forward products (see `recomputed`).
    """
    with torch.device("meta"):
        model = Transformer(c)
    total, block = (sum(p.numel() for p in m.parameters()) for m in (model, model.model.layers[0]))
    ends, part = total - block * c.num_hidden_layers, replicas / gpus
    D, E, H, K = c.hidden_size, c.head_dim, c.num_attention_heads, c.num_key_value_heads
    activations = context * 2 * (4 * D + 2 * (H + K) * E + 2 * c.intermediate_size)
    kept = activations + 2 * context * D * c.num_hidden_layers if recompute else activations * c.num_hidden_layers
    return {
        "always": {"weights, float32": 4 * total * part, "Adam's two moments, float32": 8 * total * part,
                   "reference policy, float32": 4 * total * part},
        "rollout": {"unsharded copy, bfloat16": 2 * total, "both ends of the reference, bfloat16": 2 * ends,
                    f"KV cache of {episodes} episodes": 2 * 2 * c.num_hidden_layers * K * E * episodes * context},
        "training": {"gradients, float32": 4 * total * part,
                     "gathered of both policies, bfloat16": 2 * 2 * (ends + 2 * block),  # both ends, a block, the next
                     "gradients before their reduction": 2 * (ends + block) + 4 * max(ends, block),
                     "activations" + (", recomputed" if recompute else ""): kept,
                     "LM head, 1,024 positions at a time": 4 * 4 * 1024 * c.vocab_size},
        "update": {"gradients, float32": 4 * total * part, "AdamW's own copy, float32": 4 * total * part}}


def peak(parts: dict) -> float:
    """GiB a card must have."""
    always, *turns = (sum(parts[phase].values()) for phase in ("always", "rollout", "training", "update"))
    return (always + max(turns)) * RESERVE / 2 ** 30


def print_plan(args):
    config = shape_config(args.plan)
    if args.gpus < 1 or args.replicas < 1 or args.gpus % args.replicas:
        raise ValueError(f"--gpus {args.gpus} do not divide into --replicas {args.replicas}; give a multiple of it.")
    if args.context < 1 or args.episodes < 1:
        raise ValueError(f"--context {args.context}, --episodes {args.episodes}; give positive numbers.")
    needs = lambda gpus: plan(config, gpus, args.context, args.episodes, not args.no_recompute, args.replicas)
    parts = needs(args.gpus)
    print(f"{args.plan} on {args.gpus} GPU{'s' * (args.gpus > 1)}, {args.context:,} tokens of context, "
          f"{args.episodes} episodes at once on each GPU; GiB per GPU (estimated):")
    for phase, lines in parts.items():
        print("\n".join(f"  {phase:10}{what:42}{size / 2 ** 30:8.1f}" for what, size in lines.items()))
    print(f"  {'peak':10}{'the largest of the three phases + 10%':42}{peak(parts):8.1f}\n")
    for card in CARDS:
        enough = next((n for n in (args.replicas * 2 ** i for i in range(11)) if peak(needs(n)) <= card), None)
        spare = card - peak(parts)
        verdict = f"fits, {spare:.0f} GiB to spare" if spare >= 0 else f"lacks {-spare:.0f} GiB"
        remedy = (f"{enough} GPU{'s' * (enough > 1)} would do" if enough else
                  "no number of GPUs would do: take fewer episodes, a shorter context or a smaller model")
        print(f"  {card:4} GB cards: {verdict}; {remedy}")


def main():
    parser = argparse.ArgumentParser(description="Complete a raw prompt, or plan a training run's memory.")
    parser.add_argument("model", nargs="?", help="checkpoint directory or hub id")
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print prompt_ids, ids, logps and text")
    parser.add_argument("--plan", metavar="NAME", help=f"memory of M-GRPO on a directory or {', '.join(SHAPES)}")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--context", type=int, default=16384, help="tokens of the longest episode")
    parser.add_argument("--episodes", type=int, default=8, help="decoded side by side on each GPU")
    parser.add_argument("--replicas", type=int, default=1, help="groups of GPUs that each hold the whole model (HSDP)")
    parser.add_argument("--no-recompute", action="store_true", help="keep all activations instead of recomputing them")
    args = parser.parse_args()
    if args.plan:
        return print_plan(args)
    if args.prompt is None:
        parser.error("give a checkpoint and a prompt, or --plan NAME")
    if args.max_new_tokens < 1 or not 0 <= args.temperature < math.inf:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}, --temperature {args.temperature}; give at least 1 and 0.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = resolve(args.model)
    tokenizer = load_tokenizer(path)
    prompt_ids = tokenizer.encode(args.prompt).ids
    if not prompt_ids:
        raise ValueError("the prompt is empty, and this tokenizer begins it with nothing; give a word.")
    model = load(path, computing_dtype(device), device)
    # Which tokens end a text: chat models often name all of them in generation_config.json alone.
    generation = path / "generation_config.json"
    settings = model.config.raw | (read_json(generation) if generation.exists() else {})
    stop = settings.get("eos_token_id")
    ids, logps = generate(model, prompt_ids, args.max_new_tokens, args.temperature,
                          stop if isinstance(stop, list) else [stop], args.seed)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    record = {"prompt_ids": prompt_ids, "ids": ids, "logps": logps, "text": text}
    print(json.dumps(record) if args.json else args.prompt + text)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"model.py: {error}")
