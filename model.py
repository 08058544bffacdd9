"""The policy: a Llama / Qwen decoder, its KV cache, its sampler, LoRA, and FSDP2 around it.

    x = x + Attention(RMSNorm(x));   x = x + SwiGLU(RMSNorm(x));   logits = RMSNorm(x) · W_head

The project's correctness argument: what a rollout records (`sample`) and what training differentiates
(`token_logprobs`) are read off the logits of the same `forward`, so their log-probs agree to rounding.

    python model.py DIR "Once upon a time" --max-new-tokens 20 --temperature 0
    python tests/tools/plan.py Llama-3.1-8B --gpus 8 --context 16384   # how many GPUs do I need?

A checkpoint is a Hugging Face directory: config.json, *.safetensors, tokenizer.json. Its tensors have the
same names in `state_dict`. `adapt` (LoRA) and `shard` (FSDP2) change a built model in place; its
forward pass knows neither.

Suffixes say a tensor's shape: x_BTD is (B, T, D).
Dimension key: B rows, T tokens, D width, H query heads, K key/value heads, E head size, P = E/2 pairs that
RoPE rotates, V vocabulary, L layers, S cache slots, C attended positions, N scored tokens, M of them at once.
"""
from __future__ import annotations

# First, before torch. `reading` and `writing` turn errors into sentences that name the file.
from run import (barrier, delete_directory, fill, fingerprint, is_sharded, rank, read_json, reading, reshard,
                 world_size, writing)

import argparse
import json
import math
import random
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_type_hints

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint as recompute_in_backward

# ----------------------------------------------------------------- the decoder, from the outside in


class Transformer(nn.Module):
    """The decoder. Its modules and tensors have Hugging Face's names."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.lora = 0  # the rank of the adapters that `adapt` has added
        self.frozen_from = ("", {})  # with adapters: the checkpoint of the frozen weights, their fingerprint
        self.recompute = False  # activation checkpointing, see `recomputed`
        self.fork_heads = {}  # a fork's own, such as a value head; in a plain dict, so checkpoints leave them out

        embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.model = nn.ModuleDict({"embed_tokens": embedding, "layers": nn.ModuleList(blocks),
                                    "norm": norm})
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Not a buffer: casting the model to bfloat16 must not round the frequencies.
        self.frequencies_P = rope_frequencies(config)

    def forward(self, tokens_BT, positions_BT=None, cache: KVCache | None = None,
                slots: slice = slice(None), head=None, segments: list[tuple] | None = None,
                end: int | None = None):
        """Token ids (B, T) -> logits (B, T, V), or what `head` makes of the last hidden states.

        positions_BT: each token's position in its sequence, 0..T-1 by default.
        cache, slots: write keys and values into these slots of it; attend to all earlier positions there.
        end: attend to the first `end` positions of the cache; all of positions_BT are below it. None: take
        max(positions_BT) + 1, for which Python waits for the GPU.
        head: replaces the LM head, whose logits for a page of 8,000 tokens take 5 GB. Let it return new tensors:
        FSDP2 warns of views.
        segments: for packed training only; compress.pack makes them and has an example. One tuple (start,
        stop, context_start, context_stop) for each piece of the only row (B = 1); give positions_BT as well.
        A segment's tokens see each other causally. They also see tokens context_start..context_stop, the
        beginning of an earlier segment, and all that this earlier segment sees as its own context.
        """
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        cache_view = None
        if cache is not None:
            cache_view = CacheView(cache, slots, positions_BT, end)
        self.frequencies_P = self.frequencies_P.to(tokens_BT.device)

        x_BTD = self.model.embed_tokens(tokens_BT)
        rotation = rope(positions_BT, self.frequencies_P, x_BTD.dtype)
        recompute = self.recompute and torch.is_grad_enabled()  # without gradients nothing is kept for a backward pass
        for block in self.model.layers:
            if recompute:
                x_BTD = recomputed(block, x_BTD, rotation, cache_view, segments)
            else:
                x_BTD = block(x_BTD, rotation, cache_view, segments)
        x_BTD = self.model.norm(x_BTD)

        if head is None:
            head = self.logits
        return head(x_BTD)

    def logits(self, x):
        """(..., D) -> (..., V) by the LM head, which small models share with the embedding."""
        if self.config.tie_word_embeddings:
            return F.linear(x, self.model.embed_tokens.weight)
        return F.linear(x, self.lm_head.weight)

    def last_logits(self, x_BTD):
        """A `head` for decoding: (B, T, D) -> (B, V), the logits of each row's next token."""
        return self.logits(x_BTD[:, -1])


class Block(nn.Module):
    """Attention, then an MLP, each behind a norm and added to the residual stream: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTD, rotation, cache_view, segments):
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotation, cache_view, segments)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        bias = config.model_type == "qwen2"  # no flag in its config.json says so
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=False)
        # Qwen3 normalizes every head's queries and keys, before their rotation.
        self.q_norm = nn.Identity()
        self.k_norm = nn.Identity()
        if config.model_type == "qwen3":
            self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_BTD, rotation: tuple, cache_view: CacheView | None, segments: list | None):
        B, T, _ = x_BTD.shape
        q_BTHE = self.q_proj(x_BTD).view(B, T, -1, self.head_dim)
        k_BTKE = self.k_proj(x_BTD).view(B, T, -1, self.head_dim)
        v_BTKE = self.v_proj(x_BTD).view(B, T, -1, self.head_dim)
        q_BHTE = self.q_norm(q_BTHE).transpose(1, 2)
        k_BKTE = self.k_norm(k_BTKE).transpose(1, 2)
        v_BKTE = v_BTKE.transpose(1, 2)

        q_BHTE = rotate(q_BHTE, *rotation)
        k_BKTE = rotate(k_BKTE, *rotation)

        if segments is not None:
            y_BHTE = attend_packed(q_BHTE, k_BKTE, v_BKTE, segments)
        elif cache_view is not None:
            k_BKCE, v_BKCE = cache_view.write(self.layer, k_BKTE, v_BKTE)
            y_BHTE = attend(q_BHTE, k_BKCE, v_BKCE, cache_view.mask_B1TC)
        else:
            y_BHTE = attend(q_BHTE, k_BKTE, v_BKTE)
        return self.o_proj(y_BHTE.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def recomputed(function, *inputs):
    """function(*inputs). Autograd keeps the inputs only; the backward pass runs it once more."""
    return recompute_in_backward(function, *inputs, use_reentrant=False, preserve_rng_state=False)


# ---------------------------------------------------------- positions, attention, and the KV cache


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """Speed of each of the E/2 rotations, radians per token. Llama 3.1 slows the slow ones.

    NOTE Keep transformers' order of operations: a difference in the last bit becomes another angle
    at position 16,000, and the logits drift.
    """
    # On the CPU, even where `load` and `unsharded` build the model without memory, on "meta".
    exponent_P = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    freq_P = 1 / config.rope_theta ** (exponent_P / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return freq_P

    # keep_P is 1 for pairs that turn often within the pre-training context, 0 for those that hardly turn.
    wavelength_P = 2 * math.pi / freq_P
    turns_P = scaling["original_max_position_embeddings"] / wavelength_P
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    keep_P = ((turns_P - low) / (high - low)).clamp(0, 1)
    return (1 - keep_P) * freq_P / scaling["factor"] + keep_P * freq_P


def rope(positions_BT, frequencies_P, dtype):
    """`rotate`'s tables, (B, 1, T, E). A pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
    angle_B1TP = positions_BT[:, None, :, None].float() * frequencies_P
    cos = angle_B1TP.cos()
    sin = angle_B1TP.sin()
    cos_B1TE = torch.cat((cos, cos), dim=-1).to(dtype)
    sin_B1TE = torch.cat((-sin, sin), dim=-1).to(dtype)
    return cos_B1TE, sin_B1TE


def rotate(x_BHTE, cos_B1TE, sin_B1TE):
    """Rotates each head's pairs (x[i], x[i + E/2]), as in Hugging Face's layout, and not (x[2i], x[2i + 1])."""
    swapped_BHTE = x_BHTE.roll(x_BHTE.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BHTE * cos_B1TE, swapped_BHTE, sin_B1TE)


def attend(q_BHTE, k_BKCE, v_BKCE, mask_B1TC=None):
    """Grouped-query attention of T queries to C >= T keys. Without a mask the last query sees the last key.

        nothing before the queries    T = C    causal
        keys before the queries       T < C    causal, aligned at the lower right: prefill in chunks, packed segments
        decoding without a mask       T = 1    everything: all rows hold equally many keys
        with a mask                            what mask_B1TC says: rows hold different numbers of keys

    NOTE SDPA's is_causal aligns its triangle at the upper left, which is wrong for C > T.
    """
    B, H, T, E = q_BHTE.shape
    _, K, C, _ = k_BKCE.shape
    if mask_B1TC is None and T > 1:
        lower_right = None
        if C > T:
            lower_right = causal_lower_right(T, C)
        return F.scaled_dot_product_attention(q_BHTE, k_BKCE, v_BKCE, attn_mask=lower_right,
                                              is_causal=C == T, enable_gqa=H != K)

    # T = 1 or a mask. The H / K query heads that share a key head become further queries of a single head. So both
    # sides have K heads, and no keys are copied.
    sharing = H // K
    q = q_BHTE.reshape(B, K, sharing * T, E)
    mask = None
    if mask_B1TC is not None:
        mask = mask_B1TC.repeat(1, 1, sharing, 1)
    out = F.scaled_dot_product_attention(q, k_BKCE, v_BKCE, attn_mask=mask)
    return out.reshape(B, H, T, E)  # not view: some kernels return transposed memory


def attend_packed(q_BHTE, k_BKTE, v_BKTE, segments):
    """`attend` for each segment, to its context and itself; see `Transformer.forward`.

    NOTE `split`, not slices: a slice's backward pass fills a whole row with zeros, which for a
    hundred short segments costs more than everything else.
    """
    lengths = [stop - start for start, stop, _, _ in segments]
    q_parts = q_BHTE.split(lengths, dim=2)
    k_parts = k_BKTE.split(lengths, dim=2)
    v_parts = v_BKTE.split(lengths, dim=2)

    seen = {}  # where a segment starts -> the keys and the values that it attends to, in pieces: the last are its own
    y_parts = []
    for segment, q, k, v in zip(segments, q_parts, k_parts, v_parts):
        start, _, context_start, context_stop = segment
        # 1) Its context: all that an earlier segment attends to, but only the first of that segment's own tokens.
        ks = [k]
        vs = [v]
        n_first = context_stop - context_start
        if n_first != 0:
            assert context_start in seen, "a context is the first tokens of an earlier segment; none begins there"
            earlier_ks, earlier_vs = seen[context_start]
            *k_context, k_own = earlier_ks
            *v_context, v_own = earlier_vs
            assert 0 < n_first <= k_own.shape[2], "a context is the first tokens of an earlier segment, not more"
            ks = [*k_context, k_own[:, :, :n_first], k]
            vs = [*v_context, v_own[:, :, :n_first], v]
        seen[start] = ks, vs

        # 2) Attend to the context and to itself.
        k_seen = torch.cat(ks, dim=2)
        v_seen = torch.cat(vs, dim=2)
        y_parts.append(attend(q, k_seen, v_seen))
    return torch.cat(y_parts, dim=2)


class KVCache:
    """Keys and values of S sequences side by side, so that many episodes decode in one batch.

    The caller keeps each sequence's length. Keys beyond it are masked. To cut a sequence, use a smaller
    length; nothing is erased, and idle slots may write garbage there. Memory: 2 · L · S · K · length · E numbers.
    """

    def __init__(self, config: ModelConfig, n_slots: int, length: int, dtype=torch.float32,
                 device="cpu"):
        self.n_slots = n_slots
        self.length = length
        shape = (config.num_hidden_layers, n_slots, config.num_key_value_heads, length,
                 config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)


class CacheView:
    """What one forward pass reads and writes of a KVCache, in all its layers.

    mask_B1TC: 0 where a query sees a key, else -inf. None if `end` is left out and all rows write the
    last T positions. If `end` is given, there is always a mask.
    """

    def __init__(self, cache: KVCache, slots: slice, positions_BT, end: int | None):
        self.positions_BT = positions_BT
        self.mask_B1TC = None
        self.aligned = False
        if end is None:
            # Read the positions, for which Python must wait for the GPU.
            low, high = torch.stack(positions_BT.aminmax()).tolist()
            assert high < cache.length, f"position {high} is beyond the cache's {cache.length} positions"
            end = high + 1
            # If every row holds the same T consecutive positions, causal attention needs no mask.
            T = positions_BT.shape[1]
            self.aligned = end - low == T
        if not self.aligned:
            cached_C = torch.arange(end, device=positions_BT.device)
            unseen_B1TC = cached_C > positions_BT[:, None, :, None]
            # A float mask, because every layer would have to convert a bool one.
            mask_B1TC = torch.where(unseen_B1TC, -torch.inf, 0.0)
            self.mask_B1TC = mask_B1TC.to(cache.k.dtype)
        self.k = cache.k[:, slots, :, :end]  # slices: no copies
        self.v = cache.v[:, slots, :, :end]

    def write(self, layer: int, k_BKTE, v_BKTE):
        """Stores new keys and values; returns all that are attended to, (B, K, C, E) each."""
        self._store(self.k[layer], k_BKTE)
        self._store(self.v[layer], v_BKTE)
        return self.k[layer], self.v[layer]

    def _store(self, cached_BKCE, new_BKTE):
        T = new_BKTE.shape[2]
        if self.aligned:
            cached_BKCE[:, :, -T:] = new_BKTE
        else:
            # Not scatter_, which copies all of a sliced cache on a CPU. Dimensions of index tensors on both
            # sides of a slice come first, so the left side below has the shape (B, T, K, E).
            row_B1 = torch.arange(len(new_BKTE), device=new_BKTE.device)[:, None]
            cached_BKCE[row_B1, :, self.positions_BT] = new_BKTE.transpose(1, 2)


# -------------------------------------------- sampling and scoring: two readings of the same logits


def log_probs(logits, temperature: float):
    """Log-softmax in float32 at a temperature; at temperature 1 if that is 0 (greedy decoding)."""
    return (logits.float() / (temperature or 1.0)).log_softmax(-1)


def sample(logits_BV, uniform_B, temperature: float = 1.0):
    """Draws one token per row; returns (ids_B, logp_B), log-probs under the sampled distribution.

    uniform_B: one number in [0, 1) per row, from the row's own generator, so that its token does
    not depend on the rest of the batch. Float64, because float32 rounds the largest up to 1.
    temperature 0 takes the most likely token and reports its log-prob at temperature 1.
    """
    logp_BV = log_probs(logits_BV, temperature)
    if temperature == 0:
        ids_B = logp_BV.argmax(-1)
    else:
        # The token at which the cumulative probability passes the random number.
        cdf_BV = logp_BV.exp().double().cumsum(-1)
        total_B1 = cdf_BV[:, -1:]  # 1, up to rounding
        threshold_B1 = uniform_B.to(cdf_BV)[:, None] * total_B1
        ids_B = torch.searchsorted(cdf_BV, threshold_B1, right=True)[:, 0]
        ids_B = ids_B.clamp(max=logits_BV.shape[-1] - 1)  # nan, from broken weights, would be one past the end
    logp_B = logp_BV.gather(-1, ids_B[:, None])[:, 0]
    return ids_B, logp_B


def token_logprobs(model: Transformer, tokens_BT, action_BT, temperature=1.0, chunk=1024,
                   positions_BT=None, segments=None):
    """Log-prob and entropy of each token marked in the bool mask action_BT, given those before it.

    Returns (logp_N, entropy_N, hidden_ND) in row-major order. hidden_ND are the last hidden states that
    predict the N tokens. All three carry a gradient: a fork may add an entropy bonus, or a value head on the
    hidden states that trains the policy's layers as well. positions_BT and segments: as in `forward`.

    Float32 logits (N, V) never exist as a whole. The LM head runs on the N marked positions only, `chunk` at
    a time, and the backward pass recomputes each chunk. All this happens in `head`, inside the model's
    forward, because FSDP holds the LM head's weights only there.
    """
    starts = [0]
    if segments:
        starts = [start for start, *_ in segments]
    assert not action_BT[:, starts].any(), "nothing predicts the first token of a row or segment"
    targets_N = tokens_BT[action_BT]
    predicting_BT = action_BT.roll(-1, dims=1)  # the hidden state at t - 1 predicts token t

    def score_chunk(x_MD, target_M):
        logp_MV = log_probs(model.logits(x_MD), temperature)
        entropy_M = -(logp_MV.exp() * logp_MV).sum(-1)
        logp_M = logp_MV.gather(-1, target_M[:, None])[:, 0]
        return logp_M, entropy_M

    def head(x_BTD):
        hidden_ND = x_BTD[predicting_BT]
        logps = []
        entropies = []
        for x_MD, target_M in zip(hidden_ND.split(chunk), targets_N.split(chunk)):
            logp_M, entropy_M = recomputed(score_chunk, x_MD, target_M)
            logps.append(logp_M)
            entropies.append(entropy_M)
        return torch.cat(logps), torch.cat(entropies), hidden_ND

    return model(tokens_BT, positions_BT, head=head, segments=segments)


class GraphedStep:
    """Decoding on a GPU: one token for each slot of a cache, launched as one CUDA graph.

    A step of few rows is a thousand small kernels, and the GPU waits for Python between them. A
    graph launches them together, but fixes shapes and addresses. So all slots take part (idle ones
    write an unused position), tokens and positions lie in buffers, and the part of the cache that
    is read grows by STRIDE, one graph per size. Valid while the weights stay where they are.
    """
    STRIDE = 1024

    def __init__(self, model: Transformer, cache: KVCache):
        self.model = model
        self.cache = cache
        device = cache.k.device
        self.tokens_S1 = torch.zeros(cache.n_slots, 1, dtype=torch.long, device=device)
        self.positions_S1 = torch.zeros_like(self.tokens_S1)
        self.graphs: dict[int, tuple] = {}  # positions read -> (graph, the logits it writes)
        self.pool = None  # of memory; graphs can share one, since one runs at a time

    def __call__(self, tokens_S1, positions_S1, last_position: int):
        """The next token's logits (S, V), valid until the next call. last_position: over all slots."""
        length = self.cache.length
        assert last_position < length, f"position {last_position} is beyond the cache's {length} positions"
        self.tokens_S1.copy_(tokens_S1)
        self.positions_S1.copy_(positions_S1)
        strides = last_position // self.STRIDE + 1
        end = min(strides * self.STRIDE, length)
        if end not in self.graphs:
            self.graphs[end] = self.capture(end)
        graph, logits_SV = self.graphs[end]
        graph.replay()
        return logits_SV

    def step(self, end: int):
        return self.model(self.tokens_S1, self.positions_S1, self.cache,
                          head=self.model.last_logits, end=end)

    def capture(self, end: int):
        self.step(end)  # libraries set themselves up at their first call, which cannot be captured
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL has a thread of its own, whose calls would end a capture.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            logits_SV = self.step(end)
        self.pool = graph.pool()
        return graph, logits_SV


# ------------------------------------------------------------------------------------- config.json

SUPPORTED = {  # feature: the values that `forward` computes; (): refused if a config asks for it at all
    "model_type": ("llama", "qwen2", "qwen3"),
    "hidden_act": ("silu",),
    "rope_type": ("default", "llama3"),
    "rope_scaling": (),  # keys of it that nothing reads
    "partial_rotary_factor": (),
    "layer_types": (),  # other than full_attention
    "use_sliding_window": (),
    "sliding_window": (),
    "quantization_config": (),
    "attention_bias": (),  # Qwen2 has biases without the flag
    "mlp_bias": (),
}


@dataclass
class ModelConfig:
    """The part of Hugging Face's config.json that `forward` needs. raw: all of it, for `save`."""
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

    @classmethod
    def from_dict(cls, raw: dict, source: str | Path = "config.json") -> ModelConfig:
        """Raises ValueError naming `source` if it is damaged or asks for what we do not support."""
        with reading(source):
            # 1) Two spellings are in use; transformers goes by rope_scaling if a file has both. The newer
            #    one also holds rope_theta.
            rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
            rope_type = rope.get("rope_type") or rope.get("type") or "default"
            refuse_unsupported(raw, rope, rope_type)

            # 2) What a file may leave out or set to null.
            width = raw["hidden_size"]
            heads = raw["num_attention_heads"]
            values = {
                "num_key_value_heads": heads,
                "head_dim": width // heads,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e4,
                "tie_word_embeddings": False,
            }

            # 3) What it says.
            for key, value in (raw | rope).items():
                if value is not None:
                    values[key] = value
            values["raw"] = raw
            values["rope_scaling"] = rope if rope_type == "llama3" else None
            config = cls(**{field.name: values[field.name] for field in fields(cls)})

            # 4) Text where a number or a flag is due would fail much later, or not at all ("false" is true).
            for name, kind in get_type_hints(cls).items():
                value = getattr(config, name)
                if kind is float and type(value) is int:
                    kind = int  # 10000 for 10000.0
                if kind in (int, float, bool) and type(value) is not kind:
                    raise ValueError(f"{name} is {value!r:.60}, not of type {kind.__name__}")
            refuse_impossible(config)
            return config


def refuse_impossible(config: ModelConfig):
    """Raises ValueError if no model can have these sizes, or if its outputs would be nan."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 1")
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is not even")
    if not 0 < config.rope_theta < math.inf:
        raise ValueError(f"rope_theta is {config.rope_theta}; it must be finite and above 0")
    if not 0 <= config.rms_norm_eps < math.inf:
        raise ValueError(f"rms_norm_eps is {config.rms_norm_eps}; it must be finite and at least 0")
    longest = config.raw.get("max_position_embeddings")
    if longest is not None and type(longest) is not int:
        raise ValueError(f"max_position_embeddings is {longest!r:.60}, not of type int")
    frequencies_P = rope_frequencies(config)
    if not all(0 < frequency < math.inf for frequency in frequencies_P.tolist()):
        raise ValueError(f"rope_theta {config.rope_theta} and rope_scaling {config.rope_scaling} turn pairs at speeds "
                         "that are not finite and above 0")


def refuse_unsupported(raw: dict, rope: dict, rope_type: str):
    """Raises ValueError if a config asks for a feature that `forward` does not compute."""
    # The features that the config asks for. Values that change nothing do not count.
    asked = dict(raw)
    asked["rope_type"] = rope_type
    unread = {}  # keys of rope_scaling that no code reads: "llama3" reads all its keys, "default" only those in `read`
    if rope_type == "default":
        read = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
        unread = {key: value for key, value in rope.items() if key not in read}
    asked["rope_scaling"] = unread
    part = (raw | rope).get("partial_rotary_factor")
    asked["partial_rotary_factor"] = None if part == 1 else part
    asked["layer_types"] = set(raw.get("layer_types") or ()) - {"full_attention"}
    if raw.get("use_sliding_window") is False:  # Qwen's configs name a window that they do not use
        asked["sliding_window"] = None
    for feature, supported in SUPPORTED.items():
        value = asked.get(feature)
        if value and value not in supported:
            raise ValueError(f"{feature} {value!r:.60} is not supported; "
                             f"supported: {', '.join(supported) or 'none'}")


# ------------------------------------------------------------- checkpoints in Hugging Face's layout

# What `save` copies from the checkpoint that training began with.
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
              "chat_template.jinja", "agent.json")


def resolve(path: str | Path) -> Path:
    """The checkpoint's directory. A path that is no directory is a hub id: from the hub's cache, or downloaded."""
    path = Path(path)
    if path.is_dir():
        return path
    with reading(f"the checkpoint {path}"):
        # A missing runs/bc is a spelling mistake; do not make the user wait for the hub.
        if len(path.parts) != 2 or path.parts[0] in ("runs", "worlds"):
            raise ValueError("it is neither a directory nor a Hugging Face hub id; "
                             "train it first, or give another --model")
        if path.parent.is_dir():
            raise ValueError(f"there is no {path.name} in the directory {path.parent}; "
                             "if you mean a model of the hub, rename that directory")
        from huggingface_hub import snapshot_download
        files = ["*.json", "*.safetensors", "*.jinja"]
        return Path(snapshot_download(str(path), allow_patterns=files))


def load_tokenizer(path: str | Path) -> Tokenizer:
    file = resolve(path) / "tokenizer.json"
    with reading(file):
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()  # some files ask for what their own training needed
        tokenizer.no_padding()
        return tokenizer


def load(path: str | Path, dtype=torch.float32, device="cpu", sharded=False,
         lora: int | None = None, precision: str | None = None) -> Transformer:
    """Opens a checkpoint. sharded: cut by `shard` first, so that no process holds more than its part.

    Tensors are read one at a time into an empty model, so there is never a second full copy.
    dtype: of the weights; adapters are always float32.
    lora: which adapters to open.
        None     those that were saved, if any
        0        none: a LoRA policy's merged weights instead
        r > 0    to train: those that were saved, which must have rank r; without any, new ones, which change
                 nothing yet (B = 0)
    precision: that of `shard`, see `computing_dtype`.
    """
    base = str(path)  # where the full weights are; those behind saved adapters are in another checkpoint
    path = resolve(path)
    config_file = path / "config.json"
    config = ModelConfig.from_dict(read_json(config_file), config_file)
    r = lora or 0
    adapters = {}
    if lora != 0 and (path / ADAPTERS).exists():
        base, r, adapters = read_adapters(path)
        if lora not in (None, r):
            raise ValueError(f"cannot use {path}: its adapters have rank {r}; give --lora {r} to train them "
                             "on, or --lora 0 to train all weights.")

    # 1) The model, without memory for its weights ("meta"), cut, and only then with memory.
    with torch.device("meta"):
        with reading(config_file):
            model = Transformer(config).to(dtype)
        adapt(model, r)  # outside of `reading`: a rank above the width is no fault of the file
    if sharded:
        shard(model, precision)
    with reading(f"{path}: no memory for its weights on {device}"):
        model.to_empty(device=device)

    # 2) The adapters. `as_reference` needs those of the checkpoint, since training changes them.
    missing = model.state_dict()  # the tensors still to fill
    if r:
        model.frozen_from = (base, fingerprint(resolve(base)))
        with reading(path / ADAPTERS):
            initial = adapters or new_adapters(missing)
            for name, adapter in initial.items():
                fill(missing.pop(name), adapter)
            if adapters:
                keep_reference(model, adapters, device)

    # 3) The other weights. Some writers also store what the model shares or computes: leave that out.
    for file in weight_files(resolve(base)):
        with reading(file), safe_open(file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():
                shared = name == "lm_head.weight" and config.tie_word_embeddings
                computed = name.endswith("inv_freq")
                if shared or computed:
                    continue
                if name not in missing:
                    raise ValueError(f"it holds {name}, for which config.json has no place")
                weight = tensors.get_tensor(name)
                if not weight.is_floating_point() or not weight.isfinite().all():
                    raise ValueError(f"not all values of {name} are finite floating-point numbers")
                fill(missing.pop(name), weight)
    if missing:
        raise ValueError(f"cannot use {path}: no {min(missing)}, {len(missing)} tensors missing")
    return model


def weight_files(path: Path) -> list[Path]:
    whole = path / "model.safetensors"
    if whole.exists():
        return [whole]
    parts = sorted(path.glob("model-*.safetensors"))  # of a large model on the hub
    return parts or [whole]


def load_for_training(path: str | Path, device, lora: int = 0, precision: str | None = None) -> Transformer:
    """`load`, sharded over the ranks, with float32 weights; LoRA's frozen ones have the computing dtype."""
    dtype = computing_dtype(device, precision) if lora else torch.float32
    return load(path, dtype, device, sharded=True, lora=lora, precision=precision)


def check_fit(model: Transformer, tokenizer: Tokenizer, max_context: int):
    """Refuses what the model cannot read: contexts longer than those it was trained on, ids without an embedding."""
    longest = int(model.config.raw.get("max_position_embeddings") or max_context)
    if max_context > longest:
        raise ValueError(f"--max-context {max_context}: the model knows {longest} positions; give at most that.")
    largest = max(tokenizer.get_vocab().values())
    if largest >= model.config.vocab_size:
        raise ValueError(f"the tokenizer has ids up to {largest}, the model {model.config.vocab_size} embeddings; "
                         "resize the model's embeddings, or take the tokenizer that it was trained with.")


def config_json(model: Transformer) -> dict:
    """The model's config.json, with the dtype of the weights that `save` writes."""
    config = dict(model.config.raw)
    key = "dtype" if "dtype" in config else "torch_dtype"
    # Not model.model.norm.weight: FSDP2 may have left that gathered, in the dtype it computes in.
    weight = model.state_dict()["model.norm.weight"]
    dtype = torch.float32 if model.lora else weight.dtype  # `merge` adds in float32
    config[key] = str(dtype).removeprefix("torch.")
    return config


def save(model: Transformer, path: str | Path, like: str | Path | None = None, settings=None):
    """Writes a directory that `load` and transformers open. All ranks call it, rank 0 writes.

    With LoRA it holds the policy twice: as merged weights in float32, for any program, and in adapter/
    as trained, in PEFT's layout, for `load`, peft and vLLM. A merge in bfloat16 would lose small updates.
    like: the checkpoint whose tokenizer, chat template and agent.json go along. settings: the run's, for config.json.
    """
    path = Path(path)
    config = config_json(model)
    if settings:
        config["run"] = settings
    state = full_state(model)
    adapters = merge(state)
    for name, weight in state.items():
        if not weight.isfinite().all():
            raise ValueError(f"{path} is not written: {name} holds numbers that are not finite. Lower --lr, or look at "
                             "the weights that training started from.")
    if rank() == 0:
        with writing(path):
            write_checkpoint(path, config, state, like, model, adapters)
    barrier()  # the other ranks wait for the files


def write_checkpoint(path: Path, config: dict, state: dict, like: str | Path | None,
                     model: Transformer, adapters: dict):
    """Writes into PATH/checkpoint.tmp, then moves file by file, the weights last: an interrupted
    first save leaves no weights to open.

    With LoRA the adapters move before the merged weights. If the process dies in between, the merged ones
    are old, and nothing is lost: `load` takes the adapters and the weights that they name.
    """
    # 1) Write everything into PATH/checkpoint.tmp.
    fresh = path / "checkpoint.tmp"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(state, fresh / "model.safetensors", metadata={"format": "pt"})
    if adapters:
        write_adapters(fresh, model, adapters)
    outdated = []
    if like:
        source = resolve(like)
        for name in COMPANIONS:
            if (source / name).exists():
                shutil.copy(source / name, fresh)
            else:
                outdated.append(path / name)  # an old agent.json would change the prompt

    # 2) Move it to its place: weights last, and among them adapter/ before model.safetensors.
    files = [file for file in sorted(fresh.rglob("*")) if file.is_file()]
    weights = [file for file in files if file.suffix == ".safetensors"]
    others = [file for file in files if file.suffix != ".safetensors"]
    mode = (fresh / "config.json").stat().st_mode

    def move(files: list[Path]):
        for file in files:
            file.chmod(mode)  # safetensors would let nobody else read the weights
            place = path / file.relative_to(fresh)
            place.parent.mkdir(exist_ok=True)
            file.replace(place)

    move(others)
    for file in outdated:
        file.unlink(missing_ok=True)
    move(weights)
    shutil.rmtree(fresh)
    if not adapters:
        delete_directory((path / ADAPTERS).parent)  # of an earlier run: `load` would prefer them


# ------------------------------------------------------------------------------ LoRA, from outside

ALPHA = 32  # the best learning rate hardly depends on the rank r if the update is ALPHA/r B A
ADAPTERS = "adapter/adapter_model.safetensors"  # below the top: vLLM reads every *.safetensors there
PEFT = "base_model.model."  # PEFT's name of an adapter is this, then ours, then ".weight"


class LoRALinear(nn.Linear):
    """W x + b + ALPHA/r B A x, where only A and B are trained (LoRA, arXiv 2106.09685).

    reference_AB: the (A, B) that training began with; None if they were new. use_reference: compute with these.
    """
    reference_AB: tuple | None = None
    use_reference = False

    def forward(self, x):
        y = super().forward(x)
        A = self.lora_A
        B = self.lora_B
        if self.use_reference:
            if self.reference_AB is None:
                return y
            A, B = self.reference_AB
        A = A.to(x.dtype)  # their masters are float32
        B = B.to(x.dtype)
        return y + F.linear(self.scale * F.linear(x, A), B)  # scaled where it is only r wide


def adapt(model: Transformer, r: int) -> Transformer:
    """Freezes the model and gives its blocks' linear layers adapters of rank r. r = 0: neither."""
    if r == 0:
        return model
    if r > model.config.hidden_size:
        raise ValueError(f"--lora {r}: the rank is at most the model's width, {model.config.hidden_size}.")
    model.requires_grad_(False)
    model.lora = r
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = LoRALinear  # in place, so the weights keep their names
            module.scale = ALPHA / r
            module.lora_A = nn.Parameter(torch.empty(r, module.in_features))
            module.lora_B = nn.Parameter(torch.empty(module.out_features, r))
    return model


def new_adapters(state: dict) -> dict:
    """{name: initial value} of the adapters among a state dict's tensors."""
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same
    drawn = {}
    for name, tensor in state.items():
        if "lora_" not in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator)  # drawn for B as well, or A's values would differ
        scale = 0  # of B, so the product B A is 0
        if name.endswith("lora_A"):
            scale = tensor.shape[1] ** -0.5
        drawn[name] = noise * scale
    return drawn


def keep_reference(model: Transformer, adapters: dict, device):
    """Keeps a checkpoint's adapters, whole on every rank: they take a hundredth of the model's memory."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            A = adapters[f"{name}.lora_A"].to(device)
            B = adapters[f"{name}.lora_B"].to(device)
            module.reference_AB = (A, B)


@contextmanager
def as_reference(model: Transformer):
    """Inside, the model computes the reference: the frozen weights with the adapters that training began with."""
    adapted = [module for module in model.modules() if isinstance(module, LoRALinear)]
    for module in adapted:
        module.use_reference = True
    try:
        yield
    finally:
        for module in adapted:
            module.use_reference = False


def merge(state: dict) -> dict:
    """Adds ALPHA/r B A to each layer's weight, in float32. Takes A and B out of the state dict and returns them.

    Any program can open the result without knowing LoRA.
    """
    names = [name for name in state if "lora_" in name]
    adapters = {name: state.pop(name) for name in names}
    if adapters:
        for name, weight in state.items():
            state[name] = weight.float()
    for name, A in adapters.items():
        if name.endswith("lora_A"):
            layer = name.removesuffix("lora_A")  # with its last dot
            B = adapters[layer + "lora_B"]
            r = len(A)
            W = state[layer + "weight"]
            state[layer + "weight"] = W + ALPHA / r * B @ A
    return adapters


def write_adapters(checkpoint: Path, model: Transformer, adapters: dict):
    """The adapters in PEFT's layout, with a mark of the frozen weights that they belong to."""
    base, hashes = model.frozen_from
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-2] for name in adapters}),
        "inference_mode": True,
    }
    file = checkpoint / ADAPTERS
    file.parent.mkdir()
    text = json.dumps(settings, indent=2) + "\n"
    (file.parent / "adapter_config.json").write_text(text)
    named = {f"{PEFT}{name}.weight": adapter for name, adapter in adapters.items()}
    metadata = {"format": "pt", "frozen": json.dumps(hashes)}
    save_file(named, file, metadata)


def has_weights(checkpoint: str, hashes) -> bool:
    """Whether a checkpoint is there and holds the weights with these hashes: their `fingerprint`."""
    try:
        return fingerprint(resolve(checkpoint)) == hashes
    except ValueError:
        return False


def read_adapters(checkpoint: Path) -> tuple[str, int, dict]:
    """(the checkpoint of the frozen weights, rank, adapters by our names) of what `save` has written."""
    # 1) The tensors.
    file = checkpoint / ADAPTERS
    adapters = {}
    with reading(file), safe_open(file, framework="pt") as tensors:
        metadata = tensors.metadata() or {}
        if "frozen" not in metadata:
            raise ValueError("another program wrote these adapters; merge them into the weights with it "
                             f"(PEFT: merge_and_unload), or delete {file.parent} to do without them")
        for name in tensors.keys():
            ours = name.removeprefix(PEFT).removesuffix(".weight")
            adapters[ours] = tensors.get_tensor(name)
            if not adapters[ours].isfinite().all():
                raise ValueError(f"not all values of {name} are finite numbers")
        if not adapters:
            raise ValueError("it holds no adapters")

    # 2) Their settings.
    settings_file = file.parent / "adapter_config.json"
    settings = read_json(settings_file)
    with reading(settings_file):
        base = settings["base_model_name_or_path"]
        r = settings["r"]
        alpha = settings["lora_alpha"]
        if type(r) is not int or r < 1:
            raise ValueError(f"its rank r is {r!r:.60}")
        if alpha != ALPHA:
            raise ValueError(f"its lora_alpha is {alpha}, not {ALPHA} as in model.py")

    # 3) The frozen weights that they belong to.
    with reading(file):
        if not has_weights(base, json.loads(metadata["frozen"])):
            raise ValueError(f"{base}, as seen from this folder, does not hold the weights that it was trained on; "
                             f"put them there. A new run can also use the merged weights: delete {file.parent}")
    return base, r, adapters


# ------------------------------------------------------- several processes with FSDP2, from outside


def computing_dtype(device: torch.device, precision: str | None = None) -> torch.dtype:
    """The dtype to compute in. precision: its name; None: bfloat16 on a GPU, else float32.

    A sharded model computes in it. Weights that do not train (in evaluation, or frozen under LoRA) are also stored
    in it.
    """
    if precision is not None:
        return getattr(torch, precision)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def shard(model: Transformer, precision: str | None = None) -> Transformer:
    """FSDP2: each block, then the rest, is cut into one part per rank, gathered just in time.

    The weights that train, their gradients and reductions are float32; forward and backward passes compute
    in the `computing_dtype`. LoRA's frozen weights are opened in that dtype, without a float32 master, and
    `LoRALinear` converts its adapters itself. So in a single process a model with adapters stays as it is.
    """
    if not dist.is_initialized() or (model.lora and world_size() == 1):
        return model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # slow to import
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = computing_dtype(torch.device(kind), precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # From the ranks' own group. By default a mesh makes new ones, whose time limit is minutes.
    mesh = DeviceMesh.from_group(dist.group.WORLD, kind)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@contextmanager
def unsharded(model: Transformer):
    """Yields the whole model in its compute dtype: plain modules on the gathered weights.

    A sharded forward pass is a collective: the ranks must agree on how many they run, or they wait
    for each other forever. In a rollout they cannot agree. So gather all weights once: until
    `reshard`, named_parameters() returns them whole, in the dtype that FSDP computes in. `whole` is
    a second set of modules that point at these tensors. Nothing is copied.
    """
    parts = [module for module in model.modules() if hasattr(module, "unshard")]
    if not parts:
        yield model
        return
    try:
        for part in parts:
            part.unshard()
        with torch.device("meta"):  # without memory of its own, and without FSDP's hooks
            whole = adapt(Transformer(model.config), model.lora).requires_grad_(False)
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        whole.load_state_dict(weights, assign=True)
        yield whole
    finally:
        reshard(model)


def gathered(tensor):
    """A sharded tensor, whole. All ranks call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def clip_gradients(model: Transformer, limit: float) -> float:
    """Scales the gradients to a norm of at most `limit`; returns the norm before that."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(gathered(norm))


def full_state(model: Transformer) -> dict:
    """The state dict, whole, on the CPU. All ranks call it, only rank 0 keeps weights."""
    state = {}
    for name, weight in model.state_dict().items():
        weight = gathered(weight)
        if rank() == 0:
            state[name] = weight.detach().cpu().contiguous()
    return state


# ------------------------------------------------------------------------------- the command line


@torch.no_grad()
def generate(model, prompt_ids: list[int], max_new_tokens: int, temperature=0.0, stop=(), seed=0):
    """Completes one prompt; returns (ids, logps). rollout.py's Engine serves many at once."""
    weight = model.model.embed_tokens.weight
    device = weight.device
    length = len(prompt_ids) + max_new_tokens
    cache = KVCache(model.config, 1, length, dtype=weight.dtype, device=device)
    rng = random.Random(seed)
    ids = []
    logps = []
    unread = list(prompt_ids)  # what the cache does not hold yet
    held = 0
    while len(ids) < max_new_tokens:
        tokens_1T = torch.tensor([unread], device=device)
        positions_1T = torch.arange(held, held + len(unread), device=device)[None]
        logits_1V = model(tokens_1T, positions_1T, cache, head=model.last_logits)
        uniform_1 = torch.tensor([rng.random()], dtype=torch.float64)
        id_1, logp_1 = sample(logits_1V, uniform_1, temperature)
        ids.append(int(id_1))
        logps.append(float(logp_1))
        if ids[-1] in stop:
            break
        held += len(unread)
        unread = [ids[-1]]
    return ids, logps


def end_tokens(model: Transformer, path: Path) -> list:
    """Ids that end a text. Chat models often name all of theirs in generation_config.json only."""
    config = dict(model.config.raw)
    generation_config = path / "generation_config.json"
    if generation_config.exists():
        config.update(read_json(generation_config))
    ids = config.get("eos_token_id")
    return ids if isinstance(ids, list) else [ids]


def main():
    parser = argparse.ArgumentParser(description="Complete a raw prompt.")
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--json", action="store_true", help="print prompt_ids, ids, logps and text")
    args = parser.parse_args()
    in_range = args.max_new_tokens >= 1 and 0 <= args.temperature < math.inf  # False for nan
    if not args.prompt or not in_range:
        raise ValueError("give a prompt, at least 1 for --max-new-tokens, and at least 0 for --temperature.")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = resolve(args.model)
    tokenizer = load_tokenizer(path)
    model = load(path, computing_dtype(device), device)
    prompt_ids = tokenizer.encode(args.prompt).ids
    ids, logps = generate(model, prompt_ids, args.max_new_tokens, temperature=args.temperature,
                          stop=end_tokens(model, path))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    if args.json:
        completion = {"prompt_ids": prompt_ids, "ids": ids, "logps": logps, "text": text}
        print(json.dumps(completion))
    else:
        print(args.prompt + text)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"model.py: {error}")
