"""model.py: every way to compute a log-prob gives the same number, and checkpoints survive."""
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT, ComputedStep, tiny_config, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from two_ranks import VARIANTS, optimizer_of, train_step

import model as model_py
import run
from model import (KVCache, ModelConfig, Transformer, adapt, as_reference, attend, check_fit,
                   computing_dtype, config_json, full_state, generate, load, load_for_training, load_tokenizer, rope_frequencies, sample,
                   save, shard, token_logprobs, unsharded)
from run import init_dist, load_training, save_training

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": False, "rope_scaling": LLAMA3}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 16}),
]
families = pytest.mark.parametrize("family, changes", FAMILIES)


def random_tokens(rows, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 400, (rows, length), generator=generator)


def assert_near(got, expected):
    """Equal to rounding."""
    assert_close(got, expected, atol=1e-5, rtol=1e-5)


def flat_gradient(model):
    gradients = [p.grad.flatten() for p in model.parameters()]
    return torch.cat(gradients)


def naive_forward(model, tokens):
    """The obvious decoder: one row, loops over heads and positions, no cache, float64."""
    c = model.config
    weights = {name: weight.double() for name, weight in model.state_dict().items()}
    frequency = rope_frequencies(c).double()
    T = len(tokens)
    E = c.head_dim
    sharing = c.num_attention_heads // c.num_key_value_heads  # query heads to one key head

    def norm(x, weight):
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x / (mean_square + c.rms_norm_eps).sqrt() * weight

    def turn(v, position):
        out = v.clone()
        for i in range(E // 2):
            j = i + E // 2
            angle = position * frequency[i]
            out[i] = v[i] * angle.cos() - v[j] * angle.sin()
            out[j] = v[j] * angle.cos() + v[i] * angle.sin()
        return out

    def turn_all(x):
        turned = [turn(v, position) for position, v in enumerate(x)]
        return torch.stack(turned)

    def attention(q, k, v):
        """One head."""
        out = []
        for t in range(T):
            scores = k[:t + 1] @ q[t] / math.sqrt(E)
            p = scores.softmax(0)
            out.append(p @ v[:t + 1])
        return torch.stack(out)

    x = weights["model.embed_tokens.weight"][tokens]
    for n in range(c.num_hidden_layers):
        def w(name):
            return weights[f"model.layers.{n}.{name}"]

        # 1) Attention.
        h = norm(x, w("input_layernorm.weight"))
        q = h @ w("self_attn.q_proj.weight").T
        k = h @ w("self_attn.k_proj.weight").T
        v = h @ w("self_attn.v_proj.weight").T
        if c.model_type == "qwen2":
            q = q + w("self_attn.q_proj.bias")
            k = k + w("self_attn.k_proj.bias")
            v = v + w("self_attn.v_proj.bias")
        heads = []
        for head in range(c.num_attention_heads):
            kv_head = head // sharing
            own = slice(head * E, (head + 1) * E)
            shared = slice(kv_head * E, (kv_head + 1) * E)
            q_head = q[:, own]
            k_head = k[:, shared]
            v_head = v[:, shared]
            if c.model_type == "qwen3":
                q_head = norm(q_head, w("self_attn.q_norm.weight"))
                k_head = norm(k_head, w("self_attn.k_norm.weight"))
            q_head = turn_all(q_head)
            k_head = turn_all(k_head)
            heads.append(attention(q_head, k_head, v_head))
        x = x + torch.cat(heads, -1) @ w("self_attn.o_proj.weight").T

        # 2) SwiGLU.
        h = norm(x, w("post_attention_layernorm.weight"))
        gate = h @ w("mlp.gate_proj.weight").T
        up = h @ w("mlp.up_proj.weight").T
        x = x + (gate * gate.sigmoid() * up) @ w("mlp.down_proj.weight").T

    x = norm(x, weights["model.norm.weight"])
    if c.tie_word_embeddings:
        return x @ weights["model.embed_tokens.weight"].T
    return x @ weights["lm_head.weight"].T


@families
def test_forward_equals_the_obvious_loops(family, changes):
    model = tiny_model(family, **changes)
    tokens = random_tokens(1, 12, seed=1)
    expected = naive_forward(model, tokens[0])
    got = model(tokens)[0].double()
    assert_close(got, expected, atol=2e-4, rtol=1e-4)


GOLDEN = json.loads((ROOT / "tests/golden/golden.json").read_text())
SMOLLM2 = ROOT / "runs/smollm2"


def name_of(case):
    return case["name"]


@pytest.mark.parametrize("case", GOLDEN["families"], ids=name_of)
def test_logits_equal_those_of_transformers(case):
    """tests/golden/make.py compared all logits and stored the first 24 of every 33rd position."""
    model = tiny_model(case["family"], seed=11, **case["changes"])
    tokens = random_tokens(2, 100, seed=12)
    near = torch.arange(100)
    far = torch.arange(20_000, 20_100)
    positions = torch.stack((near, far))

    logits = model(tokens, positions)

    stored = logits[:, ::33, :24]
    expected = torch.tensor(case["logits"])
    assert_close(stored, expected, atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(),
                    reason="needs SmolLM2-135M-Instruct (538 MB, not committed) in runs/smollm2")
def test_fifty_greedy_tokens_equal_those_of_transformers():
    tokenizer = load_tokenizer(SMOLLM2)
    model = load(SMOLLM2)
    for case in GOLDEN["smollm2"]:
        prompt = tokenizer.encode(case["prompt"])
        ids, _ = generate(model, prompt.ids, 50)
        assert ids == case["ids"], case["prompt"]


@families
def test_cached_chunked_rolled_back_and_ragged_equal_uncached(family, changes):
    model = tiny_model(family, **changes)
    tokens = random_tokens(3, 40, seed=2)
    whole = model(tokens)
    cache = KVCache(model.config, 6, 64)
    rows = slice(2, 5)

    def at(start, end):
        return torch.arange(start, end).expand(3, end - start)

    # 1) In chunks.
    chunks = []
    for start, end in [(0, 7), (7, 8), (8, 31), (31, 40)]:
        chunk = model(tokens[:, start:end], at(start, end), cache, rows)
        chunks.append(chunk)
    assert_near(torch.cat(chunks, 1), whole)

    # 2) Rolled back to position 15, behind which the cache holds other tokens.
    others = torch.randint(0, 400, (3, 20))
    model(others, at(15, 35), cache, rows)
    again = model(tokens[:, 15:], at(15, 40), cache, rows)
    assert_near(again, whole[:, 15:])

    # 3) A decoding step of rows with different lengths.
    ragged = torch.tensor([[5], [20], [39]])
    step = model(tokens.gather(1, ragged), ragged, cache, rows)
    expected = whole[torch.arange(3), ragged[:, 0]]
    assert_near(step[:, 0], expected)

    # 4) The same with several tokens.
    ragged = torch.tensor([[3, 4, 5], [18, 19, 20], [37, 38, 39]])
    step = model(tokens.gather(1, ragged), ragged, cache, rows)
    expected = whole[torch.arange(3)[:, None], ragged]
    assert_near(step, expected)


@torch.no_grad()
def test_a_graphed_step_equals_the_uncached_forward_at_every_length():
    """All but the graph itself, which needs a GPU: fixed slots, buffers, growing part of the cache."""
    model = tiny_model()
    cache = KVCache(model.config, 4, 41)
    step = ComputedStep(model, cache)
    tokens = random_tokens(4, 41, seed=2)
    whole = model(tokens)
    lengths = torch.tensor([[0], [9], [14], [21]])
    begin = torch.arange(21).expand(4, 21)
    model(tokens[:, :21], begin, cache)  # the shorter rows have rolled back

    for added in range(20):
        at = lengths + added
        last = int(at.max())
        logits = step(tokens.gather(1, at), at, last)
        expected = whole[torch.arange(4), at[:, 0]]
        assert_near(logits, expected)

    assert list(step.graphs) == [32, 41]
    with pytest.raises(AssertionError, match="position 41 is beyond the cache's 41 positions"):
        step(tokens[:, :1], lengths, 41)


def test_a_position_behind_the_caches_end_is_refused():
    """The last slot was written over, and the logits were those of another text."""
    model = tiny_model()
    cache = KVCache(model.config, 1, 8)
    tokens = torch.arange(9)[None]
    model(tokens[:, :8], cache=cache)
    with pytest.raises(AssertionError, match="position 8 is beyond the cache's 8 positions"):
        model(tokens[:, 8:], torch.tensor([[8]]), cache)


def test_a_kernel_may_leave_its_result_transposed_in_memory(monkeypatch):
    """As CUDA's memory-efficient kernel does, which takes the masks of ragged rows."""
    q = torch.randn(3, 8, 1, 16)
    k = torch.randn(3, 2, 30, 16)
    v = torch.randn(3, 2, 30, 16)
    lengths = torch.tensor([4, 11, 29])[:, None, None, None]
    mask = torch.arange(30) <= lengths
    expected = attend(q, k, v, mask)
    kernel = F.scaled_dot_product_attention

    def transposed(*inputs, **options):
        out = kernel(*inputs, **options)
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", transposed)
    assert torch.equal(attend(q, k, v, mask), expected)


@pytest.mark.parametrize("temperature", [0.7, 0.0])
@families
def test_sampled_logprobs_equal_scored_logprobs(family, changes, temperature):
    model = tiny_model(family, **changes)
    prompt = [1, 7, 30, 30, 200]
    ids, logps = generate(model, prompt, 30, temperature, seed=3)

    tokens = torch.tensor([prompt + ids])
    action = torch.zeros_like(tokens, dtype=torch.bool)
    action[:, len(prompt):] = True
    scored, entropy, _ = token_logprobs(model, tokens, action, temperature, chunk=4)

    assert_near(scored.detach(), torch.tensor(logps))
    assert (entropy > 0).all()


def test_the_entropys_gradient_is_that_of_the_whole_distribution():
    """It was detached, so an entropy bonus changed the loss and trained nothing."""
    tokens = random_tokens(2, 12, seed=5)
    action = torch.zeros_like(tokens, dtype=torch.bool)
    action[0, 3:7] = True
    action[1, 6:12] = True

    model = tiny_model()
    _, entropy, _ = token_logprobs(model, tokens, action, temperature=0.7, chunk=4)
    entropy.sum().backward()
    gradient = flat_gradient(model)

    model = tiny_model()
    distribution = torch.distributions.Categorical(logits=model(tokens)[:, :-1] / 0.7)
    reference = distribution.entropy()[action[:, 1:]]
    reference.sum().backward()
    assert_near(entropy.detach(), reference.detach())
    assert_close(gradient, flat_gradient(model), atol=1e-5, rtol=1e-4)


def test_logprobs_and_gradients_do_not_depend_on_chunks_or_recomputation():
    tokens = random_tokens(2, 30, seed=4)
    action = torch.zeros_like(tokens, dtype=torch.bool)
    action[0, 5:9] = True
    action[1, 20:30] = True
    weight = torch.arange(14)

    gradients = []
    for chunk, recompute in [(1000, False), (3, False), (3, True)]:
        model = tiny_model()
        model.recompute = recompute
        logp, _, _ = token_logprobs(model, tokens, action, chunk=chunk)
        (logp * weight).sum().backward()
        gradients.append(flat_gradient(model))

    every_logp = model(tokens).log_softmax(-1)[:, :-1]
    targets = tokens[:, 1:, None]
    next_logp = every_logp.gather(-1, targets)[..., 0]
    reference = next_logp[action[:, 1:]]
    assert_near(logp, reference)
    for gradient in gradients[1:]:
        assert_close(gradient, gradients[0], atol=1e-5, rtol=1e-4)


def test_no_marked_token_is_no_error():
    """A rank without work runs such a row, so that its gradients exist."""
    model = tiny_model()
    tokens = torch.zeros(1, 9).long()
    action = torch.zeros(1, 9).bool()
    logp_N, entropy_N, hidden_ND = token_logprobs(model, tokens, action)
    assert logp_N.shape == (0,)
    assert entropy_N.shape == (0,)
    assert hidden_ND.shape == (0, 32)

    logp_N.sum().backward()
    for p in model.parameters():
        assert not p.grad.any()


def test_a_first_token_is_never_scored():
    """Nothing predicts it: the score would come from the end of the row, or of another segment."""
    tokens = torch.arange(9)[None]
    for marked, segments in ((0, None), (5, [(0, 5, 0, 0), (5, 9, 0, 3)])):
        action = torch.zeros(1, 9, dtype=torch.bool)
        action[0, marked] = True
        with pytest.raises(AssertionError, match="nothing predicts the first token"):
            token_logprobs(tiny_model(), tokens, action, segments=segments)


def test_the_hidden_states_that_come_along_predict_the_marked_tokens_and_carry_the_gradient():
    """A critic that trains jointly with the policy reads them; its gradient is that of a forward of its own."""
    model = tiny_model()
    tokens = random_tokens(2, 30, seed=4)
    action = torch.zeros_like(tokens, dtype=torch.bool)
    action[0, 5:9] = True
    action[1, 20:30] = True
    critic = torch.randn(32, generator=torch.Generator().manual_seed(5))

    def hidden_states(x_BTD):
        return x_BTD

    def gradient(logp_N, hidden_ND):
        model.zero_grad()
        value_N = hidden_ND @ critic
        loss = logp_N.sum() + value_N.square().sum()
        loss.backward()
        return flat_gradient(model)

    logp_N, _, hidden_ND = token_logprobs(model, tokens, action, chunk=4)

    # A token's log-prob comes from the hidden state before it.
    whole_BTD = model(tokens, head=hidden_states)
    own_ND = torch.cat((whole_BTD[0, 4:8], whole_BTD[1, 19:29]))
    assert_close(hidden_ND, own_ND)
    logp_NV = model.logits(own_ND).log_softmax(-1)
    targets_N1 = tokens[action][:, None]
    scored_N = logp_NV.gather(-1, targets_N1)[:, 0]
    got = gradient(logp_N, hidden_ND)
    expected = gradient(scored_N, own_ND)
    assert_close(got, expected, atol=1e-4, rtol=1e-4)


def trunk_and_leaves(generator, trunk, leaves, flat=0):
    """A random trajectory packed at index `flat`: (tokens, positions, action, segments, rows).

    leaves: for each, how many trunk tokens it continues, its length, and the actions at its end.
    rows: the same trajectory unpacked, as pairs of ids and the number of actions.
    """
    def draw(n):
        return torch.randint(0, 400, (n,), generator=generator).tolist()

    shared = draw(trunk)
    tokens = list(shared)
    positions = list(range(trunk))
    action = [False] * trunk
    segments = [(flat, flat + trunk, flat, flat)]
    rows = []
    for prefix, length, n_action in leaves:
        own = draw(length)
        start = flat + len(tokens)
        segments.append((start, start + length, flat, flat + prefix))
        tokens += own
        positions += range(prefix, prefix + length)
        action += [False] * (length - n_action)
        action += [True] * n_action
        rows.append((shared[:prefix] + own, n_action))
    return tokens, positions, action, segments, rows


@families
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_packed_row_equals_separate_rows(family, changes, kv_heads):
    """Log-probs and gradients of three trajectories in one row, against one row per turn."""
    model = tiny_model(family, **changes, num_key_value_heads=kv_heads)
    generator = torch.Generator().manual_seed(6)
    trajectories = [
        (30, [(5, 12, 3), (17, 2, 1), (30, 9, 4)]),
        (3, [(3, 20, 6)]),
        (11, [(0, 7, 2), (1, 5, 4), (11, 6, 5)]),
    ]

    # 1) One row for all.
    tokens = []
    positions = []
    action = []
    segments = []
    rows = []
    for trunk, leaves in trajectories:
        parts = trunk_and_leaves(generator, trunk, leaves, flat=len(tokens))
        its_tokens, its_positions, its_action, its_segments, its_rows = parts
        tokens += its_tokens
        positions += its_positions
        action += its_action
        segments += its_segments
        rows += its_rows
    weight = torch.randn(sum(action), generator=generator)

    def gradient(logp):
        model.zero_grad()
        (logp * weight).sum().backward()
        return flat_gradient(model)

    # 2) One row per turn, the reference.
    logps = []
    entropies = []
    hiddens = []
    for ids, n_action in rows:
        start = len(ids) - n_action
        marked = torch.arange(len(ids))[None] >= start
        logp, entropy, hidden = token_logprobs(model, torch.tensor([ids]), marked)
        logps.append(logp)
        entropies.append(entropy)
        hiddens.append(hidden)
    expected_logp = torch.cat(logps)
    expected_entropy = torch.cat(entropies)
    expected_hidden = torch.cat(hiddens)
    expected_gradient = gradient(expected_logp)

    # 3) Both are the same.
    inputs = {
        "tokens_BT": torch.tensor([tokens]),
        "action_BT": torch.tensor([action]),
        "positions_BT": torch.tensor([positions]),
        "segments": segments,
    }
    for recompute in (False, True):
        model.recompute = recompute
        logp, entropy, hidden = token_logprobs(model, **inputs, chunk=7)
        assert_near(logp, expected_logp)
        assert_near(hidden, expected_hidden)
        assert_near(entropy, expected_entropy)
        assert_near(gradient(logp), expected_gradient)


@pytest.mark.parametrize("T, C", [(1, 1), (1, 9), (5, 5), (5, 9), (60, 60), (60, 200)])
def test_attention_behind_a_context_equals_the_written_out_softmax(T, C):
    generator = torch.Generator().manual_seed(0)

    def draw(heads, length):
        return torch.randn(1, heads, length, 8, generator=generator).requires_grad_()

    q = draw(4, T)
    k = draw(2, C)
    v = draw(2, C)
    weight = draw(4, T)

    def gradients(y):
        return torch.autograd.grad((y * weight).sum(), (q, k, v))

    # Two query heads share a key head.
    keys = k.repeat_interleave(2, dim=1)
    values = v.repeat_interleave(2, dim=1)
    scores = q @ keys.transpose(2, 3) / 8 ** 0.5
    unseen = torch.ones(T, C, dtype=torch.bool).triu(C - T + 1)
    scores[..., unseen] = -torch.inf
    expected = scores.softmax(-1) @ values

    got = attend(q, k, v)

    assert_near(got, expected)
    for ours, theirs in zip(gradients(got), gradients(expected)):
        assert_near(ours, theirs)


def test_a_context_comes_with_what_it_saw():
    """Tokens 6..8 see 0..2, the context of the segment 4..5, and 4: three rows that begin alike."""
    model = tiny_model()
    ids = random_tokens(1, 9, seed=6)
    positions = torch.tensor([[0, 1, 2, 3, 3, 4, 4, 5, 6]])
    segments = [(0, 4, 0, 0), (4, 6, 0, 3), (6, 9, 4, 5)]
    packed = model(ids, positions, segments=segments)

    # Each row, and how many of its tokens are the segment's own.
    for row, own in [([0, 1, 2, 3], 4), ([0, 1, 2, 4, 5], 2), ([0, 1, 2, 4, 6, 7, 8], 3)]:
        alone = model(ids[:, row])
        assert_near(packed[0, row[-own:]], alone[0, -own:])


@pytest.mark.parametrize("segments", [
    [(0, 4, 0, 0), (4, 9, 1, 3)],
    [(0, 4, 0, 0), (4, 9, 0, 5)],
    [(0, 4, 0, 0), (4, 9, 4, 6)],
    [(0, 4, 0, 0), (4, 6, 0, 4), (6, 9, 4, 7)],
])
def test_a_context_that_begins_no_earlier_segment_is_refused(segments):
    model = tiny_model()
    tokens = torch.zeros(1, 9, dtype=torch.long)
    with pytest.raises(AssertionError, match="first tokens of an earlier"):
        model(tokens, segments=segments)


def test_sample_draws_from_the_softmax_and_reports_its_logprob():
    row = torch.tensor([2.0, 0.0, -1.0, 1.0])
    logits = row.expand(20000, 4)
    uniform = torch.rand(20000, generator=torch.Generator().manual_seed(5))
    for temperature in (1.0, 0.5):
        ids, logp = sample(logits, uniform, temperature)
        p = (row / temperature).softmax(-1)
        frequencies = torch.bincount(ids, minlength=4) / 20000
        assert_close(frequencies, p, atol=0.01, rtol=0)
        assert_close(logp, p.log()[ids])

    likeliest, _ = sample(logits, uniform, 0)
    assert likeliest.unique().tolist() == [0]


def test_a_sampled_token_does_not_depend_on_the_other_rows_of_its_batch():
    logits = torch.randn(8, 50)
    uniform = torch.rand(8)
    alone = []
    for i in range(8):
        ids, _ = sample(logits[i:i + 1], uniform[i:i + 1])
        alone.append(int(ids))
    together, _ = sample(logits, uniform)
    assert together.tolist() == alone


def test_extreme_uniform_numbers_stay_inside_the_vocabulary():
    logits = torch.full((2, 5), -1e4)
    logits[:, 2] = 0
    extremes = torch.tensor([0.0, 1 - 1e-9], dtype=torch.float64)
    ids, logp = sample(logits, extremes)
    assert ids.tolist() == [2, 2]
    assert logp.tolist() == [0.0, 0.0]


def test_a_token_without_probability_is_never_drawn():
    """The float32 probabilities sum up to a little less than 1; behind that stands the last token."""
    for n in range(2, 60):
        logits = torch.zeros(1, n + 1)
        logits[0, n] = -1e4
        ids, _ = sample(logits, torch.tensor([1 - 1e-9], dtype=torch.float64))
        assert ids.item() < n


def test_a_random_number_just_below_1_is_not_rounded_to_the_last_token(monkeypatch):
    """As float32 would do."""
    model = tiny_model()
    logits = torch.full((1, 400), -1e4)
    logits[0, 7] = 0.0

    def only_7(x):
        return logits

    def just_below_1(generator):
        return 1 - 2**-53

    model.logits = only_7
    monkeypatch.setattr(random.Random, "random", just_below_1)
    ids, _ = generate(model, [1, 2], 3, temperature=1.0)
    assert ids == [7, 7, 7]


@pytest.mark.parametrize("recompute", [False, True])
def test_training_keeps_no_tensor_as_wide_as_the_vocabulary(recompute):
    """Full (T, V) float32 logits never exist: the backward pass recomputes those of a chunk."""
    model = tiny_model(vocab_size=4000)
    model.recompute = recompute
    tokens = torch.randint(0, 4000, (1, 200))
    action = torch.arange(200)[None] >= 50
    widths = []

    def keep(tensor):
        widths.append(tensor.shape[-1:])
        return tensor

    def give_back(tensor):
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, give_back):
        logp_N, _, _ = token_logprobs(model, tokens, action, chunk=64)
    assert widths
    assert (4000,) not in widths
    logp_N.sum().backward()


def same_weights(a, b):
    ours = a.state_dict()
    theirs = b.state_dict()
    if ours.keys() != theirs.keys():
        return False
    return all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_a_forward_pass_without_gradient_saves_nothing_to_recompute(monkeypatch):
    model = tiny_model()
    model.recompute = True
    recomputed = []
    monkeypatch.setattr(model_py, "recomputed", lambda block, *inputs: recomputed.append(block) or block(*inputs))
    tokens = torch.randint(0, 400, (1, 9))
    with torch.no_grad():
        model(tokens)
    assert recomputed == []
    model(tokens)
    assert len(recomputed) == model.config.num_hidden_layers


@families
def test_saved_and_loaded_weights_are_bit_equal(family, changes, tmp_path):
    path = tmp_path / "a"
    model = tiny_model(family, **changes)
    save(model, path)
    save(model, path, settings={"seed": 1})  # into an existing directory
    modes = {file.name: file.stat().st_mode for file in path.glob("*") if file.is_file()}
    assert modes["model.safetensors"] == modes["config.json"]  # whoever may read one may read the other

    again = load(path)

    assert same_weights(model, again)
    assert again.config.raw["run"] == {"seed": 1}
    tokens = torch.randint(0, 400, (1, 9))
    assert torch.equal(model(tokens), again(tokens))
    files = {file.name for file in path.iterdir()}
    assert files == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_json_names_the_dtype_of_the_weights_whatever_was_there_before(key, tmp_path):
    """A run once wrote the base's bfloat16 at its start and float32 with each save, over the same weights."""
    raw = tiny_config()
    del raw["torch_dtype"]
    config = ModelConfig.from_dict(raw | {key: "bfloat16"})
    base = Transformer(config).to(torch.bfloat16)
    save(base, tmp_path / "base")

    model = load(tmp_path / "base")
    assert config_json(model) == raw | {key: "float32"}
    assert config_json(base)[key] == "bfloat16"

    trained = tmp_path / "trained"
    save(model, trained)
    written = json.loads((trained / "config.json").read_text())
    assert written == config_json(model)
    again = load(trained, torch.bfloat16)
    assert config_json(again)[key] == "bfloat16"


@pytest.fixture
def prompted(checkpoint, tmp_path):
    """(a checkpoint with a prompt of its own, one without)."""
    other = tmp_path / "other"
    plain = tmp_path / "plain"
    shutil.copytree(checkpoint, other)
    (other / "agent.json").write_text('{"think": false}')
    shutil.copytree(checkpoint, plain, ignore=shutil.ignore_patterns("agent.json"))
    return other, plain


def test_a_checkpoint_keeps_no_prompt_of_the_one_that_it_replaces(prompted, tmp_path):
    """A leftover agent.json would give the new policy a prompt that it was not trained with."""
    path = tmp_path / "a"
    for like in prompted:
        save(tiny_model(), path, like=like)
        (path / "metrics.jsonl").touch()

    files = {file.name for file in path.iterdir()}
    assert files == {"config.json", "tokenizer.json", "model.safetensors", "metrics.jsonl"}


def test_a_save_that_fails_leaves_the_old_policy_its_prompt(prompted, tmp_path, monkeypatch):
    """agent.json was deleted before the first file had moved."""
    other, plain = prompted
    path = tmp_path / "a"
    save(tiny_model(), path, like=other)

    def fail(*_):
        raise OSError("no space")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ValueError, match="unharmed"):
        save(tiny_model(seed=1), path, like=plain)
    assert json.loads((path / "agent.json").read_text()) == {"think": False}


def test_tensors_that_the_model_computes_or_shares_are_skipped(tmp_path):
    """Old writers store rotation speeds, some store the tied matrix twice."""
    model = tiny_model("llama")
    save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, file)
    assert same_weights(load(tmp_path), model)


def test_weights_are_read_from_several_files_unless_one_holds_all(tmp_path):
    """As on the hub; transformers leaves old parts next to a new model.safetensors."""
    first = tiny_model(seed=1)
    second = tiny_model(seed=2)
    save(first, tmp_path)
    whole = tmp_path / "model.safetensors"
    state = load_file(whole)
    for part in range(3):
        names = list(state)[part::3]
        some = {name: state[name] for name in names}
        save_file(some, tmp_path / f"model-{part + 1:05}-of-00003.safetensors")
    whole.unlink()
    assert same_weights(load(tmp_path), first)

    save(second, tmp_path)
    assert same_weights(load(tmp_path), second)


def test_resumed_training_equals_never_having_stopped(tmp_path):
    path = tmp_path / "t"
    model = tiny_model()
    plain = tiny_model()  # trains without ever being saved
    again = tiny_model(seed=9)  # resumes
    optimizer = optimizer_of(model)
    plain_optimizer = optimizer_of(plain)
    other = optimizer_of(again)
    assert load_training(path, again, other) is None

    save_training(path, model, optimizer, {"step": 0})
    for step in range(4):
        if step == 2:
            save_training(path, model, optimizer, {"step": 2, "order": [3, 1]})
        train_step(model, optimizer, step)
        train_step(plain, plain_optimizer, step)
    assert same_weights(model, plain)  # saving changes nothing, also before the first step

    assert load_training(path, again, other) == {"step": 2, "order": [3, 1]}
    for step in range(2, 4):
        train_step(again, other, step)
    assert same_weights(model, again)
    assert [file.name for file in tmp_path.iterdir()] == ["t"]
    assert len(list(path.iterdir())) == 1

    foreign = tiny_model(num_hidden_layers=1)
    with pytest.raises(ValueError, match="t/00002 .--no-resume starts over.: it belongs to another model"):
        load_training(path, foreign, optimizer_of(foreign))


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices, but for copies and numbers. Torch's checks have gaps.

    A tensor on torch's device "meta" has no data, so `marked` is how many positions a bool mask marks.
    """

    def __init__(self, marked):
        super().__init__()
        self.marked = marked

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.ndim}
        assert len(devices) < 2 or "copy" in str(operation), f"{operation} on {devices}"

        if operation is torch.ops.aten._local_scalar_dense.default:
            return 0
        if operation is torch.ops.aten.index.Tensor:
            indexed = args[0]
            index = args[1][0]
            if index is not None and index.dtype == torch.bool:
                rest = indexed.shape[index.ndim:]
                return indexed.new_empty(self.marked, *rest)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("lora", [0, 4])
@families
def test_no_operation_mixes_devices_or_dtypes(family, changes, lora, monkeypatch):
    """On a GPU the model is bfloat16 and the CPU's tensors are elsewhere. A device without data stands in."""
    config = ModelConfig.from_dict(tiny_config(family, **changes))
    with torch.device("meta"):
        model = Transformer(config).to(torch.bfloat16)
        model = adapt(model, lora)
        tokens = torch.zeros(1, 30, dtype=torch.long)
        action = torch.zeros(1, 30, dtype=torch.bool)
        positions = torch.zeros(3, 1, dtype=torch.long)
        uniform = torch.zeros(3, dtype=torch.float64)
    segments = [(0, 20, 0, 0), (20, 30, 0, 7)]

    def first_and_last(tensor):
        """The positions of a chunk."""
        return [10, 29]

    def lower_right(T, C):
        """The original returns a subclass of tensors, which the mode cannot make."""
        return torch.ones(T, C, dtype=torch.bool, device="meta").tril(C - T)

    monkeypatch.setattr(torch.Tensor, "tolist", first_and_last)
    monkeypatch.setattr(model_py, "causal_lower_right", lower_right)
    with OneDevice(marked=8):
        # 1) Training.
        assert model(tokens).dtype == torch.bfloat16
        for recompute in (False, True):
            model.recompute = recompute
            logp_N, entropy_N, _ = token_logprobs(model, tokens, action, segments=segments)
            assert logp_N.dtype == torch.float32
            assert entropy_N.dtype == torch.float32
            assert logp_N.shape == (8,)
            logp_N.sum().backward()

        # 2) Sampling.
        with torch.no_grad():
            cache = KVCache(model.config, 4, 64, torch.bfloat16, "meta")
            model(tokens[:, :20], tokens[:, :20], cache, slice(0, 1))
            logits = model(positions, positions, cache, slice(1, 4), end=40)[:, -1]
            for temperature in (0.0, 0.7):
                ids, logp = sample(logits, uniform, temperature)
                assert ids.device.type == "meta"
                assert logp.device.type == "meta"
                assert logp.dtype == torch.float32

    trained = [p for p in model.parameters() if p.requires_grad]
    dtype = torch.bfloat16
    if lora:
        dtype = torch.float32
    assert {p.grad.dtype for p in trained} == {dtype}


# ------------------------------------------------------------------------------------------------- LoRA


def adapted_model(family="qwen2", rank=4, **changes):
    """`tiny_model` with random adapters; those of a new one change nothing."""
    model = adapt(tiny_model(family, **changes), rank)
    for i, (name, weight) in enumerate(model.named_parameters()):
        if "lora_" in name:
            generator = torch.Generator().manual_seed(i)
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
    return model


@families
def test_lora_computes_the_merged_model_and_its_gradient_is_the_chain_rule(family, changes, tmp_path):
    """W' = W + s B A: with G = dL/dW' from training all of W', dL/dB = s G A^T and dL/dA = s B^T G."""
    model = adapted_model(family, **changes)
    save(model, tmp_path)
    merged = load(tmp_path, lora=0)
    tokens = random_tokens(2, 30, seed=4)
    action = torch.arange(30).expand(2, 30) >= 20
    assert_close(merged(tokens), model(tokens), atol=2e-5, rtol=1e-5)

    for each in (model, merged):
        logp_N, _, _ = token_logprobs(each, tokens, action)
        logp_N.sum().backward()

    full = dict(merged.named_parameters())
    s = 32 / 4
    adapters = 0
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            adapters += 1
            G = full[name + ".weight"].grad
            A = layer.lora_A
            B = layer.lora_B
            assert_close(B.grad, s * G @ A.T, atol=1e-4, rtol=1e-4)
            assert_close(A.grad, s * B.T @ G, atol=1e-4, rtol=1e-4)
    assert adapters == 2 * 7
    for name, p in model.named_parameters():
        if "lora_" not in name:
            assert p.grad is None
            assert not p.requires_grad


@pytest.mark.skipif(not find_spec("transformers"), reason="compares with transformers, which is no dependency")
def test_a_merged_checkpoint_opens_in_transformers_with_equal_logits(tmp_path):
    import transformers
    model = adapted_model()
    tokens = torch.arange(40)[None]
    save(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_close(theirs(tokens).logits, model(tokens), atol=2e-4, rtol=0)


def test_with_lora_sampled_logprobs_equal_scored_logprobs():
    model = adapted_model()
    prompt = [1, 7, 30, 30, 200]
    ids, logps = generate(model, prompt, 30, temperature=0.7, seed=3)

    tokens = torch.tensor([prompt + ids])
    action = torch.arange(35)[None] >= 5
    scored, _, _ = token_logprobs(model, tokens, action, temperature=0.7)

    assert_near(scored.detach(), torch.tensor(logps))


def test_new_adapters_change_nothing_and_without_them_a_trained_model_is_the_first_one(tmp_path):
    """So the reference policy needs no memory. Only A and B train, in float32, next to any W."""
    save(tiny_model(), tmp_path)
    tokens = torch.randint(0, 400, (1, 20))
    for dtype in (torch.float32, torch.bfloat16):
        base = load(tmp_path, dtype)
        model = load(tmp_path, dtype, lora=4)
        assert torch.equal(model(tokens), base(tokens))

        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        train_step(model, optimizer, 0)

        assert not torch.equal(model(tokens), base(tokens))
        with as_reference(model):
            assert torch.equal(model(tokens), base(tokens))
        assert not torch.equal(model(tokens), base(tokens))

        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert len(trained) == 2 * 2 * 7
        for name, p in trained.items():
            assert "lora_" in name
            assert p.dtype == torch.float32


def test_new_adapters_are_drawn_at_the_scale_of_their_inputs():
    drawn = model_py.new_adapters({"x.lora_A": torch.empty(4, 2500), "x.lora_B": torch.empty(900, 4)})
    assert drawn["x.lora_A"].std() == pytest.approx(2500 ** -0.5, rel=0.1)
    assert not drawn["x.lora_B"].any()


def test_adapters_are_on_again_after_an_error_without_them():
    """Else the policy would go on as its own reference, in silence."""
    model = adapted_model()
    tokens = torch.arange(20)[None]
    before = model(tokens)
    with pytest.raises(ZeroDivisionError), as_reference(model):
        1 / 0
    assert torch.equal(model(tokens), before)


def test_adapters_wider_than_the_model_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="--lora 33: the rank is at most the model's width, 32"):
        adapt(model, 33)
    assert model.lora == 0
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_rank_is_no_fault_of_the_checkpoint(tmp_path):
    save(tiny_model(), tmp_path)
    with pytest.raises(ValueError, match="^--lora 33"):
        load(tmp_path, lora=33)


def test_a_lora_runs_state_holds_only_what_trains_and_resumes_exactly(tmp_path):
    base = tmp_path / "base"
    path = tmp_path / "t"
    save(tiny_model(), base)
    model = load(base, lora=4)
    again = load(base, lora=4)
    optimizer = optimizer_of(model)
    other = optimizer_of(again)
    for step in range(2):
        train_step(model, optimizer, step)
    save_training(path, model, optimizer, {"step": 2})

    # A tensor's name is its parameter's, then a slash and what it holds of it.
    kinds = set()
    for name in load_file(path / "00001/part-0.safetensors"):
        parameter, *_ = name.split("/")
        _, kind = parameter.rsplit(".", 1)
        kinds.add(kind)
    assert kinds == {"lora_A", "lora_B"}

    assert load_training(path, again, other) == {"step": 2}
    train_step(model, optimizer, 2)
    train_step(again, other, 2)
    assert same_weights(model, again)

    plain = tiny_model()
    with pytest.raises(ValueError, match="another model or method; give its --model and --lora"):
        load_training(path, plain, optimizer_of(plain))


def lora_policy(path, dtype=torch.float32, size=0.05, seed=0):
    """A policy trained with LoRA on the frozen weights of path/base, in the dtype that it computes in."""
    if not (path / "base").exists():
        save(tiny_model(), path / "base")
    model = load(path / "base", dtype, lora=4)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("lora_B"):
            weight.data = size * torch.randn(weight.shape, generator=generator)
    return model


def scores(model, seed=4):
    tokens = random_tokens(2, 30, seed)
    action = torch.arange(30).expand(2, 30) >= 10
    logp_N, _, _ = token_logprobs(model, tokens, action)
    return logp_N.detach()


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_lora_policy_has_the_logprobs_of_the_one_in_memory_bit_for_bit(dtype, size, tmp_path):
    """Merged into bfloat16, the update was wrong by half at |B| = 1e-4, and the saved policy another one."""
    model = lora_policy(tmp_path, dtype, size)
    path = tmp_path / "x"
    save(model, path)

    for lora in (None, 4):
        again = load(path, dtype, lora=lora)
        assert same_weights(again, model)
        assert torch.equal(scores(again), scores(model))

    if size >= 1e-4:  # a smaller update may be lost in rounding
        base = load(tmp_path / "base", dtype)
        assert not torch.equal(scores(model), scores(base))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merged_weights_hold_the_update_in_float32(dtype, tmp_path):
    """Whatever the frozen weights are: to the last bits of a float32 of their size."""
    model = lora_policy(tmp_path, dtype, size=1e-4)
    path = tmp_path / "x"
    save(model, path)
    assert config_json(model)["torch_dtype"] == "float32"

    merged = load(path, lora=0)
    frozen = load(tmp_path / "base", dtype)
    assert not merged.lora
    written = json.loads((path / "config.json").read_text())
    assert written == config_json(merged)

    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            W = frozen.get_submodule(name).weight.detach().double()
            A = layer.lora_A.detach().double()
            B = layer.lora_B.detach().double()
            update = merged.get_submodule(name).weight.detach().double() - W
            expected = 32 / 4 * B @ A
            error = (update - expected).abs().max()
            assert error <= 2 ** -23 * W.abs().max()
            assert relative(update, expected) < 1e-3

    opened = load_file(path / "model.safetensors")
    assert {weight.dtype for weight in opened.values()} == {torch.float32}
    assert opened.keys() == frozen.state_dict().keys()


def test_the_adapters_lie_in_pefts_layout(tmp_path):
    """As PEFT documents it: W + lora_alpha / r B A for each module that a pair of names says."""
    model = lora_policy(tmp_path)
    path = tmp_path / "x"
    save(model, path)

    settings = json.loads((path / "adapter/adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA"
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    assert set(settings["target_modules"]) == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }

    tensors = load_file(path / "adapter/adapter_model.safetensors")
    rebuilt = load(tmp_path / "base")
    scale = settings["lora_alpha"] / settings["r"]
    assert len(tensors) == 2 * 2 * 7
    for name, A in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        B = tensors[name.replace("lora_A", "lora_B")]
        assert len(A) == settings["r"]
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rebuilt.get_submodule(layer).weight.data += scale * B @ A
    assert_near(scores(rebuilt), scores(model))

    others = {file.name for file in path.glob("*.safetensors")} - {"model.safetensors"}
    assert not others


@pytest.mark.skipif(not find_spec("peft"), reason="compares with peft, which is no dependency")
def test_peft_opens_the_adapters_with_equal_logits(tmp_path):
    import peft
    model = lora_policy(tmp_path)
    tokens = torch.arange(40)[None]
    save(model, tmp_path / "x")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "x/adapter", torch_dtype=torch.float32)
    assert_close(theirs(tokens).logits, model(tokens), atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_with_the_adapters_of_the_checkpoint_which_are_its_reference(dtype, tmp_path):
    """The reference is the policy that training began with, as for all weights, and not the frozen weights."""
    clone = lora_policy(tmp_path, dtype)
    save(clone, tmp_path / "clone")
    model = load(tmp_path / "clone", dtype, lora=4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train_step(model, optimizer, 0)
    assert not torch.equal(scores(model), scores(clone))
    with as_reference(model):
        assert torch.equal(scores(model), scores(clone))

    save(model, tmp_path / "next")
    again = load(tmp_path / "next", dtype)
    assert torch.equal(scores(again), scores(model))
    assert again.frozen_from == clone.frozen_from  # whatever becomes of the clone

    with pytest.raises(ValueError, match="clone: its adapters have rank 4; give --lora 4 .* or --lora 0"):
        load(tmp_path / "clone", lora=8)


def test_adapters_are_not_put_on_other_weights_than_they_were_trained_on(tmp_path):
    """As after cloning again into the same directory. The merged weights need no others."""
    base = tmp_path / "base"
    path = tmp_path / "x"
    adapter = path / "adapter"
    model = lora_policy(tmp_path)
    save(model, path)
    save(tiny_model(seed=1), base)
    with pytest.raises(ValueError, match=f"{base}, as seen from this folder, does not hold .* A new run can .* delete {adapter}"):
        load(path)
    shutil.rmtree(base)
    with pytest.raises(ValueError, match=f"{base}, as seen from this folder, does not hold .* A new run can .* delete {adapter}"):
        load(path)

    shutil.rmtree(adapter)
    assert_near(scores(load(path)), scores(model))


def test_nor_on_other_weights_of_the_same_name_on_the_hub(tmp_path, monkeypatch):
    """The frozen weights of me/base were not marked: a push to it changed the policy in silence."""
    def snapshot_download(*_, **__):
        return str(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    save(tiny_model(), tmp_path / "hub")
    model = load("me/base", lora=4)
    save(model, tmp_path / "x")
    assert same_weights(load(tmp_path / "x"), model)

    save(tiny_model(seed=1), tmp_path / "hub")
    with pytest.raises(ValueError, match="me/base, as seen from this folder, does not hold the weights"):
        load(tmp_path / "x")


def test_adapters_of_another_scale_are_refused(tmp_path):
    save(lora_policy(tmp_path), tmp_path / "x")
    file = tmp_path / "x/adapter/adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"lora_alpha": 16}))
    with pytest.raises(ValueError, match="its lora_alpha is 16, not 32"):
        load(tmp_path / "x")


def test_adapters_without_a_rank_or_with_nan_are_refused(tmp_path):
    """With "r": 0 the policy was its own base, without a word."""
    policy = lora_policy(tmp_path)
    save(policy, tmp_path / "x")
    file = tmp_path / "x/adapter/adapter_config.json"
    settings = json.loads(file.read_text())
    for rank in (0, "4"):
        file.write_text(json.dumps(settings | {"r": rank}))
        with pytest.raises(ValueError, match=f"cannot use {file}: its rank r is {rank!r}"):
            load(tmp_path / "x")
    file.write_text("{}")
    with pytest.raises(ValueError, match=f"cannot use {file}"):
        load(tmp_path / "x")

    weights = tmp_path / "x/adapter/adapter_model.safetensors"
    ours = weights.read_bytes()
    save_file({"a": torch.zeros(1)}, weights)  # another program's, with settings of its own
    with pytest.raises(ValueError, match="merge them into the weights"):
        load(tmp_path / "x")
    weights.write_bytes(ours)
    file.write_text(json.dumps(settings))

    weights = tmp_path / "x/adapter/adapter_model.safetensors"
    with safe_open(weights, framework="pt") as tensors:
        marks = tensors.metadata()
        adapters = {name: tensors.get_tensor(name) for name in tensors.keys()}
    first, *_ = adapters
    adapters[first][0, 0] = math.nan
    save_file(adapters, weights, metadata=marks)
    with pytest.raises(ValueError, match=f"not all values of {first} are finite numbers"):
        load(tmp_path / "x")


def test_a_file_of_adapters_that_lacks_one_is_named(tmp_path):
    save(lora_policy(tmp_path), tmp_path / "x")
    file = tmp_path / "x/adapter/adapter_model.safetensors"
    with safe_open(file, framework="pt") as tensors:
        marks = tensors.metadata()
        kept = {name: tensors.get_tensor(name) for name in list(tensors.keys())[1:]}
    save_file(kept, file, metadata=marks)
    with pytest.raises(ValueError, match=f"cannot use {file}"):
        load(tmp_path / "x")
    save_file({}, file, metadata=marks)
    with pytest.raises(ValueError, match="it holds no adapters"):
        load(tmp_path / "x")


def test_a_context_longer_than_the_models_own_is_refused():
    """--paper asks for 16,384 tokens. SmolLM2 was trained on 8,192 at most, and logp_gap would not have told."""
    model = tiny_model()
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    check_fit(model, tokenizer, 4096)
    model.config.raw["max_position_embeddings"] = None
    check_fit(model, tokenizer, 9999)
    with pytest.raises(ValueError, match="--max-context 4097: the model knows 4096 positions"):
        check_fit(tiny_model(), tokenizer, 4097)


def test_a_tokenizer_with_ids_that_have_no_embedding_is_refused():
    """As after adding tokens of a chat format without resizing the model. Ids may have gaps."""
    model = tiny_model()
    n = model.config.vocab_size

    def tokenizer(largest):
        return SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1, "c": largest})

    check_fit(model, tokenizer(n - 1), max_context=100)
    with pytest.raises(ValueError, match=f"the tokenizer has ids up to {n}, the model {n} embeddings"):
        check_fit(model, tokenizer(n), max_context=100)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, value):
    """Training once said "saved", and "next: mgrpo.py"."""
    model = tiny_model()
    save(model, tmp_path / "x")
    before = (tmp_path / "x/model.safetensors").read_bytes()
    with torch.no_grad():
        model.model.norm.weight[0] = value
    with pytest.raises(ValueError, match="x is not written: .*norm.weight holds numbers that are not finite"):
        save(model, tmp_path / "x")
    assert (tmp_path / "x/model.safetensors").read_bytes() == before


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None])
def test_adapters_that_peft_itself_wrote_are_refused_with_a_remedy(metadata, tmp_path):
    """They do not mark the frozen weights, and their scale and their modules may be others."""
    path = tmp_path / "x"
    adapter = path / "adapter"
    save(lora_policy(tmp_path), path)
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata=metadata)
    with pytest.raises(ValueError, match=f"another program wrote these adapters; .* or delete {adapter}"):
        load(path)


def test_a_checkpoint_of_all_weights_keeps_no_adapters_of_the_one_that_it_replaces(tmp_path):
    path = tmp_path / "x"
    save(lora_policy(tmp_path), path)
    save(tiny_model(seed=1), path)
    assert same_weights(load(path), tiny_model(seed=1))
    assert not (path / "adapter").exists()

    later = lora_policy(tmp_path, seed=2)
    save(later, path)
    assert same_weights(load(path), later)


class Killed(BaseException):
    """Stands for SIGKILL."""


FILE_OPERATIONS = (
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "shutil.rmtree",
)
moments = {"left": None}  # file operations until Killed; an audit hook cannot be removed


def count_down(event, arguments):
    if moments["left"] is not None and event in FILE_OPERATIONS:
        moments["left"] -= 1
        if moments["left"] < 0:
            raise Killed


sys.addaudithook(count_down)


@pytest.mark.parametrize("what", ["training state", "checkpoint", "checkpoint with adapters"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_save_killed_at_any_moment_leaves_the_last_one_or_the_new_one(tmp_path, what, before):
    """Kills a save at each of its file operations, with and without a save before it.

    Afterwards the directory loads, unless there was nothing before, and the next save works.
    """
    models = [tiny_model(seed=seed) for seed in range(3)]
    if what == "checkpoint with adapters":
        models = [lora_policy(tmp_path, seed=seed) for seed in range(3)]
    optimizers = [optimizer_of(model) for model in models]
    other = tiny_model(seed=9)

    def write(i, directory):
        path = directory / "x"
        if what == "training state":
            save_training(path, models[i], optimizers[i], {"step": i})
        else:
            save(models[i], path)

    def number_of(opened):
        number, = [i for i, model in enumerate(models) if same_weights(opened, model)]
        return number

    def found(directory):
        """The number of the model that loads, -1 if none does."""
        path = directory / "x"
        if what == "training state":
            extra = load_training(path, other, optimizer_of(other))
            if extra is None:
                return -1
            number = number_of(other)
            assert extra == {"step": number}
            return number
        try:
            opened = load(path)
        except ValueError as error:
            assert "cannot use" in str(error)
            return -1
        return number_of(opened)

    seen = []
    for number in range(100):
        directory = tmp_path / str(number)
        if before:
            write(0, directory)
        try:
            moments["left"] = number
            write(1, directory)
            break
        except Killed:
            moments["left"] = None
            seen.append(found(directory))
            write(2, directory)
            assert found(directory) == 2
        finally:
            moments["left"] = None

    # The old one up to some moment, then the new one.
    old = before - 1  # -1 if there was none
    assert len(seen) > 4
    assert seen == sorted(seen)
    assert set(seen) - {1} == {old}
    if before:
        assert 1 in seen


@contextmanager
def full_disk(size):
    """No file can grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    _, hard = before
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_sentence_and_leaves_the_last_save(tmp_path):
    state = tmp_path / "t"
    checkpoint = tmp_path / "c"
    model = tiny_model()
    other = tiny_model(seed=1)
    optimizer = optimizer_of(model)
    save_training(state, model, optimizer, {"step": 1})
    save(model, checkpoint)

    for size in (0, 1000, 50_000):
        with full_disk(size), pytest.raises(ValueError, match="^cannot write .*/t: .*unharmed"):
            save_training(state, other, optimizer, {"step": 2})
        with full_disk(size), pytest.raises(ValueError, match="^cannot write .*/c: .*unharmed"):
            save(other, checkpoint)

    assert load_training(state, other, optimizer) == {"step": 1}
    assert same_weights(other, model)
    assert same_weights(load(checkpoint), model)


def relative(a, b):
    error = (a.double() - b.double()).norm()
    size = b.double().norm().clamp(min=1e-30)
    return float(error / size)


def launch(ranks, *arguments):
    """tests/two_ranks.py on so many ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    script = [ROOT / "tests/two_ranks.py", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *map(str, script)], text=True, capture_output=True, env=env, timeout=900)
    assert done.returncode == 0, done.stderr


def test_a_head_that_only_one_rank_uses_trains_on_both(tmp_path):
    """The other rank skipped its all_reduce, and gloo aborted both."""
    launch(2, "head", tmp_path / "gradients")
    gradients = torch.load(tmp_path / "gradients", weights_only=True)
    assert gradients["all"].tolist() == [[1, 2]]
    assert gradients["first"].tolist() == [[0.5, 1]]
    assert gradients["none"] is None


def train_on_ranks(ranks, path):
    model = tiny_model("llama", tie_word_embeddings=False)
    save(model, path / "start")
    launch(ranks, "model", path / "start", path)
    return path


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return train_on_ranks(2, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.parametrize("lora", VARIANTS)
def test_two_ranks_equal_one(two_ranks, lora):
    several_ranks_equal_one(two_ranks, lora)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_equal_one_and_two_ranks_resume_what_they_saved(tmp_path, ranks):
    train_on_ranks(ranks, tmp_path)
    launch(2, "resume", tmp_path / "start", tmp_path)
    for lora in VARIANTS:
        several_ranks_equal_one(tmp_path, lora)
        path = tmp_path / f"lora-{lora}"
        whole = torch.load(path / "results.pt", weights_only=True)
        resumed = torch.load(path / "resumed.pt", weights_only=True)
        assert resumed["loss"] == pytest.approx(whole["losses"][2], rel=1e-6)
        for name, gradient in whole["gradients"][2].items():
            assert relative(resumed["gradients"][name], gradient) < tolerance(lora), name


def tolerance(lora):
    """B starts at 0, so A's gradient is small and its rounding relatively large."""
    if lora:
        return 1e-5
    return 1e-6


def several_ranks_equal_one(start, lora):
    """Loss, gradients and weights of three steps; one rank resumes what several ranks saved."""
    path = start / f"lora-{lora}"
    several = torch.load(path / "results.pt", weights_only=True)

    # 1) Three steps on one rank.
    model = load(start / "start", lora=lora)
    optimizer = optimizer_of(model)
    for step in range(3):
        loss, gradients = train_step(model, optimizer, step)
        assert several["losses"][step] == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            theirs = several["gradients"][step][name]
            assert relative(theirs, gradient) < tolerance(lora), name

    # 2) Two steps on several ranks, the third on one.
    resumed = load(start / "start", lora=lora)
    other = optimizer_of(resumed)
    assert load_training(path / "training", resumed, other) == {"step": 2}
    train_step(resumed, other, 2)

    # 3) The weights of all.
    trained_state = full_state(model)
    resumed_state = full_state(resumed)
    saved = load(path / "saved")
    for name, weight in saved.state_dict().items():
        assert relative(weight, trained_state[name]) < tolerance(lora)
        assert relative(resumed_state[name], trained_state[name]) < tolerance(lora)


@pytest.fixture
def group_of_one():
    """So that `shard` cuts models in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_is_sharded_again_after_an_error_while_it_was_whole(group_of_one):
    """Else every rank keeps the whole model, and the next step trains weights that the optimizer does not hold."""
    model = shard(tiny_model())
    tokens = torch.arange(20)[None]

    with pytest.raises(ZeroDivisionError), unsharded(model) as whole:
        for p in [*model.parameters(), *whole.parameters()]:
            assert not hasattr(p, "to_local")
        1 / 0

    for p in model.parameters():
        assert hasattr(p, "to_local")
    plain = tiny_model()
    assert_close(model(tokens), plain(tokens))


def test_config_json_names_the_master_weights_dtype_while_fsdp_holds_those_it_computes_with(group_of_one):
    """After a forward pass without a backward pass the outermost module stays gathered, on GPUs in bfloat16."""
    model = shard(tiny_model(), "bfloat16")
    with torch.no_grad():
        model(torch.arange(20)[None])
    assert model.model.norm.weight.dtype == torch.bfloat16  # the trap
    assert config_json(model)["torch_dtype"] == "float32"


@pytest.mark.parametrize("lora", [0, 4])
def test_with_bfloat16_on_a_cpu_training_scores_what_was_sampled_with_float32_weights_behind_it(lora, tmp_path):
    """Alone and without torchrun. The gap is bfloat16's rounding; float32, in another order, differs by 1e-7."""
    base = tmp_path / "base"
    path = tmp_path / "x"
    prompt = [1, 7, 30, 30, 200]
    save(tiny_model(), base)
    device = init_dist("bfloat16")
    try:
        # 1) Train.
        model = load_for_training(base, device, lora, "bfloat16")
        optimizer = optimizer_of(model)
        for step in range(2):
            train_step(model, optimizer, step)

        # 2) Training scores what was sampled.
        with unsharded(model) as whole:
            assert whole.model.embed_tokens.weight.dtype == torch.bfloat16
            ids, logps = generate(whole, prompt, 30, temperature=0.7, seed=3)
        tokens = torch.tensor([prompt + ids])
        action = torch.arange(35)[None] >= 5
        logp_N, _, _ = token_logprobs(model, tokens, action, temperature=0.7)
        scored = logp_N.detach()
        gap = (scored - torch.tensor(logps)).abs().mean()
        assert 1e-6 < gap < 2e-2

        # 3) So does the saved policy, opened again.
        save(model, path)
        opened = load(path, computing_dtype(device, "bfloat16"))
        logp_N, _, _ = token_logprobs(opened, tokens, action, temperature=0.7)
        assert_close(logp_N, scored, atol=1e-6, rtol=0)

        # 4) What trains is float32.
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32}
        kept = set()
        for p in trained:
            kept.update(tensor.dtype for tensor in optimizer.state[p].values())
        assert kept == {torch.float32}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_all_models_share_one_group_of_ranks_which_waits_for_the_longest_episodes(two_ranks):
    """A mesh for each model once made two more groups, which gave up after 30 minutes (NCCL: 10)."""
    results = torch.load(two_ranks / "lora-0/results.pt", weights_only=True)
    assert results["new_groups"] == 0
    assert results["timeouts"] == [7200.0]


@pytest.mark.parametrize("changes, message", [
    ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, qwen2, qwen3"),
    ({"model_type": "qwen3_moe"}, "model_type"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"model_type": "llama", "sliding_window": 4096}, "sliding_window 4096"),
    ({"sliding_window": 4096, "use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types {'sliding_attention'}"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_type 'yarn'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type 'dynamic'"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type 'yarn'"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}}, "'yarn'"),
    ({"rope_scaling": {"factor": 4.0}}, "rope_scaling {'factor': 4.0}"),
    ({"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2}}, "rope_type 'linear'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_scaling {'full_attention'"),
    ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
    ({"mlp_bias": True}, "mlp_bias"),
])
def test_unsupported_configs_are_refused_by_name(changes, message):
    raw = tiny_config(**changes)
    with pytest.raises(ValueError, match=f"^cannot use a/config.json: .*{message}"):
        ModelConfig.from_dict(raw, "a/config.json")


@pytest.mark.parametrize("key, value, kind", [
    ("tie_word_embeddings", "false", "bool"),  # it once counted as true
    ("rms_norm_eps", "1e-06", "float"),
    ("rope_theta", True, "float"),
    ("num_hidden_layers", 2.0, "int"),
])
def test_values_of_the_wrong_type_are_refused_by_name(key, value, kind):
    with pytest.raises(ValueError, match=f"cannot use a/config.json: {key} is {value!r}, not of type {kind}"):
        ModelConfig.from_dict(tiny_config(**{key: value}), "a/config.json")


@pytest.mark.parametrize("changes, says", [
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be at least 1"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ({"head_dim": 9}, "head_dim 9 is not even"),
    ({"rope_theta": 0.0}, "rope_theta is 0.0"),
    ({"rope_theta": math.nan}, "rope_theta is nan"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
    ({"max_position_embeddings": math.inf}, "max_position_embeddings is inf, not of type int"),
    ({"rope_scaling": LLAMA3 | {"factor": 0.0}}, "rope_scaling .* not finite and above 0"),
    ({"rope_scaling": LLAMA3 | {"factor": -8.0}}, "rope_scaling .* not finite and above 0"),
    ({"rope_scaling": LLAMA3 | {"factor": math.nan}}, "rope_scaling .* not finite and above 0"),
])
def test_sizes_that_no_model_can_have_are_refused(changes, says):
    with pytest.raises(ValueError, match=f"cannot use a/config.json: .*{says}"):
        ModelConfig.from_dict(tiny_config(**changes), "a/config.json")


def test_a_whole_number_may_stand_for_a_float():
    assert ModelConfig.from_dict(tiny_config(rope_theta=10000)).rope_theta == 1e4


def test_a_sliding_window_that_is_not_in_use_is_accepted():
    """Qwen's configs have one. Mistral 0.1 has no switch: its window is in use, and once ran silently without."""
    for changes in ({"sliding_window": 4096, "use_sliding_window": False}, {"sliding_window": None}):
        config = ModelConfig.from_dict(tiny_config(**changes))
        assert config.raw.items() >= changes.items()


def test_rope_settings_that_change_nothing_are_accepted():
    whole = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}
    config = ModelConfig.from_dict(tiny_config(rope_parameters=whole))
    assert config.rope_theta == 1e6


def test_both_spellings_of_rope_settings_mean_the_same():
    default = {"rope_type": "default", "rope_theta": 5e5}
    for scaled in ({}, LLAMA3):
        older = tiny_config("llama", rope_theta=5e5, rope_scaling=scaled or None)
        newer = tiny_config("llama", rope_parameters=default | scaled)
        del newer["rope_theta"]
        frequencies = rope_frequencies(ModelConfig.from_dict(older))
        same = rope_frequencies(ModelConfig.from_dict(newer))
        assert torch.equal(frequencies, same)
    assert frequencies[-1] == pytest.approx(5e5 ** -0.75 / 8)  # the slowest pair is slowed by the factor

    # As transformers reads a file that has both.
    raw = newer | {"rope_parameters": default, "rope_scaling": LLAMA3}
    both = ModelConfig.from_dict(raw)
    assert both.rope_scaling == LLAMA3


def test_what_a_config_leaves_out_is_what_transformers_takes():
    raw = tiny_config("llama", num_attention_heads=4)
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"):
        del raw[key]
    config = ModelConfig.from_dict(raw)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 1e4)
    assert config.tie_word_embeddings is False


def test_broken_checkpoints_say_what_is_wrong(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="cannot use the checkpoint .*/nowhere: .*neither"):
        load(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    with pytest.raises(ValueError, match="there is no Qwen3 in the directory Qwen; if you mean a model of the hub, rename"):
        load("Qwen/Qwen3")

    # 1) Its config.json asks for another model.
    save(tiny_model(), tmp_path)
    config = tmp_path / "config.json"
    weights = tmp_path / "model.safetensors"
    raw = json.loads(config.read_text())
    cases = [
        ({"hidden_size": 64}, f"{weights}: .* shape"),
        ({"num_hidden_layers": 3}, f"{tmp_path}: no model.layers.2.* 12 tensors"),
        ({"num_hidden_layers": 1}, f"{weights}: it holds model.layers.1.*, for which config.json has no place"),
        ({"hidden_size": "big"}, f"{config}: TypeError"),
        ({"vocab_size": 10**12}, f"{tmp_path}: no memory for its weights on cpu: RuntimeError"),
    ]
    for changes, message in cases:
        config.write_text(json.dumps(raw | changes))
        with pytest.raises(ValueError, match=f"^cannot use {message}"):
            load(tmp_path)
    config.write_text(json.dumps(raw))

    # 2) Its weights are no numbers to compute with.
    tensors = load_file(weights)
    for spoiled in (torch.ones(32, dtype=torch.int8), torch.full((32,), math.nan), torch.full((32,), math.inf)):
        save_file(tensors | {"model.norm.weight": spoiled}, weights)
        says = f"^cannot use {weights}: not all values of model.norm.weight are finite floating-point numbers"
        with pytest.raises(ValueError, match=says):
            load(tmp_path)

    # 3) They end early, or are missing.
    beginning = weights.read_bytes()[:1000]
    weights.write_bytes(beginning)
    with pytest.raises(ValueError, match=f"^cannot use {weights}: SafetensorError"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=f"^cannot use {weights}: FileNotFoundError"):
        load(tmp_path)


def python(script, env):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=env)


def test_a_rank_ends_its_process_with_all_that_it_said():
    """Two processes, forked from one that has imported torch already."""
    script = """if True:
        import os, run, test_run
        for i, status in enumerate((None, 'it failed')):
            child = os.fork()
            if child == 0:
                os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
                def main(cfg):
                    run.init_dist()
                    print('said', i, end=';')
                    return status
                run.command_line(main, test_run.Knobs, '')
            _, ended = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(ended), end=';', flush=True)"""
    done = python(script, os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"})
    assert done.stdout == "said 0;0;said 1;1;"
    assert done.stderr.endswith("it failed\n")


@pytest.mark.parametrize("slowdown, says", [(8.3, "8 times"), (0.6, "")])
def test_a_cpu_that_emulates_bfloat16_is_named(monkeypatch, capsys, slowdown, says):
    """Without AVX-512 BF16 SmolLM2's first optimizer step took minutes, and nothing told why."""
    assert 0.05 < run.bfloat16_slowdown() < 100
    monkeypatch.setattr(run, "bfloat16_slowdown", lambda: slowdown)
    try:
        init_dist("bfloat16")
    finally:
        dist.destroy_process_group()
    printed = capsys.readouterr().out
    assert says in printed and bool(says) == bool(printed)

    init_dist("float32")
    assert capsys.readouterr().out == ""


def test_one_gpu_without_torchrun_is_a_group_of_one():
    """So that `shard` computes in bfloat16 there as well. Gloo stands in for the GPU's backend.

    cuDNN's attention is off: it would plan each new row length again.
    """
    script = """if True:
        import os, run, torch, torch.distributed as dist
        cudnn = torch.backends.cuda.cudnn_sdp_enabled
        before = cudnn()
        begin = dist.init_process_group
        dist.init_process_group = lambda backend, **more: begin('gloo', **more)
        torch.cuda.is_available = lambda: True
        torch.cuda.set_device = print
        print(run.init_dist(), run.rank(), run.world_size(), dist.is_initialized())
        print(before, cudnn(), flush=True)
        os._exit(0)"""
    bare = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        bare.pop(name, None)
    done = python(script, bare)
    assert done.stdout.split("\n") == ["cuda:0", "cuda:0 0 1 True", "True False", ""], done.stderr


def test_the_command_line_completes_a_prompt(checkpoint, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        words = ["model.py", *map(str, arguments), "--max-new-tokens", "5"]
        monkeypatch.setattr(sys, "argv", words)
        model_py.main()
        return capsys.readouterr().out

    # 1) Ids, log-probs and text.
    out = json.loads(run(checkpoint, "red lamp", "--json"))
    assert len(out["ids"]) == 5
    assert len(out["logps"]) == 5
    assert out["prompt_ids"]
    assert run(checkpoint, "red lamp") == f"red lamp{out['text']}\n"

    # 2) A text ends with the first of the tokens that end one.
    again = tmp_path / "again"
    end_id = out["ids"][1]
    shutil.copytree(checkpoint, again)
    (again / "generation_config.json").write_text(json.dumps({"eos_token_id": [end_id]}))
    ended = json.loads(run(again, "red lamp", "--json"))
    length = out["ids"].index(end_id) + 1
    assert ended["ids"] == out["ids"][:length]

    # 3) An error is a sentence.
    for arguments in (["", "--temperature", "0"], ["red", "--temperature", "-1"], ["red", "--temperature", "nan"]):
        with pytest.raises(ValueError, match="give a prompt, at least 1 for"):
            run(checkpoint, *arguments)
    command = [sys.executable, ROOT / "model.py", "/nowhere", "x"]
    bad = subprocess.run(command, capture_output=True, text=True)
    assert bad.returncode != 0
    assert "/nowhere" in bad.stderr
    assert "Traceback" not in bad.stderr


def test_a_text_ends_at_any_of_the_chats_ends(tmp_path):
    model = tiny_model(eos_token_id=3)
    assert model_py.end_tokens(model, tmp_path) == [3]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert model_py.end_tokens(model, tmp_path) == [4, 5]
