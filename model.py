"""The policy: a Llama / Qwen decoder, its KV cache, its sampler, and FSDP2 around it.

    x = x + Attention(RMSNorm(x));   x = x + SwiGLU(RMSNorm(x));   logits = RMSNorm(x) · W_head

The project's correctness argument: `sample` (what a rollout records) and `token_logprobs` (what
training differentiates) use the same `forward`, so their log-probs agree to rounding.

    python model.py DIR "Once upon a time" --max-new-tokens 20 --temperature 0
    python tests/plan.py Llama-3.1-8B --gpus 8 --context 16384       # how many GPUs do I need?

A checkpoint is a Hugging Face directory: config.json, *.safetensors, tokenizer.json. Tensors keep
their names in `state_dict`. `adapt` (LoRA) and `shard` (FSDP2) wrap the classes from outside.

Dimension key: B rows, T tokens, D width, H query heads, K key/value heads, E head size,
V vocabulary, L layers, S cache slots, C cached positions, N scored tokens.
"""
from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import shutil
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path

# Waiting OpenMP threads spin and starve the browser on their cores. Set this before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

SUPPORTED = {  # a feature in config.json -> its supported values; (): only models without it
    "model_type": ("llama", "qwen2", "qwen3"), "hidden_act": ("silu",), "layer_types": (),
    "rope_type": ("default", "llama3"), "use_sliding_window": (), "quantization_config": (),
    "attention_bias": (), "mlp_bias": ()}  # Qwen2 has biases without the flag


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
            # Two spellings are in use; transformers goes by rope_scaling if a file has both.
            rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
            rope_type = rope.get("rope_type", rope.get("type", "default"))
            layer_types = set(raw.get("layer_types") or ()) - {"full_attention"}
            asked = raw | {"rope_type": rope_type, "layer_types": layer_types}
            for feature, supported in SUPPORTED.items():
                if asked.get(feature) and asked[feature] not in supported:
                    raise ValueError(f"{feature} {asked[feature]!r:.60} is not supported; "
                                     f"supported: {', '.join(supported) or 'none'}")
            width, heads = raw["hidden_size"], raw["num_attention_heads"]
            values = {"num_key_value_heads": heads, "head_dim": width // heads, "rope_theta": 1e4,
                      "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
            values |= {key: value for key, value in (raw | rope).items() if value is not None}
            values |= {"raw": raw, "rope_scaling": rope if rope_type == "llama3" else None}
            return cls(**{field.name: values[field.name] for field in fields(cls)})


# ----------------------------------------------------------------- the decoder, from the outside in


class Transformer(nn.Module):
    """The decoder. Modules have Hugging Face's names; checkpoints omit `heads` (for forks)."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.config, self.lora, self.recompute, self.heads = c, 0, False, {}  # see `adapt`, `recomputed`
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(c.vocab_size, c.hidden_size),
            "layers": nn.ModuleList(Block(c, layer) for layer in range(c.num_hidden_layers)),
            "norm": nn.RMSNorm(c.hidden_size, c.rms_norm_eps)})
        if not c.tie_word_embeddings:
            self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.frequencies_E = rope_frequencies(c)  # not a buffer: casting to bfloat16 must skip it

    def forward(self, tokens_BT, positions_BT=None, cache: KVCache | None = None,
                rows: slice = slice(None), head=None, segments: list[tuple] | None = None,
                end: int | None = None):
        """Token ids (B, T) -> logits (B, T, V).

        positions_BT: each token's position in its sequence, 0..T-1 by default.
        cache, rows: write keys and values into these slots; attend to all earlier positions there.
        end: how much of the cache to read, if the caller knows that no row is longer.
        head: replaces the LM head, whose logits for a page of 8,000 tokens take 5 GB.
        segments: (start, stop, context_start, context_stop), ... cut one packed row (B = 1). Tokens
        start..stop see their context, the beginning of an earlier segment, and themselves causally.
        """
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        view = None if cache is None else CacheView(cache, rows, positions_BT, end)
        self.frequencies_E = self.frequencies_E.to(tokens_BT.device)
        x_BTD = self.model.embed_tokens(tokens_BT)
        rotation = rope(positions_BT, self.frequencies_E, x_BTD.dtype)
        for block in self.model.layers:
            inputs = x_BTD, rotation, view, segments
            x_BTD = recomputed(block, *inputs) if self.recompute else block(*inputs)
        return (head or self.logits)(self.model.norm(x_BTD))

    def logits(self, x):
        """(..., D) -> (..., V) by the LM head, which small models share with the embedding."""
        tied = self.config.tie_word_embeddings
        return F.linear(x, (self.model.embed_tokens if tied else self.lm_head).weight)


class Block(nn.Module):
    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x_BTD, rotation, view, segments):
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotation, view, segments)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Attention(nn.Module):
    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, c.head_dim
        q_width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        bias = c.model_type == "qwen2"
        self.q_proj = nn.Linear(c.hidden_size, q_width, bias)
        self.k_proj = nn.Linear(c.hidden_size, kv_width, bias)
        self.v_proj = nn.Linear(c.hidden_size, kv_width, bias)
        self.o_proj = nn.Linear(q_width, c.hidden_size, bias=False)
        norm = nn.RMSNorm if c.model_type == "qwen3" else nn.Identity
        self.q_norm, self.k_norm = (norm(c.head_dim, c.rms_norm_eps) for _ in range(2))

    def forward(self, x_BTD, rotation: tuple, view: CacheView | None, segments: list | None):
        shape = *x_BTD.shape[:2], -1, self.head_dim
        q = self.q_norm(self.q_proj(x_BTD).view(shape)).transpose(1, 2)  # (B, H, T, E)
        k = self.k_norm(self.k_proj(x_BTD).view(shape)).transpose(1, 2)  # (B, K, T, E)
        v = self.v_proj(x_BTD).view(shape).transpose(1, 2)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        if segments is not None:
            y = attend_packed(q, k, v, segments)
        elif view is not None:
            y = attend(q, *view.update(self.layer, k, v), view.mask_B1TC)
        else:
            y = attend(q, k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def recomputed(function, *inputs):
    """function(*inputs). Autograd keeps the inputs only; the backward pass runs it once more."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


# ---------------------------------------------------------- positions, attention, and the KV cache


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """Speed of each of the E/2 rotations, radians per token. Llama 3.1 slows the slow ones.

    NOTE Keep transformers' order of operations: a difference in the last bit becomes another angle
    at position 16,000, and logits drift by 5e-3.
    """
    exponent_E = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    freq_E = 1 / config.rope_theta ** (exponent_E / config.head_dim)
    if (s := config.rope_scaling) is None:
        return freq_E
    # Full turns within the pre-training context decide: fast pairs stay (1), slow ones change (0).
    turns = s["original_max_position_embeddings"] / (2 * math.pi / freq_E)
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * freq_E / s["factor"] + keep * freq_E


def rope(positions_BT, frequencies_E, dtype):
    """`rotate`'s tables, (B, 1, T, E): cosines, and sines signed as in (a c - b s, b c + a s)."""
    angle_BTE = positions_BT[:, None, :, None].float() * frequencies_E
    cos, sin = angle_BTE.cos(), angle_BTE.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x_BHTE, cos_B1TE, sin_B1TE):
    """Hugging Face's layout: pair i is (x[i], x[i + E/2]), not (x[2i], x[2i + 1])."""
    swapped_BHTE = x_BHTE.roll(x_BHTE.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BHTE * cos_B1TE, swapped_BHTE, sin_B1TE)


def attend(q_BHTE, k_BKCE, v_BKCE, mask_B1TC=None):
    """Grouped-query attention of T queries to C >= T keys, by default causal up to the last key.

    NOTE SDPA's is_causal aligns its triangle at the top left, which is wrong for C > T. Rows of
    unequal length are padded on the right, where causality hides the padding.
    """
    (B, H, T, E), K, C = q_BHTE.shape, *k_BKCE.shape[1:3]
    if mask_B1TC is None and T > 1:
        mask = None if T == C else causal_lower_right(T, C)
        return F.scaled_dot_product_attention(q_BHTE, k_BKCE, v_BKCE, mask, is_causal=T == C,
                                              enable_gqa=H != K)
    # Queries that share a key head become rows of one head, so no kernel has to repeat the keys.
    mask = None if mask_B1TC is None else mask_B1TC.repeat(1, 1, H // K, 1)
    q = q_BHTE.reshape(B, K, H // K * T, E)
    out = F.scaled_dot_product_attention(q, k_BKCE, v_BKCE, mask)
    return out.reshape(B, H, T, E)  # not view: some kernels return transposed memory


def attend_packed(q_BHTE, k_BKTE, v_BKTE, segments):
    """`attend` for each segment, to its context and itself; see `Transformer.forward`.

    NOTE `split`, not slices: a slice's backward pass fills a whole row with zeros, which for a
    hundred short segments costs more than everything else.
    """
    starts, lengths = zip(*((start, stop - start) for start, stop, *_ in segments))
    alone = {start: stop for start, stop, first, last in segments if first == last}
    assert all(last <= alone.get(first, first) for *_, first, last in segments), \
        "a context is the first tokens of an earlier segment that itself has no context"
    q_parts, k_parts, v_parts = (x.split(lengths, dim=2) for x in (q_BHTE, k_BKTE, v_BKTE))
    out = []
    for q, k, v, (_, _, first, last) in zip(q_parts, k_parts, v_parts, segments):
        if last > first:
            i = starts.index(first)
            k = torch.cat((k_parts[i][:, :, :last - first], k), dim=2)
            v = torch.cat((v_parts[i][:, :, :last - first], v), dim=2)
        out.append(attend(q, k, v))
    return torch.cat(out, dim=2)


class KVCache:
    """Keys and values of S sequences side by side, so that many episodes decode in one batch.

    Nothing attends beyond a sequence's length: to roll back, the caller just keeps a smaller
    length, and idle slots may write garbage at their end. Memory: 2 · L · S · K · C · E numbers.
    """

    def __init__(self, c: ModelConfig, slots: int, length: int, dtype=torch.float32, device="cpu"):
        shape = c.num_hidden_layers, slots, c.num_key_value_heads, length, c.head_dim
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.slots, self.length = slots, length


class CacheView:
    """What one forward pass reads and writes of a KVCache, in all its layers.

    mask_B1TC: 0 where a query sees a key, else -inf; None if all rows write the last T positions.
    """

    def __init__(self, cache: KVCache, rows: slice, positions_BT, end: int | None = None):
        aligned, self.positions_BT, self.mask_B1TC = False, positions_BT, None
        if end is None:  # read the positions, for which Python must wait for the GPU
            low, high = torch.stack(positions_BT.aminmax()).tolist()
            assert high < cache.length, f"position {high} does not fit the cache's {cache.length}"
            # Then every row holds the same T consecutive positions: causal attention needs no mask.
            end, aligned = high + 1, high - low == positions_BT.shape[1] - 1
        if not aligned:  # a float mask, because every layer would have to convert a bool one
            unseen = torch.arange(end, device=positions_BT.device) > positions_BT[:, None, :, None]
            self.mask_B1TC = torch.where(unseen, -torch.inf, 0.0).to(cache.k.dtype)
        self.k, self.v = cache.k[:, rows, :, :end], cache.v[:, rows, :, :end]  # slices: no copies

    def update(self, layer: int, k_BKTE, v_BKTE):
        """Writes new keys and values; returns all that are attended to, (B, K, C, E) each."""
        both = self.k[layer], self.v[layer]
        for kept_BKCE, new_BKTE in zip(both, (k_BKTE, v_BKTE)):
            if self.mask_B1TC is None:
                kept_BKCE[:, :, -new_BKTE.shape[2]:] = new_BKTE
            else:
                index = self.positions_BT[:, None, :, None].expand_as(new_BKTE)
                kept_BKCE.scatter_(2, index, new_BKTE)
        return both


# -------------------------------------------- sampling and scoring: two readings of the same logits


def sample(logits_BV, uniform_B, temperature: float = 1.0):
    """Draws one token per row; returns (ids_B, logp_B), log-probs under the sampled distribution.

    uniform_B: one number in [0, 1) per row, from the row's own generator, so that its token does
    not depend on the rest of the batch. Float64, because float32 rounds the largest up to 1.
    temperature 0 takes the most likely token and reports its log-prob at temperature 1.
    """
    logp_BV = (logits_BV.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        ids_B = logp_BV.argmax(-1)
    else:
        cdf_BV = logp_BV.exp().double().cumsum(-1)
        threshold_B1 = uniform_B.to(cdf_BV)[:, None] * cdf_BV[:, -1:]
        ids_B = torch.searchsorted(cdf_BV, threshold_B1, right=True)[:, 0]
        ids_B = ids_B.clamp(max=logits_BV.shape[-1] - 1)
    return ids_B, logp_BV.gather(-1, ids_B[:, None])[:, 0]


def token_logprobs(model: Transformer, tokens_BT, action_BT, temperature=1.0, chunk=1024,
                   positions_BT=None, segments=None):
    """Log-prob and entropy of each token marked in the bool mask action_BT, given those before it.

    Returns (logp_N, entropy_N) in row-major order. positions_BT and segments as in `forward`.
    The LM head runs on the N marked positions only, `chunk` at a time, and the backward pass
    recomputes each chunk, so that (N, V) float32 logits never exist as a whole.
    """
    first = [segment[0] for segment in segments or [(0,)]]
    assert not action_BT[:, first].any(), "nothing predicts the first token of a row or segment"
    targets_N = tokens_BT[action_BT]
    before_BT = action_BT.roll(-1, dims=1)  # the hidden state at t - 1 predicts token t

    def score(x_MD, target_M):
        logp_MV = (model.logits(x_MD).float() / (temperature or 1.0)).log_softmax(-1)
        entropy_M = -(logp_MV.exp() * logp_MV).sum(-1)
        return logp_MV.gather(-1, target_M[:, None])[:, 0], entropy_M.detach()

    def head(x_BTD):
        x_ND = x_BTD[before_BT]
        parts = [recomputed(score, x, t) for x, t in zip(x_ND.split(chunk), targets_N.split(chunk))]
        return tuple(torch.cat(column) for column in zip(*parts))

    return model(tokens_BT, positions_BT, head=head, segments=segments)


@torch.no_grad()
def generate(model, prompt_ids: list[int], max_new_tokens: int, temperature=0.0, stop=(), seed=0):
    """Completes one prompt; returns (ids, logps). rollout.py's Engine serves many at once."""
    weight, rng = model.model.embed_tokens.weight, random.Random(seed)
    cache = KVCache(model.config, 1, len(prompt_ids) + max_new_tokens, weight.dtype, weight.device)
    ids, logps, new, start = [], [], list(prompt_ids), 0
    while len(ids) < max_new_tokens and not (ids and ids[-1] in stop):
        tokens = torch.tensor([new], device=weight.device)
        positions = torch.arange(start, start + len(new), device=weight.device)[None]
        logits = model(tokens, positions, cache, head=lambda x_BTD: model.logits(x_BTD[:, -1]))
        uniform = torch.tensor([rng.random()], dtype=torch.float64)
        token, logp = sample(logits, uniform, temperature)
        start, new = start + len(new), [int(token)]
        ids.append(int(token))
        logps.append(float(logp))
    return ids, logps


class GraphedStep:
    """Decoding on a GPU: one token for each slot of a cache, launched as one CUDA graph.

    A step of few rows is a thousand kernels, each of which ends before Python launches the next. A
    graph launches them together, but fixes shapes and addresses. So all slots take part (idle ones
    write an unused position), tokens and positions lie in buffers, and the part of the cache that
    is read grows by STRIDE, one graph per size. Valid while the weights stay where they are.
    """
    STRIDE = 1024

    def __init__(self, model: Transformer, cache: KVCache):
        self.model, self.cache = model, cache
        self.tokens_S1 = torch.zeros((cache.slots, 1), dtype=torch.long, device=cache.k.device)
        self.positions_S1 = torch.zeros_like(self.tokens_S1)
        self.graphs: dict[int, tuple] = {}  # positions read -> (graph, the logits it writes)

    def __call__(self, tokens_S1, positions_S1, longest: int):
        """The next token's logits (S, V), valid until the next call. longest: the last position."""
        length = self.cache.length
        assert longest < length, f"position {longest} does not fit the cache's {length}"
        self.tokens_S1.copy_(tokens_S1)
        self.positions_S1.copy_(positions_S1)
        end = min((longest // self.STRIDE + 1) * self.STRIDE, length)
        if end not in self.graphs:
            self.graphs[end] = self.capture(end)
        graph, logits_SV = self.graphs[end]
        graph.replay()
        return logits_SV

    def step(self, end: int):
        head = lambda x_BTD: self.model.logits(x_BTD[:, -1])
        return self.model(self.tokens_S1, self.positions_S1, self.cache, head=head, end=end)

    def capture(self, end: int):
        self.step(end)  # libraries set themselves up at their first call, which cannot be captured
        graph = torch.cuda.CUDAGraph()
        # Graphs share a memory pool, since one runs at a time. thread_local: NCCL has a thread.
        pool = next((other.pool() for other, _ in self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits_SV = self.step(end)
        return graph, logits_SV


# ------------------------------------------------------------- checkpoints in Hugging Face's layout

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                   "generation_config.json", "chat_template.jinja", "agent.json")


@contextmanager
def reading(path: str | Path):
    """Turns whatever a missing, damaged or unsupported file raises into a ValueError naming it."""
    try:
        yield
    except Exception as error:  # every library has its own kinds; the user needs the file's name
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"cannot use {path}: {kind}{' '.join(str(error).split()):.300}") from error


@contextmanager
def writing(path: str | Path):
    """Turns a full disk or a missing permission into a ValueError naming the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {path}: {error}; what was there is unharmed") from error


def read_json(path: Path) -> dict:
    with reading(path):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"it holds {value!r:.60}, not an object")
        return value


def resolve(path: str | Path) -> Path:
    """A directory as it is; otherwise a model of the hub, from its client's cache or online."""
    path = Path(path)
    if path.is_dir():
        return path
    with reading(f"the checkpoint {path}"):
        # A missing runs/bc is a spelling mistake; do not make the user wait for the hub.
        if len(path.parts) != 2 or path.parts[0] in ("runs", "worlds") or path.parent.is_dir():
            raise ValueError("it is neither a directory nor a Hugging Face hub id")
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.jinja"]))


def load_tokenizer(path: str | Path) -> Tokenizer:
    path = resolve(path) / "tokenizer.json"
    with reading(path):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()  # some files ask for what their own training needed
        tokenizer.no_padding()
        return tokenizer


def load(path: str | Path, dtype=torch.float32, device="cpu", sharded=False, replicas=1, lora=0):
    """Opens a checkpoint. sharded: cut by `shard` first, so that no rank holds more than its part.

    Tensors are read one at a time into an empty model, so there is never a second full copy.
    lora: the rank of new adapters, which are float32 and change nothing yet (B = 0); see `adapt`.
    """
    path = resolve(path)
    config = ModelConfig.from_dict(read_json(path / "config.json"), path / "config.json")
    with reading(path / "config.json"), torch.device("meta"):
        model = adapt(Transformer(config).to(dtype), lora)
    model = (shard(model, replicas) if sharded else model).to_empty(device=device)
    missing, files = model.state_dict(), [path / "model.safetensors"]
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same
    for name, shape in [(name, t.shape) for name, t in missing.items() if "lora_" in name]:
        scale = shape[1] ** -0.5 if name.endswith("A") else 0
        fill(missing.pop(name), torch.randn(shape, generator=generator) * scale)
    if not files[0].exists():  # large models on the hub come in several files
        files = sorted(path.glob("model-*.safetensors")) or files
    for file in files:
        with reading(file), safe_open(file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():
                tied = name == "lm_head.weight" and config.tie_word_embeddings
                if not tied and not name.endswith("inv_freq"):  # some writers store these as well
                    fill(missing.pop(name), tensors.get_tensor(name))
    if missing:
        raise ValueError(f"cannot use {path}: no {min(missing)}, {len(missing)} tensors missing")
    return model


def save(model: Transformer, path: str | Path, like: str | Path | None = None, run=None):
    """Writes a directory that `load` and transformers open. All ranks call it, rank 0 writes.

    like: the checkpoint whose tokenizer files go along. run: the run's settings, for config.json.
    Files are replaced whole, the weights last: a directory without them is no checkpoint.
    """
    path, raw, state = Path(path), model.config.raw, full_state(model)
    if rank() == 0:
        dtype = {"dtype" if "dtype" in raw else "torch_dtype": str(state["model.norm.weight"].dtype)[6:]}
        config = raw | dtype | ({"run": run} if run else {})
        with writing(path):
            shutil.rmtree(fresh := path / "tmp", ignore_errors=True)
            fresh.mkdir(parents=True)
            (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            save_file(state, fresh / "model.safetensors", metadata={"format": "pt"})
            for name in TOKENIZER_FILES if like else ():
                if (resolve(like) / name).exists():
                    shutil.copy(resolve(like) / name, fresh)
                else:  # an old agent.json changes the prompt
                    (path / name).unlink(missing_ok=True)
            for file in sorted(fresh.iterdir(), key=lambda file: file.suffix == ".safetensors"):
                file.replace(path / file.name)
            fresh.rmdir()
    all_max(0)


# ------------------------------------- LoRA; then several processes with FSDP2: both from outside

ALPHA = 32  # the best learning rate hardly depends on the rank r if the update is ALPHA/r B A
TIMEOUT = timedelta(hours=2)  # for the longest episodes; torchrun notices a dead rank long before


class Adapted(nn.Linear):
    """W x + b + ALPHA/r B A x, where only A and B are trained (LoRA, arXiv 2106.09685)."""

    def forward(self, x):
        A, B = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)  # their masters are float32
        return super().forward(x) + self.scale * F.linear(F.linear(x, A), B)


def adapt(model: Transformer, rank: int) -> Transformer:
    """Freezes the model and turns the linear layers of its blocks into `Adapted`. rank 0: neither."""
    if rank:
        model.requires_grad_(False).lora = rank
        for linear in [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]:
            linear.__class__, linear.scale = Adapted, ALPHA / rank
            linear.lora_A = nn.Parameter(torch.empty(rank, linear.in_features))
            linear.lora_B = nn.Parameter(torch.empty(linear.out_features, rank))
    return model


@contextmanager
def without_adapters(model: Transformer):
    """Inside, the model is what LoRA began with: a reference policy without a second copy."""
    adapted = [module for module in model.modules() if isinstance(module, Adapted)]
    for module in adapted:
        module.scale = 0.0
    yield
    for module in adapted:
        module.scale = ALPHA / model.lora


def init_dist() -> torch.device:
    """Joins the other ranks if torchrun started us; returns this rank's device."""
    cuda, alone = torch.cuda.is_available(), "RANK" not in os.environ
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan every new row length again
    if (cuda or not alone) and not dist.is_initialized():
        # One GPU becomes a group of one, so that `shard` sets its precision as well.
        group = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
        dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT, **group)
    return device


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(items: list) -> list:
    """The ranks' lists one after the other, on every rank."""
    parts = [items] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def all_sum(values: list) -> torch.Tensor:
    """Element-wise sum of a list of numbers over all ranks, float64."""
    return torch.tensor(gather([values]), dtype=torch.float64).sum(0)


def all_max(value: int) -> int:
    """The largest of the ranks' values. All ranks wait here for each other."""
    return max(gather([value]))


def computing_dtype(device: torch.device) -> torch.dtype:
    """The precision that `shard` computes in, for models that are not trained."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@functools.cache
def device_mesh(world, replicas: int) -> DeviceMesh:
    """One mesh for all models of a group: a mesh makes new groups, with torch's short timeout."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if replicas == 1:
        return DeviceMesh.from_group(world, kind)
    ranks = torch.arange(world_size(), device="cpu").view(replicas, -1)
    groups = [dist.new_subgroups_by_enumeration(lines.tolist(), timeout=TIMEOUT)[0]
              for lines in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=("replicate", "shard"))


def shard(model: Transformer, replicas: int = 1) -> Transformer:
    """FSDP2: each block, then the rest, is cut into one part per rank, gathered just in time.

    On GPUs bfloat16 compute with float32 weights and reductions, on CPUs float32. replicas: groups
    of ranks that each hold the whole model between them (HSDP); one per node spares the network.
    """
    if world_size() == 1 and (model.lora or not dist.is_initialized()):
        return model  # LoRA needs no float32 copy of the weights next to the one that computes
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    if replicas < 1 or world_size() % replicas:
        raise ValueError(f"--replicas {replicas} does not divide {world_size()} ranks")
    cuda, mesh = torch.cuda.is_available(), device_mesh(dist.group.WORLD, replicas)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cuda else MixedPrecisionPolicy()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@contextmanager
def unsharded(model: Transformer):
    """Yields the whole model in its compute dtype: plain modules on the gathered weights.

    Inside, a rank may run any number of forward passes; sharded ranks that disagree about it hang.
    """
    if not (parts := [module for module in model.modules() if hasattr(module, "unshard")]):
        yield model
        return
    for part in parts:
        part.unshard()
    with torch.device("meta"):  # a second model on the same weights, without FSDP's hooks
        whole = adapt(Transformer(model.config), model.lora).requires_grad_(False)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    whole.load_state_dict(weights, assign=True)
    yield whole
    for part in parts:
        part.reshard()


def clip_gradients(model: Transformer, limit: float) -> float:
    """Scales the gradients to a norm of at most `limit`; returns the norm before that."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@torch.no_grad()
def fill(parameter, tensor):
    """Copies a whole tensor into a parameter; of a sharded one, this rank's part."""
    if tensor.shape != parameter.shape:
        raise ValueError(f"a tensor has shape {[*tensor.shape]}, the model {[*parameter.shape]}")
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor
        tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements,
                                   src_data_rank=None)  # no communication: every rank has read it
    parameter.copy_(tensor)


def full_state(model: Transformer) -> dict:
    """The state dict on the CPU, adapters merged. All ranks call it, only rank 0 keeps weights."""
    whole = lambda weight: weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    tensors = ((name, whole(weight)) for name, weight in model.state_dict().items())
    state = {name: weight.detach().cpu().contiguous() for name, weight in tensors if rank() == 0}
    for name in [name for name in state if name.endswith("lora_A")]:
        A, B, weight = state.pop(name), state.pop(name[:-1] + "B"), name[:-6] + "weight"
        state[weight] = (state[weight] + ALPHA / len(A) * B @ A).to(state[weight].dtype)
    return state


def training_tensors(model: Transformer, optimizer) -> dict:
    """What trains, and AdamW's state, by name: NAME, NAME/step, NAME/exp_avg, NAME/exp_avg_sq."""
    tensors = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors |= dict(nn.ModuleDict(model.heads).named_parameters())
    for name, parameter in list(tensors.items()):
        if not (state := optimizer.state[parameter]):  # before its first step
            state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter),
                      "exp_avg_sq": torch.zeros_like(parameter)}
        tensors |= {f"{name}/{key}": tensor for key, tensor in state.items()}
    return tensors


def save_training(path: str | Path, model: Transformer, optimizer, extra: dict):
    """Writes what a resumed run needs to PATH/00001, 00002, ...: `training_tensors` and `extra`.

    All ranks call it, each writes its part, and `load_training` reads them on any number of ranks.
    A directory gets its number when it is complete; only then is the one before it removed.
    """
    path, fresh = Path(path), Path(path) / "tmp"
    mesh = getattr(next(model.parameters()), "device_mesh", None)
    parts = mesh.size(-1) if mesh else 1  # further replicas hold the same
    with writing(path):
        if rank() == 0:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
        all_max(0)
        if rank() < parts:
            tensors = training_tensors(model, optimizer).items()
            local = ((n, t.to_local() if hasattr(t, "to_local") else t) for n, t in tensors)
            local = {name: tensor.detach().cpu().contiguous() for name, tensor in local}
            save_file(local, fresh / f"part-{rank()}.safetensors")
        all_max(0)
        if rank() == 0:
            (fresh / "state.json").write_text(json.dumps({"parts": parts, "extra": extra}))
            older = sorted(path.glob("[0-9]*"))
            fresh.rename(path / f"{int(older[-1].name) + 1 if older else 1:05}")
            for directory in older:
                shutil.rmtree(directory)
    all_max(0)


def load_training(path: str | Path, model: Transformer, optimizer) -> dict | None:
    """Brings model and optimizer to where `save_training` left them; returns `extra`, or None."""
    if not (saved := sorted(Path(path).glob("[0-9]*"))):
        return None
    with reading(path := saved[-1]), ExitStack() as stack:
        state = json.loads((path / "state.json").read_text())
        files = [path / f"part-{i}.safetensors" for i in range(state["parts"])]
        parts = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        tensors = training_tensors(model, optimizer)
        if set(parts[0].keys()) != set(tensors):
            raise ValueError("it belongs to another model; give its --model, --lora, or another --out")
        for name, tensor in tensors.items():
            pieces = [part.get_tensor(name) for part in parts]  # FSDP2 cuts the first dimension, not heads
            fill(tensor, pieces[0] if pieces[0].shape == tensor.shape else torch.cat(pieces))
        return state["extra"]


def main():
    parser = argparse.ArgumentParser(description="Complete a raw prompt.")
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--json", action="store_true", help="print prompt_ids, ids, logps and text")
    args = parser.parse_args()
    device, path = torch.device("cuda" if torch.cuda.is_available() else "cpu"), resolve(args.model)
    tokenizer, model = load_tokenizer(path), load(path, computing_dtype(device), device)
    prompt_ids = tokenizer.encode(args.prompt).ids
    chat = path / "generation_config.json"  # chat models often name all their end tokens only here
    stop = (model.config.raw | (read_json(chat) if chat.exists() else {})).get("eos_token_id")
    ids, logps = generate(model, prompt_ids, args.max_new_tokens, args.temperature,
                          stop if isinstance(stop, list) else [stop])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    out = {"prompt_ids": prompt_ids, "ids": ids, "logps": logps, "text": text}
    print(json.dumps(out) if args.json else args.prompt + text)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"model.py: {error}")
