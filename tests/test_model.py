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

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT, ComputedStep, tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from two_ranks import VARIANTS, optimizer_of, train_step

import model as model_py
from model import (KVCache, ModelConfig, Transformer, adapt, as_reference, attend, computing_dtype, config_json,
                   full_state, generate, load, load_for_training, load_tokenizer, rope_frequencies, sample, save, shard,
                   token_logprobs, unsharded)
from run import init_dist, load_training, save_training

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
FAMILIES = [("llama", {}), ("llama", {"tie_word_embeddings": False, "rope_scaling": LLAMA3}),
            ("qwen2", {}), ("qwen3", {"head_dim": 16})]
families = pytest.mark.parametrize("family, changes", FAMILIES)


def naive_forward(model, tokens):
    """The obvious decoder: one row, loops over heads and positions, no cache, float64."""
    c, weights = model.config, {k: v.double() for k, v in model.state_dict().items()}
    norm = lambda x, w: x / (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * w
    x, T, E = weights["model.embed_tokens.weight"][tokens], len(tokens), c.head_dim
    frequency = rope_frequencies(c).double()

    def turn(v, position):
        out = v.clone()
        for i in range(E // 2):
            angle = position * frequency[i]
            out[i] = v[i] * angle.cos() - v[i + E // 2] * angle.sin()
            out[i + E // 2] = v[i + E // 2] * angle.cos() + v[i] * angle.sin()
        return out

    for n in range(c.num_hidden_layers):
        w = lambda name: weights[f"model.layers.{n}.{name}"]
        h = norm(x, w("input_layernorm.weight"))
        q, k, v = (h @ w(f"self_attn.{p}_proj.weight").T for p in "qkv")
        if c.model_type == "qwen2":
            q, k, v = (x + w(f"self_attn.{p}_proj.bias") for p, x in zip("qkv", (q, k, v)))
        heads = []
        for head in range(c.num_attention_heads):
            kv = head // (c.num_attention_heads // c.num_key_value_heads)
            qs, ks = q[:, head * E:(head + 1) * E], k[:, kv * E:(kv + 1) * E]
            if c.model_type == "qwen3":
                qs = norm(qs, w("self_attn.q_norm.weight"))
                ks = norm(ks, w("self_attn.k_norm.weight"))
            qs, ks = (torch.stack([turn(a, t) for t, a in enumerate(x)]) for x in (qs, ks))
            out = []
            for t in range(T):
                p = (ks[:t + 1] @ qs[t] / math.sqrt(E)).softmax(0)
                out.append(p @ v[:t + 1, kv * E:(kv + 1) * E])
            heads.append(torch.stack(out))
        x = x + torch.cat(heads, -1) @ w("self_attn.o_proj.weight").T
        h = norm(x, w("post_attention_layernorm.weight"))
        gate = h @ w("mlp.gate_proj.weight").T
        x = x + (gate * gate.sigmoid() * (h @ w("mlp.up_proj.weight").T)) @ w("mlp.down_proj.weight").T
    head = weights["model.embed_tokens.weight"] if c.tie_word_embeddings else weights["lm_head.weight"]
    return norm(x, weights["model.norm.weight"]) @ head.T


@families
def test_forward_equals_the_obvious_loops(family, changes):
    model = tiny_model(family, **changes)
    tokens = torch.randint(0, 400, (1, 12), generator=torch.Generator().manual_seed(1))
    expected = naive_forward(model, tokens[0])
    torch.testing.assert_close(model(tokens)[0].double(), expected, atol=2e-4, rtol=1e-4)


GOLDEN = json.loads((ROOT / "tests/golden/golden.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["families"], ids=lambda case: case["name"])
def test_logits_equal_those_of_transformers(case):
    """tests/golden/make.py compared all logits and stored the first 24 of every 33rd position."""
    tokens = torch.randint(0, 400, (2, 100), generator=torch.Generator().manual_seed(12))
    positions = torch.stack((torch.arange(100), torch.arange(20_000, 20_100)))
    logits = tiny_model(case["family"], seed=11, **case["changes"])(tokens, positions)[:, ::33, :24]
    torch.testing.assert_close(logits, torch.tensor(case["logits"]), atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "runs/smollm2").exists(),
                    reason="needs SmolLM2-135M-Instruct (538 MB, not committed) in runs/smollm2")
def test_fifty_greedy_tokens_equal_those_of_transformers():
    tokenizer, model = load_tokenizer(ROOT / "runs/smollm2"), load(ROOT / "runs/smollm2")
    for case in GOLDEN["smollm2"]:
        assert generate(model, tokenizer.encode(case["prompt"]).ids, 50)[0] == case["ids"], case["prompt"]


@families
def test_cached_chunked_rolled_back_and_ragged_equal_uncached(family, changes):
    model = tiny_model(family, **changes)
    tokens = torch.randint(0, 400, (3, 40), generator=torch.Generator().manual_seed(2))
    whole = model(tokens)
    at = lambda start, end: torch.arange(start, end).expand(3, end - start)
    cache, rows = KVCache(model.config, 6, 64), slice(2, 5)
    chunks = [model(tokens[:, a:b], at(a, b), cache, rows) for a, b in [(0, 7), (7, 8), (8, 31), (31, 40)]]
    torch.testing.assert_close(torch.cat(chunks, 1), whole, atol=1e-5, rtol=1e-5)
    model(torch.randint(0, 400, (3, 20)), at(15, 35), cache, rows)  # to be rolled back to position 15
    again = model(tokens[:, 15:], at(15, 40), cache, rows)
    torch.testing.assert_close(again, whole[:, 15:], atol=1e-5, rtol=1e-5)
    ragged = torch.tensor([[5], [20], [39]])  # a decoding step of rows with different lengths
    step = model(tokens.gather(1, ragged), ragged, cache, rows)
    torch.testing.assert_close(step[:, 0], whole[torch.arange(3), ragged[:, 0]], atol=1e-5, rtol=1e-5)
    ragged = torch.tensor([[3, 4, 5], [18, 19, 20], [37, 38, 39]])  # the same with several tokens
    step = model(tokens.gather(1, ragged), ragged, cache, rows)
    expected = whole[torch.arange(3)[:, None], ragged]
    torch.testing.assert_close(step, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_graphed_step_equals_the_uncached_forward_at_every_length():
    """All but the graph itself, which needs a GPU: fixed slots, buffers, growing part of the cache."""
    model, cache = tiny_model(), KVCache(tiny_model().config, 4, 41)
    tokens = torch.randint(0, 400, (4, 41), generator=torch.Generator().manual_seed(2))
    lengths, step = torch.tensor([[0], [9], [14], [21]]), ComputedStep(model, cache)
    model(tokens[:, :21], torch.arange(21).expand(4, 21), cache)  # the shorter rows have rolled back
    whole = model(tokens)
    for added in range(20):
        at = lengths + added
        logits = step(tokens.gather(1, at), at, int(at.max()))
        torch.testing.assert_close(logits, whole[torch.arange(4), at[:, 0]], atol=1e-5, rtol=1e-5)
    assert list(step.graphs) == [32, 41]
    with pytest.raises(AssertionError, match="position 41 does not fit"):
        step(tokens[:, :1], lengths, 41)


def test_a_kernel_may_leave_its_result_transposed_in_memory(monkeypatch):
    """As CUDA's memory-efficient kernel does, which takes the masks of ragged rows."""
    q, k, v = torch.randn(3, 8, 1, 16), torch.randn(3, 2, 30, 16), torch.randn(3, 2, 30, 16)
    mask = torch.arange(30) <= torch.tensor([4, 11, 29])[:, None, None, None]
    expected, kernel = attend(q, k, v, mask), F.scaled_dot_product_attention
    transposed = lambda *a: kernel(*a).transpose(1, 2).contiguous().transpose(1, 2)
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
    torch.testing.assert_close(scored.detach(), torch.tensor(logps), atol=1e-5, rtol=1e-5)
    assert (entropy > 0).all()


def test_logprobs_and_gradients_do_not_depend_on_chunks_or_recomputation():
    tokens = torch.randint(0, 400, (2, 30), generator=torch.Generator().manual_seed(4))
    action = torch.zeros_like(tokens, dtype=torch.bool)
    action[0, 5:9] = action[1, 20:30] = True
    gradients = []
    for chunk, recompute in [(1000, False), (3, False), (3, True)]:
        model = tiny_model()
        model.recompute = recompute
        logp, _, _ = token_logprobs(model, tokens, action, chunk=chunk)
        (logp * torch.arange(14)).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    reference = model(tokens).log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0][action[:, 1:]]
    torch.testing.assert_close(logp, reference, atol=1e-5, rtol=1e-5)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], atol=1e-5, rtol=1e-4)


def test_no_marked_token_is_no_error():
    """A rank without work runs such a row, so that its gradients exist."""
    model = tiny_model()
    logp_N, entropy_N, hidden_ND = token_logprobs(model, torch.zeros(1, 9).long(), torch.zeros(1, 9).bool())
    assert logp_N.shape == entropy_N.shape == (0,) and hidden_ND.shape == (0, 32)
    logp_N.sum().backward()
    assert all(not p.grad.any() for p in model.parameters())


def test_the_hidden_states_that_come_along_predict_the_marked_tokens_and_carry_the_gradient():
    """A critic that trains jointly with the policy reads them; its gradient is that of a forward of its own."""
    tokens = torch.randint(0, 400, (2, 30), generator=torch.Generator().manual_seed(4))
    action = torch.zeros_like(tokens, dtype=torch.bool)
    action[0, 5:9] = action[1, 20:30] = True
    critic, gradients = torch.randn(32, generator=torch.Generator().manual_seed(5)), []
    model = tiny_model()
    logp_N, _, hidden_ND = token_logprobs(model, tokens, action, chunk=4)
    whole_BTD = model(tokens, head=lambda x_BTD: x_BTD)
    own_ND = torch.cat((whole_BTD[0, 4:8], whole_BTD[1, 19:29]))
    torch.testing.assert_close(hidden_ND, own_ND)
    scored_N = model.logits(own_ND).log_softmax(-1).gather(-1, tokens[action][:, None])[:, 0]
    for logp, hidden in ((logp_N, hidden_ND), (scored_N, own_ND)):
        model.zero_grad()
        (logp.sum() + (hidden @ critic).square().sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def trunk_and_leaves(generator, trunk, leaves, flat=0):
    """A random trajectory packed at index `flat`: (tokens, positions, action, segments, rows).

    leaves: for each, how many trunk tokens it continues, its length, and the actions at its end.
    rows: the same trajectory unpacked, as pairs of ids and the number of actions.
    """
    draw = lambda n: torch.randint(0, 400, (n,), generator=generator).tolist()
    tokens = shared = draw(trunk)
    positions, action = list(range(trunk)), [False] * trunk
    segments, rows = [(flat, flat + trunk, flat, flat)], []
    for prefix, length, n_action in leaves:
        own, start = draw(length), flat + len(tokens)
        segments.append((start, start + length, flat, flat + prefix))
        tokens, positions = tokens + own, positions + list(range(prefix, prefix + length))
        action += [False] * (length - n_action) + [True] * n_action
        rows.append((shared[:prefix] + own, n_action))
    return tokens, positions, action, segments, rows


@families
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_packed_row_equals_separate_rows(family, changes, kv_heads):
    """Log-probs and gradients of three trajectories in one row, against one row per turn."""
    model = tiny_model(family, **changes, num_key_value_heads=kv_heads)
    generator, packed = torch.Generator().manual_seed(6), ([], [], [], [], [])
    for trunk, leaves in [(30, [(5, 12, 3), (17, 2, 1), (30, 9, 4)]), (3, [(3, 20, 6)]),
                          (11, [(0, 7, 2), (1, 5, 4), (11, 6, 5)])]:
        parts = trunk_and_leaves(generator, trunk, leaves, flat=len(packed[0]))
        packed = tuple(whole + part for whole, part in zip(packed, parts, strict=True))
    tokens, positions, action, segments, rows = packed
    weight = torch.randn(sum(action), generator=generator)

    def gradients(logp):
        model.zero_grad()
        (logp * weight).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    last = lambda ids, n: torch.arange(len(ids))[None] >= len(ids) - n
    plain = [token_logprobs(model, torch.tensor([ids]), last(ids, n)) for ids, n in rows]
    plain, entropy, hidden = (torch.cat(column) for column in zip(*plain))
    expected = gradients(plain)
    for recompute in (False, True):
        model.recompute = recompute
        logp, entropy_, hidden_ = token_logprobs(model, torch.tensor([tokens]), torch.tensor([action]),
                                                 chunk=7, positions_BT=torch.tensor([positions]),
                                                 segments=segments)
        torch.testing.assert_close(logp, plain, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(hidden_, hidden, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy_, entropy, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradients(logp), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("T, C", [(1, 1), (1, 9), (5, 5), (5, 9), (60, 60), (60, 200)])
def test_attention_behind_a_context_equals_the_written_out_softmax(T, C):
    g = torch.Generator().manual_seed(0)
    shapes = ((4, T), (2, C), (2, C), (4, T))
    q, k, v, weight = (torch.randn(1, *shape, 8, generator=g).requires_grad_() for shape in shapes)
    scores = q @ k.repeat_interleave(2, dim=1).transpose(2, 3) / 8 ** 0.5
    scores[..., torch.ones(T, C, dtype=torch.bool).triu(C - T + 1)] = -torch.inf
    expected = scores.softmax(-1) @ v.repeat_interleave(2, dim=1)
    got = attend(q, k, v)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    gradients = (torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (got, expected))
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_context_comes_with_what_it_saw():
    """Tokens 6..8 see 0..2, the context of the segment 4..5, and 4: three rows that begin alike."""
    model, ids = tiny_model(), torch.randint(0, 400, (1, 9), generator=torch.Generator().manual_seed(6))
    positions = torch.tensor([[0, 1, 2, 3, 3, 4, 4, 5, 6]])
    packed = model(ids, positions, segments=[(0, 4, 0, 0), (4, 6, 0, 3), (6, 9, 4, 5)])
    for row, own in (([0, 1, 2, 3], 4), ([0, 1, 2, 4, 5], 2), ([0, 1, 2, 4, 6, 7, 8], 3)):
        torch.testing.assert_close(packed[0, row[-own:]], model(ids[:, row])[0, -own:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("segments", [
    [(0, 4, 0, 0), (4, 9, 1, 3)], [(0, 4, 0, 0), (4, 9, 0, 5)], [(0, 4, 0, 0), (4, 9, 4, 6)],
    [(0, 4, 0, 0), (4, 6, 0, 4), (6, 9, 4, 7)]])
def test_a_context_that_begins_no_earlier_segment_is_refused(segments):
    with pytest.raises(AssertionError, match="first tokens of an earlier"):
        tiny_model()(torch.zeros(1, 9, dtype=torch.long), segments=segments)


def test_sample_draws_from_the_softmax_and_reports_its_logprob():
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0]]).expand(20000, 4)
    uniform = torch.rand(20000, generator=torch.Generator().manual_seed(5))
    for temperature in (1.0, 0.5):
        ids, logp = sample(logits, uniform, temperature)
        p = (logits[0] / temperature).softmax(-1)
        torch.testing.assert_close(torch.bincount(ids, minlength=4) / 20000, p, atol=0.01, rtol=0)
        torch.testing.assert_close(logp, p.log()[ids])
    assert sample(logits, uniform, 0)[0].unique().tolist() == [0]


def test_a_sampled_token_does_not_depend_on_the_other_rows_of_its_batch():
    logits, uniform = torch.randn(8, 50), torch.rand(8)
    alone = [int(sample(logits[i:i + 1], uniform[i:i + 1])[0]) for i in range(8)]
    assert sample(logits, uniform)[0].tolist() == alone


def test_extreme_uniform_numbers_stay_inside_the_vocabulary():
    logits = torch.full((2, 5), -1e4)
    logits[:, 2] = 0
    extremes = torch.tensor([0.0, 1 - 1e-9], dtype=torch.float64)
    assert [x.tolist() for x in sample(logits, extremes)] == [[2, 2], [0.0, 0.0]]


def test_a_random_number_just_below_1_is_not_rounded_to_the_last_token(monkeypatch):
    """As float32 would do."""
    model, only_7 = tiny_model(), torch.full((1, 400), -1e4)
    only_7[0, 7] = 0.0
    model.logits = lambda x: only_7
    monkeypatch.setattr(random.Random, "random", lambda self: 1 - 2**-53)
    assert generate(model, [1, 2], 3, temperature=1.0)[0] == [7, 7, 7]


@pytest.mark.parametrize("recompute", [False, True])
def test_training_keeps_no_tensor_as_wide_as_the_vocabulary(recompute):
    """Full (T, V) float32 logits never exist: the backward pass recomputes those of a chunk."""
    model, widths = tiny_model(vocab_size=4000), []
    model.recompute = recompute
    tokens = torch.randint(0, 4000, (1, 200))
    keep = lambda t: widths.append(t.shape[-1:]) or t
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        logp_N, _, _ = token_logprobs(model, tokens, torch.arange(200)[None] >= 50, chunk=64)
    assert widths and (4000,) not in widths
    logp_N.sum().backward()


def same_weights(a, b):
    b = b.state_dict()
    return all(torch.equal(weight, b.pop(name)) for name, weight in a.state_dict().items()) and not b


@families
def test_saved_and_loaded_weights_are_bit_equal(family, changes, tmp_path):
    model = tiny_model(family, **changes)
    save(model, tmp_path / "a")
    save(model, tmp_path / "a", run={"seed": 1})  # into an existing directory
    again = load(tmp_path / "a")
    assert same_weights(model, again) and again.config.raw["run"] == {"seed": 1}
    tokens = torch.randint(0, 400, (1, 9))
    assert torch.equal(model(tokens), again(tokens))
    assert {f.name for f in (tmp_path / "a").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_json_names_the_dtype_of_the_weights_whatever_was_there_before(key, tmp_path):
    """A run once wrote the base's bfloat16 at its start and float32 with each save, over the same weights."""
    raw = tiny_config()
    del raw["torch_dtype"]
    base = Transformer(ModelConfig.from_dict(raw | {key: "bfloat16"})).to(torch.bfloat16)
    save(base, tmp_path / "base")
    model = load(tmp_path / "base")
    assert config_json(model) == raw | {key: "float32"} and config_json(base)[key] == "bfloat16"
    save(model, tmp_path / "trained")
    assert json.loads((tmp_path / "trained/config.json").read_text()) == config_json(model)
    assert config_json(load(tmp_path / "trained", torch.bfloat16))[key] == "bfloat16"


def test_a_checkpoint_keeps_no_prompt_of_the_one_that_it_replaces(checkpoint, tmp_path):
    """A leftover agent.json would give the new policy a prompt that it was not trained with."""
    shutil.copytree(checkpoint, tmp_path / "other")
    (tmp_path / "other/agent.json").write_text('{"think": false}')
    shutil.copytree(checkpoint, tmp_path / "plain", ignore=shutil.ignore_patterns("agent.json"))
    for like in ("other", "plain"):
        save(tiny_model(), tmp_path / "a", like=tmp_path / like)
        (tmp_path / "a/metrics.jsonl").touch()
    files = {f.name for f in (tmp_path / "a").iterdir()}
    assert files == {"config.json", "tokenizer.json", "model.safetensors", "metrics.jsonl"}


def test_tensors_that_the_model_computes_or_shares_are_skipped(tmp_path):
    """Old writers store rotation speeds, some store the tied matrix twice."""
    model = tiny_model("llama")
    save(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    assert same_weights(load(tmp_path), model)


def test_weights_are_read_from_several_files_unless_one_holds_all(tmp_path):
    """As on the hub; transformers leaves old parts next to a new model.safetensors."""
    first, second = tiny_model(seed=1), tiny_model(seed=2)
    save(first, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for part in range(3):
        some = {name: state[name] for name in list(state)[part::3]}
        save_file(some, tmp_path / f"model-{part + 1:05}-of-00003.safetensors")
    (tmp_path / "model.safetensors").unlink()
    assert same_weights(load(tmp_path), first)
    save(second, tmp_path)
    assert same_weights(load(tmp_path), second)


def test_resumed_training_equals_never_having_stopped(tmp_path):
    model, plain, again, path = tiny_model(), tiny_model(), tiny_model(seed=9), tmp_path / "t"
    optimizer, plain_optimizer, other = map(optimizer_of, (model, plain, again))
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
    assert [f.name for f in tmp_path.iterdir()] == ["t"] and len(list(path.iterdir())) == 1
    foreign = tiny_model(num_hidden_layers=1)
    with pytest.raises(ValueError, match="t/00002: it belongs to another model"):
        load_training(path, foreign, optimizer_of(foreign))


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices, but for copies and numbers. Torch's checks have gaps.

    A tensor on torch's device "meta" has no data, so `marked` is how many positions a bool mask marks.
    """

    def __init__(self, marked):
        super().__init__()
        self.marked = marked

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.ndim}
        assert len(devices) < 2 or "copy" in str(operation), f"{operation} on {devices}"
        if operation is torch.ops.aten._local_scalar_dense.default:
            return 0
        index = args[1][0] if operation is torch.ops.aten.index.Tensor else None
        if index is not None and index.dtype == torch.bool:
            return args[0].new_empty(self.marked, *args[0].shape[index.ndim:])
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("lora", [0, 4])
@families
def test_no_operation_mixes_devices_or_dtypes(family, changes, lora, monkeypatch):
    """On a GPU the model is bfloat16 and the CPU's tensors are elsewhere. A device without data stands in."""
    with torch.device("meta"):
        model = Transformer(ModelConfig.from_dict(tiny_config(family, **changes)))
        model = adapt(model.to(torch.bfloat16), lora)
        tokens, action = torch.zeros(1, 30, dtype=torch.long), torch.zeros(1, 30, dtype=torch.bool)
        positions, uniform = torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [10, 29])  # a chunk's first and last position
    monkeypatch.setattr(model_py, "causal_lower_right",  # a subclass of tensors, which the mode cannot make
                        lambda T, C: torch.ones(T, C, dtype=torch.bool, device="meta").tril(C - T))
    with OneDevice(marked=8):
        assert model(tokens).dtype == torch.bfloat16
        for recompute in (False, True):
            model.recompute = recompute
            segments = [(0, 20, 0, 0), (20, 30, 0, 7)]
            logp_N, entropy_N, _ = token_logprobs(model, tokens, action, segments=segments)
            assert logp_N.dtype == entropy_N.dtype == torch.float32 and logp_N.shape == (8,)
            logp_N.sum().backward()
        with torch.no_grad():
            cache = KVCache(model.config, 4, 64, torch.bfloat16, "meta")
            model(tokens[:, :20], tokens[:, :20], cache, slice(0, 1))
            logits = model(positions, positions, cache, slice(1, 4), end=40)[:, -1]
            for temperature in (0.0, 0.7):
                ids, logp = sample(logits, uniform, temperature)
                assert ids.device.type == logp.device.type == "meta" and logp.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {
        torch.float32 if lora else torch.bfloat16}


# ------------------------------------------------------------------------------------------------- LoRA


def adapted_model(family="qwen2", rank=4, **changes):
    """`tiny_model` with random adapters; those of a new one change nothing."""
    model = adapt(tiny_model(family, **changes), rank)
    for i, (name, weight) in enumerate(model.named_parameters()):
        if "lora_" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
    return model


@families
def test_lora_computes_the_merged_model_and_its_gradient_is_the_chain_rule(family, changes, tmp_path):
    """W' = W + s B A: with G = dL/dW' from training all of W', dL/dB = s G A^T and dL/dA = s B^T G."""
    model = adapted_model(family, **changes)
    save(model, tmp_path)
    merged = load(tmp_path, lora=0)
    tokens = torch.randint(0, 400, (2, 30), generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(merged(tokens), model(tokens), atol=2e-5, rtol=1e-5)
    for each in (model, merged):
        token_logprobs(each, tokens, torch.arange(30).expand(2, 30) >= 20)[0].sum().backward()
    full, adapters = dict(merged.named_parameters()), 0
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            adapters += 1
            G, A, B = full[name + ".weight"].grad, layer.lora_A, layer.lora_B
            torch.testing.assert_close(B.grad, 32 / 4 * G @ A.T, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(A.grad, 32 / 4 * B.T @ G, atol=1e-4, rtol=1e-4)
    frozen = [p for name, p in model.named_parameters() if "lora_" not in name]
    assert adapters == 2 * 7 and all(p.grad is None and not p.requires_grad for p in frozen)


@pytest.mark.skipif(not find_spec("transformers"), reason="compares with transformers, which is no dependency")
def test_a_merged_checkpoint_opens_in_transformers_with_equal_logits(tmp_path):
    import transformers
    model, tokens = adapted_model(), torch.arange(40)[None]
    save(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=2e-4, rtol=0)


def test_with_lora_sampled_logprobs_equal_scored_logprobs():
    model, prompt = adapted_model(), [1, 7, 30, 30, 200]
    ids, logps = generate(model, prompt, 30, temperature=0.7, seed=3)
    tokens = torch.tensor([prompt + ids])
    scored, _, _ = token_logprobs(model, tokens, torch.arange(35)[None] >= 5, temperature=0.7)
    torch.testing.assert_close(scored.detach(), torch.tensor(logps), atol=1e-5, rtol=1e-5)


def test_new_adapters_change_nothing_and_without_them_a_trained_model_is_the_first_one(tmp_path):
    """So the reference policy needs no memory. Only A and B train, in float32, next to any W."""
    save(tiny_model(), tmp_path)
    tokens = torch.randint(0, 400, (1, 20))
    for dtype in (torch.float32, torch.bfloat16):
        base, model = load(tmp_path, dtype), load(tmp_path, dtype, lora=4)
        assert torch.equal(model(tokens), base(tokens))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        train_step(model, optimizer, 0)
        assert not torch.equal(model(tokens), base(tokens))
        with as_reference(model):
            assert torch.equal(model(tokens), base(tokens))
        assert not torch.equal(model(tokens), base(tokens))
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert len(trained) == 2 * 2 * 7 and all("lora_" in name for name in trained)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_adapters_are_on_again_after_an_error_without_them():
    """Else the policy would go on as its own reference, in silence."""
    model, tokens = adapted_model(), torch.arange(20)[None]
    before = model(tokens)
    with pytest.raises(ZeroDivisionError), as_reference(model):
        1 / 0
    assert torch.equal(model(tokens), before)


def test_a_lora_runs_state_holds_only_what_trains_and_resumes_exactly(tmp_path):
    save(tiny_model(), tmp_path / "base")
    model, again = (load(tmp_path / "base", lora=4) for _ in range(2))
    optimizer, other = optimizer_of(model), optimizer_of(again)
    for step in range(2):
        train_step(model, optimizer, step)
    save_training(tmp_path / "t", model, optimizer, {"step": 2})
    saved = load_file(tmp_path / "t/00001/part-0.safetensors")
    assert {name.split("/")[0].rsplit(".", 1)[1] for name in saved} == {"lora_A", "lora_B"}
    assert load_training(tmp_path / "t", again, other) == {"step": 2}
    for each in ((model, optimizer), (again, other)):
        train_step(*each, 2)
    assert same_weights(model, again)
    plain = tiny_model()
    with pytest.raises(ValueError, match="another model; give its --model, --lora"):
        load_training(tmp_path / "t", plain, optimizer_of(plain))


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
    tokens = torch.randint(0, 400, (2, 30), generator=torch.Generator().manual_seed(seed))
    return token_logprobs(model, tokens, torch.arange(30).expand(2, 30) >= 10)[0].detach()


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_lora_policy_has_the_logprobs_of_the_one_in_memory_bit_for_bit(dtype, size, tmp_path):
    """Merged into bfloat16, the update was wrong by half at |B| = 1e-4, and the saved policy another one."""
    model = lora_policy(tmp_path, dtype, size)
    save(model, tmp_path / "x")
    for again in (load(tmp_path / "x", dtype), load(tmp_path / "x", dtype, lora=4)):
        assert same_weights(again, model) and torch.equal(scores(again), scores(model))
    assert size < 1e-4 or not torch.equal(scores(model), scores(load(tmp_path / "base", dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merged_weights_hold_the_update_in_float32(dtype, tmp_path):
    """Whatever the frozen weights are: to the last bits of a float32 of their size."""
    model = lora_policy(tmp_path, dtype, size=1e-4)
    save(model, tmp_path / "x")
    assert config_json(model)["torch_dtype"] == "float32"
    merged, frozen = load(tmp_path / "x", lora=0), load(tmp_path / "base", dtype)
    assert not merged.lora and json.loads((tmp_path / "x/config.json").read_text()) == config_json(merged)
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            W = frozen.get_submodule(name).weight.detach().double()
            update = merged.get_submodule(name).weight.detach().double() - W
            expected = 32 / 4 * layer.lora_B.detach().double() @ layer.lora_A.detach().double()
            assert (update - expected).abs().max() <= 2 ** -23 * W.abs().max()
            assert relative(update, expected) < 1e-3
    opened = load_file(tmp_path / "x/model.safetensors")
    assert {weight.dtype for weight in opened.values()} == {torch.float32} and opened.keys() == frozen.state_dict().keys()


def test_the_adapters_lie_in_pefts_layout(tmp_path):
    """As PEFT documents it: W + lora_alpha / r B A for each module that a pair of names says."""
    model = lora_policy(tmp_path)
    save(model, tmp_path / "x")
    settings = json.loads((tmp_path / "x/adapter/adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA" and settings["base_model_name_or_path"] == str(tmp_path / "base")
    assert set(settings["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    tensors, rebuilt = load_file(tmp_path / "x/adapter/adapter_model.safetensors"), load(tmp_path / "base")
    assert len(tensors) == 2 * 2 * 7
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        A, B = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        assert len(A) == settings["r"]
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rebuilt.get_submodule(layer).weight.data += settings["lora_alpha"] / settings["r"] * B @ A
    torch.testing.assert_close(scores(rebuilt), scores(model), atol=1e-5, rtol=1e-5)
    assert not [file for file in (tmp_path / "x").glob("*.safetensors") if file.name != "model.safetensors"]


@pytest.mark.skipif(not find_spec("peft"), reason="compares with peft, which is no dependency")
def test_peft_opens_the_adapters_with_equal_logits(tmp_path):
    import peft
    model, tokens = lora_policy(tmp_path), torch.arange(40)[None]
    save(model, tmp_path / "x")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "x/adapter", torch_dtype=torch.float32)
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_with_the_adapters_of_the_checkpoint_which_are_its_reference(dtype, tmp_path):
    """The reference is the policy that training began with, as for all weights, and not the frozen weights."""
    clone = lora_policy(tmp_path, dtype)
    save(clone, tmp_path / "clone")
    model = load(tmp_path / "clone", dtype, lora=4)
    train_step(model, torch.optim.AdamW(model.parameters(), 1e-2), 0)
    assert not torch.equal(scores(model), scores(clone))
    with as_reference(model):
        assert torch.equal(scores(model), scores(clone))
    save(model, tmp_path / "next")
    again = load(tmp_path / "next", dtype)
    assert torch.equal(scores(again), scores(model)) and again.base == clone.base  # whatever becomes of the clone
    with pytest.raises(ValueError, match="clone: its adapters have rank 4; give --lora 4 .* or --lora 0"):
        load(tmp_path / "clone", lora=8)


def test_adapters_are_not_put_on_other_weights_than_they_were_trained_on(tmp_path):
    """As after cloning again into the same directory. The merged weights need no others."""
    model = lora_policy(tmp_path)
    save(model, tmp_path / "x")
    base = tmp_path / "base"
    save(tiny_model(seed=1), base)
    with pytest.raises(ValueError, match=f"{base} no longer holds .* delete {tmp_path / 'x/adapter'} to use"):
        load(tmp_path / "x")
    shutil.rmtree(tmp_path / "x/adapter")
    torch.testing.assert_close(scores(load(tmp_path / "x")), scores(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None])
def test_adapters_that_peft_itself_wrote_are_refused_with_a_remedy(metadata, tmp_path):
    """They do not mark the frozen weights, and their scale and their modules may be others."""
    save(lora_policy(tmp_path), tmp_path / "x")
    file = tmp_path / "x/adapter/adapter_model.safetensors"
    save_file(load_file(file), file, metadata=metadata)
    with pytest.raises(ValueError, match=f"another program wrote these adapters; .* or delete {tmp_path / 'x/adapter'}"):
        load(tmp_path / "x")


def test_a_checkpoint_of_all_weights_keeps_no_adapters_of_the_one_that_it_replaces(tmp_path):
    save(lora_policy(tmp_path), tmp_path / "x")
    save(tiny_model(seed=1), tmp_path / "x")
    assert same_weights(load(tmp_path / "x"), tiny_model(seed=1)) and not (tmp_path / "x/adapter").exists()
    later = lora_policy(tmp_path, seed=2)
    save(later, tmp_path / "x")
    assert same_weights(load(tmp_path / "x"), later)


class Killed(BaseException):
    """Stands for SIGKILL."""


FILE_OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
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
        if what != "training state":
            return save(models[i], directory / "x")
        save_training(directory / "x", models[i], optimizers[i], {"step": i})

    def found(directory):
        """The number of the model that loads, -1 if none does."""
        if what != "training state":
            try:
                opened = load(directory / "x")
            except ValueError as error:
                assert "cannot use" in str(error)
                return -1
        elif (extra := load_training(directory / "x", opened := other, optimizer_of(other))) is None:
            return -1
        i, = [i for i, model in enumerate(models) if same_weights(opened, model)]
        assert what != "training state" or extra == {"step": i}
        return i

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
    assert len(seen) > 4 and seen == sorted(seen) and set(seen) - {1} == {before - 1}
    assert 1 in seen or not before


@contextmanager
def full_disk(size):
    """No file can grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_sentence_and_leaves_the_last_save(tmp_path):
    model, other = tiny_model(), tiny_model(seed=1)
    optimizer = optimizer_of(model)
    save_training(tmp_path / "t", model, optimizer, {"step": 1})
    save(model, tmp_path / "c")
    for size in (0, 1000, 50_000):
        with full_disk(size), pytest.raises(ValueError, match="^cannot write .*/t: .*unharmed"):
            save_training(tmp_path / "t", other, optimizer, {"step": 2})
        with full_disk(size), pytest.raises(ValueError, match="^cannot write .*/c: .*unharmed"):
            save(other, tmp_path / "c")
    assert load_training(tmp_path / "t", other, optimizer) == {"step": 1}
    assert same_weights(other, model) and same_weights(load(tmp_path / "c"), model)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def launch(ranks, *arguments):
    """tests/two_ranks.py on so many ranks."""
    command = ["torch.distributed.run", "--nproc_per_node", ranks, ROOT / "tests/two_ranks.py", *arguments]
    done = subprocess.run([sys.executable, "-m", *map(str, command)], text=True, capture_output=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=900)
    assert done.returncode == 0, done.stderr


def train_on_ranks(ranks, path):
    save(tiny_model("llama", tie_word_embeddings=False), path / "start")
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
        whole, resumed = (torch.load(path / name, weights_only=True) for name in ("results.pt", "resumed.pt"))
        assert resumed["loss"] == pytest.approx(whole["losses"][2], rel=1e-6)
        for name, gradient in whole["gradients"][2].items():
            assert relative(resumed["gradients"][name], gradient) < (1e-5 if lora else 1e-6), name


def several_ranks_equal_one(start, lora):
    """Loss, gradients and weights of three steps; one rank resumes what several ranks saved."""
    path, model = start / f"lora-{lora}", load(start / "start", lora=lora)
    two, optimizer = torch.load(path / "results.pt", weights_only=True), optimizer_of(model)
    for step in range(3):
        loss, gradients = train_step(model, optimizer, step)
        assert two["losses"][step] == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            # B starts at 0, so A's gradient is small and its rounding relatively large.
            assert relative(two["gradients"][step][name], gradient) < (1e-5 if lora else 1e-6), name
    resumed = load(start / "start", lora=lora)
    other = optimizer_of(resumed)
    assert load_training(path / "training", resumed, other) == {"step": 2}
    train_step(resumed, other, 2)
    trained, resumed = full_state(model), full_state(resumed)
    for name, saved in load(path / "saved").state_dict().items():
        assert relative(saved, trained[name]) < (1e-5 if lora else 1e-6)
        assert relative(resumed[name], trained[name]) < (1e-5 if lora else 1e-6)


@pytest.fixture
def group_of_one():
    """So that `shard` cuts models in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_is_sharded_again_after_an_error_while_it_was_whole(group_of_one):
    """Else every rank keeps the whole model, and the next step trains weights that the optimizer does not hold."""
    model, tokens = shard(tiny_model()), torch.arange(20)[None]
    with pytest.raises(ZeroDivisionError), unsharded(model) as whole:
        assert not any(hasattr(p, "to_local") for p in [*model.parameters(), *whole.parameters()])
        1 / 0
    assert all(hasattr(p, "to_local") for p in model.parameters())
    torch.testing.assert_close(model(tokens), tiny_model()(tokens))


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
    save(tiny_model(), tmp_path / "base")
    device = init_dist("bfloat16")
    try:
        model = load_for_training(tmp_path / "base", device, lora, "bfloat16")
        optimizer, prompt = optimizer_of(model), [1, 7, 30, 30, 200]
        for step in range(2):
            train_step(model, optimizer, step)
        with unsharded(model) as whole:
            assert whole.model.embed_tokens.weight.dtype == torch.bfloat16
            ids, logps = generate(whole, prompt, 30, temperature=0.7, seed=3)
        row = torch.tensor([prompt + ids]), torch.arange(35)[None] >= 5
        scored = token_logprobs(model, *row, temperature=0.7)[0].detach()
        assert 1e-6 < (scored - torch.tensor(logps)).abs().mean() < 2e-2
        save(model, tmp_path / "x")
        opened = load(tmp_path / "x", computing_dtype(device, "bfloat16"))
        torch.testing.assert_close(token_logprobs(opened, *row, temperature=0.7)[0], scored, atol=1e-6, rtol=0)
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32}
        assert {tensor.dtype for p in trained for tensor in optimizer.state[p].values()} == {torch.float32}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_all_models_share_one_group_of_ranks_which_waits_for_the_longest_episodes(two_ranks):
    """A mesh for each model once made two more groups, which gave up after 30 minutes (NCCL: 10)."""
    results = torch.load(two_ranks / "lora-0/results.pt", weights_only=True)
    assert results["new_groups"] == 0 and results["timeouts"] == [7200.0]


@pytest.mark.parametrize("changes, message", [
    ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, qwen2, qwen3"),
    ({"model_type": "qwen3_moe"}, "model_type"), ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"model_type": "llama", "sliding_window": 4096}, "sliding_window 4096"),
    ({"sliding_window": 4096, "use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types {'sliding_attention'}"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_type 'yarn'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type 'dynamic'"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type 'yarn'"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}}, "'yarn'"),
    ({"model_type": "llama", "attention_bias": True}, "attention_bias"), ({"mlp_bias": True}, "mlp_bias")])
def test_unsupported_configs_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=f"^cannot use a/config.json: .*{message}"):
        ModelConfig.from_dict(tiny_config(**changes), "a/config.json")


def test_a_sliding_window_that_is_not_in_use_is_accepted():
    """Qwen's configs have one. Mistral 0.1 has no switch: its window is in use, and once ran silently without."""
    for changes in ({"sliding_window": 4096, "use_sliding_window": False}, {"sliding_window": None}):
        assert ModelConfig.from_dict(tiny_config(**changes)).raw.items() >= changes.items()


def test_both_spellings_of_rope_settings_mean_the_same():
    for scaled in ({}, LLAMA3):
        old = ModelConfig.from_dict(tiny_config("llama", rope_theta=5e5, rope_scaling=scaled or None))
        new = tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5} | scaled)
        del new["rope_theta"]
        assert torch.equal(rope_frequencies(old), rope_frequencies(ModelConfig.from_dict(new)))
    assert rope_frequencies(old)[-1] == pytest.approx(5e5 ** -0.75 / 8)  # the slowest pair is slowed by the factor
    default = {"rope_type": "default", "rope_theta": 5e5}
    both = ModelConfig.from_dict(new | {"rope_parameters": default, "rope_scaling": LLAMA3})
    assert both.rope_scaling == LLAMA3  # as transformers reads a file that has both


def test_broken_checkpoints_say_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="cannot use the checkpoint .*/nowhere: .*neither"):
        load(tmp_path / "nowhere")
    save(tiny_model(), tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    raw = json.loads(config.read_text())
    for changes, message in [({"hidden_size": 64}, f"{weights}: .* shape"),
                             ({"num_hidden_layers": 3}, f"{tmp_path}: no model.layers.2.* 12 tensors"),
                             ({"num_hidden_layers": 1}, f"{weights}: KeyError: 'model.layers.1"),
                             ({"hidden_size": "big"}, f"{config}: TypeError")]:
        config.write_text(json.dumps(raw | changes))
        with pytest.raises(ValueError, match=f"^cannot use {message}"):
            load(tmp_path)
    config.write_text(json.dumps(raw))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"^cannot use {weights}: SafetensorError"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=f"^cannot use {weights}: FileNotFoundError"):
        load(tmp_path)


def test_a_rank_ends_its_process_with_all_that_it_said():
    """Two processes, forked from one that has imported torch already."""
    script = """if True:
        import os, run, test_run
        for i, status in enumerate((None, 'it failed')):
            if not (child := os.fork()):
                os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
                def main(cfg):
                    run.init_dist()
                    print('said', i, end=';')
                    return status
                run.command_line(main, test_run.Knobs, '')
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end=';', flush=True)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"})
    assert done.stdout == "said 0;0;said 1;1;" and done.stderr.endswith("it failed\n")


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
        torch.cuda.is_available, torch.cuda.set_device = lambda: True, print
        print(run.init_dist(), run.rank(), run.world_size(), dist.is_initialized())
        print(before, cudnn(), flush=True)
        os._exit(0)"""
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    bare = {name: value for name, value in os.environ.items() if name not in launched}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=bare)
    assert done.stdout.split("\n") == ["cuda:0", "cuda:0 0 1 True", "True False", ""], done.stderr


def test_the_command_line_completes_a_prompt(checkpoint, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        words = map(str, ("model.py", *arguments, "--max-new-tokens", 5))
        monkeypatch.setattr(sys, "argv", list(words))
        model_py.main()
        return capsys.readouterr().out

    out = json.loads(run(checkpoint, "red lamp", "--json"))
    assert len(out["ids"]) == len(out["logps"]) == 5 and out["prompt_ids"]
    assert run(checkpoint, "red lamp") == f"red lamp{out['text']}\n"
    shutil.copytree(checkpoint, tmp_path / "again")
    end = {"eos_token_id": [out["ids"][1]]}
    (tmp_path / "again/generation_config.json").write_text(json.dumps(end))
    ended = json.loads(run(tmp_path / "again", "red lamp", "--json"))
    assert ended["ids"] == out["ids"][:out["ids"].index(out["ids"][1]) + 1]
    command = [sys.executable, ROOT / "model.py", "/nowhere", "x"]
    bad = subprocess.run(command, capture_output=True, text=True)
    assert bad.returncode != 0 and "/nowhere" in bad.stderr and "Traceback" not in bad.stderr
