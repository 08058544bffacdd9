"""The forward pass against itself: every way of computing a log-prob gives the same number."""
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, ComputedStep, tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from two_ranks import optimizer_of, train_step

from model import (SHAPES, KVCache, ModelConfig, Transformer, attend, generate, load, load_tokenizer, load_training, new, plan,
                   recomputed, rope_frequencies, sample, save, save_training, shape_config, token_logprobs)

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
FAMILIES = [("llama", {}), ("llama", {"tie_word_embeddings": False, "rope_scaling": LLAMA3}), ("qwen2", {}),
            ("qwen3", {"head_dim": 16})]
families = pytest.mark.parametrize("family, changes", FAMILIES)


def naive_forward(model, tokens):
    """The obvious decoder: one row, loops over heads, no batching, no cache, float64."""
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
        q, k, v = (h @ w(f"self_attn.{p}_proj.weight").T + (w(f"self_attn.{p}_proj.bias") if c.qkv_bias else 0)
                   for p in "qkv")
        heads = []
        for head in range(c.num_attention_heads):
            kv = head // (c.num_attention_heads // c.num_key_value_heads)
            qs, ks = q[:, head * E:(head + 1) * E], k[:, kv * E:(kv + 1) * E]
            if c.qk_norm:
                qs, ks = norm(qs, w("self_attn.q_norm.weight")), norm(ks, w("self_attn.k_norm.weight"))
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
    torch.testing.assert_close(model(tokens)[0].double(), naive_forward(model, tokens[0]), atol=2e-4, rtol=1e-4)


GOLDEN = json.loads((ROOT / "tests/golden/golden.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["families"], ids=lambda case: case["name"])
def test_logits_equal_those_of_transformers(case):
    """tests/golden/make.py has compared whole logits, and has written the first 24 of every 33rd position down."""
    tokens = torch.randint(0, 400, (2, 100), generator=torch.Generator().manual_seed(12))
    positions = torch.stack((torch.arange(100), torch.arange(20_000, 20_100)))
    logits = tiny_model(case["family"], seed=11, **case["changes"])(tokens, positions)[:, ::33, :24]
    torch.testing.assert_close(logits, torch.tensor(case["logits"]), atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "runs/smollm2").exists(), reason="needs SmolLM2-135M-Instruct (538 MB, not committed) in runs/smollm2")
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
    model(torch.randint(0, 400, (3, 20)), at(15, 35), cache, rows)  # a turn that is rolled back to position 15
    torch.testing.assert_close(model(tokens[:, 15:], at(15, 40), cache, rows), whole[:, 15:], atol=1e-5, rtol=1e-5)
    ragged = torch.tensor([[5], [20], [39]])  # one decode step, every row at a length of its own
    step = model(tokens.gather(1, ragged), ragged, cache, rows)
    torch.testing.assert_close(step[:, 0], whole[torch.arange(3), ragged[:, 0]], atol=1e-5, rtol=1e-5)
    ragged = torch.tensor([[3, 4, 5], [18, 19, 20], [37, 38, 39]])  # several tokens, the same
    step = model(tokens.gather(1, ragged), ragged, cache, rows)
    torch.testing.assert_close(step, whole[torch.arange(3)[:, None], ragged], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_recorded_step_equals_the_uncached_forward_at_every_length():
    """But for the recording, which takes a GPU: fixed slots, buffers, and as much of the cache as the longest row needs."""
    model, cache = tiny_model(), KVCache(tiny_model().config, 4, 41)
    tokens = torch.randint(0, 400, (4, 41), generator=torch.Generator().manual_seed(2))
    lengths, step = torch.tensor([[0], [9], [14], [21]]), ComputedStep(model, cache)
    model(tokens[:, :21], torch.arange(21).expand(4, 21), cache)  # the shorter ones have rolled back
    for added in range(20):
        at = lengths + added
        logits = step(tokens.gather(1, at), at, int(at.max()))
        torch.testing.assert_close(logits, model(tokens)[torch.arange(4), at[:, 0]], atol=1e-5, rtol=1e-5)
    assert list(step.recordings) == [32, 41]
    with pytest.raises(AssertionError, match="42 positions do not fit"):
        step(tokens[:, :1], lengths, 41)


def test_what_starts_from_nothing_is_the_identity_between_embedding_and_head():
    model = Transformer(ModelConfig.from_dict(tiny_config("llama"))).init_weights()
    tokens = torch.randint(0, 400, (2, 9))
    torch.testing.assert_close(model(tokens), model.logits(model.model.norm(model.model.embed_tokens(tokens))))
    query, key = model.model.layers[1].self_attn.q_proj.weight, model.model.layers[1].self_attn.k_proj.weight
    assert torch.equal(query[:len(key)], key)
    torch.testing.assert_close(query @ query.T, torch.eye(len(query)))


@torch.no_grad()
def test_with_biases_it_starts_by_looking_up_what_once_followed_two_tokens():
    """From plain random weights the answer is right once in 1,890 times, and gradient descent finds this very late."""
    model, generator, right = new(ROOT / "worlds/base"), torch.Generator().manual_seed(0), 0
    for _ in range(60):
        row = torch.randperm(model.config.vocab_size, generator=generator)[:40]
        i = int(torch.randint(0, 36, (1,), generator=generator))
        right += int(model(torch.cat([row, row[i:i + 2]])[None])[0, -1].argmax()) == int(row[i + 2])
    assert right > 30


def test_a_kernel_may_leave_its_result_transposed_in_memory(monkeypatch):
    """As CUDA's memory-efficient one does, which takes the masks of ragged rows."""
    q, k, v = torch.randn(3, 8, 1, 16), torch.randn(3, 2, 30, 16), torch.randn(3, 2, 30, 16)
    mask = torch.arange(30) <= torch.tensor([4, 11, 29])[:, None, None, None]
    expected, kernel = attend(q, k, v, mask), F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a: kernel(*a).transpose(1, 2).contiguous().transpose(1, 2))
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
    scored, entropy = token_logprobs(model, tokens, action, temperature, chunk=4)
    # The generator reports log-probs under the distribution it drew from, temperature included.
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
        logp, _ = token_logprobs(model, tokens, action, chunk=chunk)
        (logp * torch.arange(14)).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    reference = model(tokens).log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0][action[:, 1:]]
    torch.testing.assert_close(logp, reference, atol=1e-5, rtol=1e-5)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], atol=1e-5, rtol=1e-4)


def trunk_and_leaves(generator, trunk, leaves, flat=0):
    """A random trajectory packed at flat index `flat`: (tokens, positions, action, segments, its separate rows).

    leaves: for each, how many trunk tokens it continues, its length, and how many of its last tokens are actions.
    """
    draw = lambda n: torch.randint(0, 400, (n,), generator=generator).tolist()
    tokens = shared = draw(trunk)
    positions, action, segments, rows = list(range(trunk)), [False] * trunk, [(flat, flat + trunk, flat, flat)], []
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
    """Log-probs and gradients of three ragged trajectories in one flat row, against one plain row a turn."""
    model, generator = tiny_model(family, **changes, num_key_value_heads=kv_heads), torch.Generator().manual_seed(6)
    shapes = [(30, [(5, 12, 3), (17, 2, 1), (30, 9, 4)]), (3, [(3, 20, 6)]), (11, [(0, 7, 2), (1, 5, 4), (11, 6, 5)])]
    tokens, positions, action, segments, rows = [], [], [], [], []
    for trunk, leaves in shapes:
        for whole, part in zip((tokens, positions, action, segments, rows),
                               trunk_and_leaves(generator, trunk, leaves, len(tokens)), strict=True):
            whole += part
    weight = torch.randn(sum(action), generator=generator)

    def gradients(logp):
        model.zero_grad()
        (logp * weight).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    last = lambda ids, n: torch.arange(len(ids))[None] >= len(ids) - n
    plain = [token_logprobs(model, torch.tensor([ids]), last(ids, n)) for ids, n in rows]
    plain, entropy = (torch.cat(column) for column in zip(*plain))
    expected = gradients(plain)
    for recompute in (False, True):
        model.recompute = recompute
        packed = token_logprobs(model, torch.tensor([tokens]), torch.tensor([action]), chunk=7,
                                positions_BT=torch.tensor([positions]), segments=segments)
        torch.testing.assert_close(packed[0], plain, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed[1], entropy, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradients(packed[0]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("T, C", [(1, 1), (1, 9), (5, 5), (5, 9), (520, 520), (520, 700), (520, 1300)])
def test_attention_behind_a_context_equals_the_written_out_softmax(T, C):
    g = torch.Generator().manual_seed(0)
    shapes = ((4, T), (2, C), (2, C), (4, T))
    q, k, v, weight = (torch.randn(1, *shape, 8, generator=g).requires_grad_() for shape in shapes)
    scores = q @ k.repeat_interleave(2, dim=1).transpose(2, 3) / 8 ** 0.5
    scores[..., torch.ones(T, C, dtype=torch.bool).triu(C - T + 1)] = -torch.inf
    wanted = scores.softmax(-1) @ v.repeat_interleave(2, dim=1)
    got = attend(q, k, v)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(*(torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (got, wanted))):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("segments, word", [
    ([(0, 4, 0, 0), (5, 9, 0, 4)], "tile"), ([(0, 4, 0, 0), (4, 9, 1, 3)], "beginning of an earlier"),
    ([(0, 4, 0, 0), (4, 9, 0, 5)], "beginning of an earlier"), ([(0, 4, 0, 0), (4, 9, 4, 6)], "beginning of an earlier"),
    ([(0, 4, 0, 0), (4, 6, 0, 4), (6, 9, 4, 6)], "beginning of an earlier")])
def test_segments_with_holes_or_with_a_context_that_none_begins_with_are_refused(segments, word):
    with pytest.raises(AssertionError, match=word):
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
    assert set(sample(logits, uniform, 1.0, top_p=0.7)[0].tolist()) == {0, 3}  # 0.66 alone does not reach 0.7


def test_a_row_is_sampled_the_same_whoever_shares_its_batch():
    logits, uniform = torch.randn(8, 50), torch.rand(8)
    together = sample(logits, uniform)[0]
    assert together.tolist() == [int(sample(logits[i:i + 1], uniform[i:i + 1])[0]) for i in range(8)]


def test_extreme_uniform_numbers_stay_inside_the_vocabulary():
    logits = torch.full((2, 5), -1e4)
    logits[:, 2] = 0
    extremes = torch.tensor([0.0, 1 - 1e-9], dtype=torch.float64)
    for top_p in (1.0, 0.0):
        assert [x.tolist() for x in sample(logits, extremes, top_p=top_p)] == [[2, 2], [0.0, 0.0]]


def test_a_random_number_just_below_1_is_not_rounded_to_the_last_token(monkeypatch):
    """Which float32 does."""
    model = tiny_model()
    model.logits = lambda x: torch.full((len(x), 400), -1e4).index_fill(1, torch.tensor([7]), 0.0)
    monkeypatch.setattr(random.Random, "random", lambda self: 1 - 2**-53)
    assert generate(model, [1, 2], 3, temperature=1.0)[0] == [7, 7, 7]


@pytest.mark.parametrize("recompute", [False, True])
def test_training_keeps_no_tensor_as_wide_as_the_vocabulary(recompute):
    """Full (T, V) float32 logits never exist: those of a chunk are made again in the backward pass."""
    model, widths = tiny_model(vocab_size=4000), []
    model.recompute = recompute
    tokens = torch.randint(0, 4000, (1, 200))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: widths.append(t.shape[-1:]) or t, lambda t: t):
        logp_N, _ = token_logprobs(model, tokens, torch.arange(200)[None] >= 50, chunk=64)
    assert widths and (4000,) not in widths
    logp_N.sum().backward()


@families
def test_saved_and_loaded_weights_are_bit_equal(family, changes, tmp_path):
    model = tiny_model(family, **changes)
    save(model, tmp_path / "a", run={"seed": 1})
    save(model, tmp_path / "a")  # into a directory that is there already
    again = load(tmp_path / "a")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    tokens = torch.randint(0, 400, (1, 9))
    assert torch.equal(model(tokens), again(tokens))
    assert not list(tmp_path.glob("*.tmp"))


def test_a_checkpoint_holds_no_file_of_the_one_that_it_replaces(checkpoint, tmp_path):
    """An agent.json that stays would give the new policy a prompt that it was not trained with."""
    shutil.copytree(checkpoint, tmp_path / "other")
    (tmp_path / "other/agent.json").write_text('{"think": false}')
    shutil.copytree(checkpoint, tmp_path / "plain", ignore=shutil.ignore_patterns("agent.json"))
    for like in ("other", "plain"):
        save(tiny_model(), tmp_path / "a", like=tmp_path / like)
        (tmp_path / "a/metrics.jsonl").touch()
    assert not (tmp_path / "a/agent.json").exists() and (tmp_path / "a/metrics.jsonl").exists()


def test_rotation_speeds_in_old_checkpoints_are_passed_over(tmp_path):
    model = tiny_model("llama")
    save(model, tmp_path / "a")
    state = load_file(tmp_path / "a/model.safetensors") | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(state, tmp_path / "a/model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(load(tmp_path / "a").state_dict().values(), model.state_dict().values()))


def test_weights_over_the_size_limit_are_spread_over_files(tmp_path):
    """Also into a directory whose last save took another number of files: none of those may be left to be read."""
    a, b = tiny_model(seed=1), tiny_model(seed=2)
    for model, limit in [(a, 20_000), (b, 5e9), (a, 10_000), (b, 30_000)]:
        save(model, tmp_path / "a", max_bytes=limit)
        files = list((tmp_path / "a").glob("*.safetensors"))
        assert (len(files) == 1) == (limit == 5e9) == (not (tmp_path / "a/model.safetensors.index.json").exists())
        assert all(f.stat().st_size < limit + 5000 or len(files) > 1 and f.stat().st_size > 51_200 for f in files)
        again = load(tmp_path / "a")
        assert all(torch.equal(x, again.state_dict()[key]) for key, x in model.state_dict().items())


def test_resumed_training_equals_never_having_stopped(tmp_path):
    model = tiny_model()
    optimizer = optimizer_of(model)
    save_training(tmp_path / "t", model, optimizer, {"step": 0})
    assert not optimizer.state  # saving makes no step
    for step in range(4):
        if step == 2:
            save_training(tmp_path / "t", model, optimizer, {"step": 2, "order": [3, 1]})
        train_step(model, optimizer, step)
    again = tiny_model(seed=9)
    other = optimizer_of(again)
    extra = load_training(tmp_path / "t", again, other)
    assert extra == {"step": 2, "order": [3, 1]}
    for step in range(2, 4):
        train_step(again, other, step)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    assert [f.name for f in tmp_path.iterdir()] == ["t"]
    (tmp_path / "t").rename(tmp_path / "t.old")  # killed between the two renames
    assert load_training(tmp_path / "t", again, other)["step"] == 2
    with pytest.raises(ValueError, match="nowhere.old/state.json does not exist"):
        load_training(tmp_path / "nowhere", again, other)


class Killed(BaseException):
    """Stands for SIGKILL."""


moments = {"left": None}  # file operations until Killed; an audit hook cannot be taken off again


def count_down(event, arguments):
    if moments["left"] is not None and event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
        moments["left"] -= 1
        if moments["left"] < 0:
            raise Killed


sys.addaudithook(count_down)


@pytest.mark.parametrize("what", ["training state", "checkpoint", "checkpoint of several files"])
def test_a_save_killed_at_any_moment_leaves_the_last_one_or_the_new_one(tmp_path, what):
    """Every file operation of a save is once the last. Then it loads, and the next save, on top of the ruins, works."""
    models = [tiny_model(seed=seed) for seed in range(3)]
    optimizers = [optimizer_of(model) for model in models]
    other = tiny_model(seed=9)

    def write(i, directory):
        if what != "training state":
            return save(models[i], directory / "x", max_bytes=5e9 if what == "checkpoint" else 20_000)
        save_training(directory / "x", models[i], optimizers[i], {"step": i})

    def found(directory):
        if what != "training state":
            state = load(directory / "x").state_dict()
        else:
            step = load_training(directory / "x", other, optimizer_of(other))["step"]
            state = other.state_dict()
        i, = [i for i, model in enumerate(models) if all(torch.equal(state[k], v) for k, v in model.state_dict().items())]
        assert what != "training state" or step == i
        return i

    seen = []
    for number in range(100):
        directory = tmp_path / str(number)
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
    assert len(seen) > 8 and seen == sorted(seen) and set(seen) == {0, 1}


@contextmanager
def full_disk(size):
    """No file can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_what_was_saved_before_and_is_told(tmp_path):
    model, other = tiny_model(), tiny_model(seed=1)
    optimizer = optimizer_of(model)
    save_training(tmp_path / "t", model, optimizer, {"step": 1})
    save(model, tmp_path / "c")
    for size in (0, 1000, 50_000):
        with full_disk(size), pytest.raises(ValueError, match="^cannot write .*/t .*unharmed"):
            save_training(tmp_path / "t", other, optimizer, {"step": 2})
        with full_disk(size), pytest.raises(ValueError, match="^cannot write .*/c .*unharmed"):
            save(other, tmp_path / "c")
    assert load_training(tmp_path / "t", other, optimizer) == {"step": 1}
    for state in (other.state_dict(), load(tmp_path / "c").state_dict()):
        assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("replicas", [1, 2])
def test_two_ranks_equal_one(tmp_path, replicas):
    """Loss, gradients and weights over three steps; what two ranks saved half-way is resumed on one."""
    model = tiny_model("llama", tie_word_embeddings=False)
    save(model, tmp_path / "start")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
                           ROOT / "tests/two_ranks.py", "model", tmp_path / "start", tmp_path, str(replicas)],
                          capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr
    two = torch.load(tmp_path / "results.pt", weights_only=True)
    optimizer = optimizer_of(model)
    for step in range(3):
        loss, gradients = train_step(model, optimizer, step)
        assert two["losses"][step] == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            assert relative(two["gradients"][step][name], gradient) < 1e-6, name
    resumed = tiny_model("llama", seed=3, tie_word_embeddings=False)
    other = optimizer_of(resumed)
    assert load_training(tmp_path / "training", resumed, other) == {"step": 2}
    train_step(resumed, other, 2)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    for name, saved in load(tmp_path / "saved").state_dict().items():
        assert relative(saved, model.state_dict()[name]) < 1e-6
        assert relative(resumed.state_dict()[name], model.state_dict()[name]) < 1e-6


@pytest.mark.parametrize("changes, word", [
    ({"model_type": "mamba"}, "model_type"), ({"model_type": "qwen3_moe"}, "model_type"),
    ({"hidden_size": "big"}, "hidden_size"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"), ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"), ({"hidden_act": "gelu"}, "hidden_act"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling asks for 'yarn'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling asks for 'dynamic'"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters asks for 'yarn'"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}}, "rope_scaling asks for 'yarn'"),
    ({"layer_types": ["chunked_attention"]}, "layer_types"), ({"layer_types": 3}, "layer_types"), ({"layer_types": [[]]}, "layer_types"),
    ({"model_type": "llama", "attention_bias": True}, "attention_bias"), ({"mlp_bias": True}, "mlp_bias")])
def test_unsupported_configs_are_refused_by_name(changes, word):
    with pytest.raises(ValueError, match=word):
        ModelConfig.from_dict(tiny_config(**changes))


def test_both_spellings_of_rope_settings_mean_the_same():
    for scaled in ({}, LLAMA3):
        old = ModelConfig.from_dict(tiny_config("llama", rope_theta=5e5, rope_scaling=scaled or None))
        new = tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5} | scaled)
        del new["rope_theta"]
        assert torch.equal(rope_frequencies(old), rope_frequencies(ModelConfig.from_dict(new)))
    assert rope_frequencies(old)[-1] == pytest.approx(5e5 ** -0.75 / 8)  # the slowest pair is slowed by the factor
    both = ModelConfig.from_dict(new | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": LLAMA3})
    assert both.rope_scaling == LLAMA3  # as transformers reads a file that has the two


PUBLISHED = {"Llama-3.1-8B": 8_030_261_248, "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B": 3_212_749_824,
             "Qwen2.5-0.5B": 494_032_768, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688,
             "Qwen2.5-7B": 7_615_616_512, "Qwen3-0.6B": 596_049_920, "Qwen3-1.7B": 1_720_574_976,
             "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360}


def test_the_plan_knows_the_published_sizes():
    for name in SHAPES:
        assert plan(shape_config(name), 1, 1024, 1)["rollout"]["unsharded copy, bfloat16"] == 2 * PUBLISHED[name], name


def test_the_plan_counts_what_is_allocated(monkeypatch):
    """The cache as it is made; activations as autograd keeps them in bfloat16."""
    shape = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=768)
    kept = []
    for layers in (1, 2):
        model = tiny_model("llama", num_hidden_layers=layers, **shape).bfloat16()
        weights, seen = {p.data_ptr() for p in model.parameters()}, {}
        keep = lambda x: seen.setdefault(x.untyped_storage().data_ptr(), x) if x.data_ptr() not in weights else None
        recompute = lambda function, *inputs: ([keep(x) for x in inputs], recomputed(function, *inputs))[1]
        monkeypatch.setattr("model.recomputed", recompute)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (keep(x), x)[1], lambda x: x):
            hidden = model(torch.zeros(1, 256, dtype=torch.long), head=lambda x_BTD: x_BTD)
        kept.append(sum(x.untyped_storage().nbytes() for x in seen.values()))
        parts = plan(model.config, 1, 256, 3, recompute=False)
        cache = KVCache(model.config, 3, 256, torch.bfloat16)
        assert parts["rollout"]["KV cache of 3 episodes"] == cache.k.nbytes + cache.v.nbytes
    assert kept[1] - kept[0] == pytest.approx(parts["training"]["activations"] / 2, rel=0.02)


def test_the_plan_needs_no_weights():
    command = [sys.executable, ROOT / "model.py", "--plan"]
    run = lambda *more: subprocess.run([*command, *more], capture_output=True, text=True)
    out = run("Llama-3.1-8B", "--gpus", "8", "--context", "16384").stdout
    assert all(f"{card} GB cards: " in out for card in (24, 48, 80, 141)) and "fits" in out and "lacks" in out
    assert "Qwen3-8B" in run("Llama-9").stderr


def test_broken_checkpoints_say_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint at"):
        load(tmp_path / "nowhere")
    save(tiny_model(), tmp_path / "a")
    config = json.loads((tmp_path / "a/config.json").read_text())
    (tmp_path / "a/config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(ValueError, match="config.json asks for shape"):
        load(tmp_path / "a")
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    weights = tmp_path / "a/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged"):
        load(tmp_path / "a")
    weights.unlink()
    with pytest.raises(ValueError, match="incomplete"):
        load(tmp_path / "a")


def test_a_matrix_stored_twice_is_read_once_if_it_is_the_same(tmp_path):
    model = tiny_model()
    save(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).model.embed_tokens.weight, model.model.embed_tokens.weight)
    save_file(state | {"lm_head.weight": state["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight differs .* set tie_word_embeddings to false"):
        load(tmp_path)
    save_file(state | {"lm_head.weight": torch.zeros(400, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        load(tmp_path)


def test_an_old_index_beside_one_new_file_is_passed_over(tmp_path):
    """transformers leaves it there when it saves anew, and opens the one file."""
    save(tiny_model(seed=1), tmp_path, max_bytes=30_000)
    for part in tmp_path.glob("*.safetensors"):
        part.unlink()
    save_file(tiny_model(seed=2).state_dict(), tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).model.norm.weight, tiny_model(seed=2).model.norm.weight)


@pytest.mark.parametrize("status, code, told", [("None", 0, ""), ("143", 143, ""), ("'it failed'", 1, "it failed\n")])
def test_a_rank_ends_its_process_with_all_that_it_said(status, code, told):
    script = f"import model; model.init_dist(); print('said', end=''); model.leave({status})"
    one_of_one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=os.environ | one_of_one)
    assert (done.returncode, done.stdout) == (code, "said") and done.stderr.endswith(told), done.stderr


def test_one_gpu_without_torchrun_is_a_group_of_one():
    """So that `shard` computes in bfloat16 there, too. Played on a CPU: gloo stands in for the GPU's backend."""
    script = ("import torch, torch.distributed as dist, model; begin = dist.init_process_group; "
              "dist.init_process_group = lambda backend, **more: begin('gloo', **more); "
              "torch.cuda.is_available, torch.cuda.set_device = lambda: True, print; "
              "print(model.init_dist(), model.rank(), model.world_size(), dist.is_initialized()); model.leave()")
    bare = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=bare)
    assert done.stdout.split("\n") == ["cuda:0", "cuda:0 0 1 True", ""], done.stderr


def test_the_command_line_completes_a_prompt(checkpoint, tmp_path):
    command = [sys.executable, ROOT / "model.py", checkpoint, "red lamp", "--max-new-tokens", "5"]
    run = lambda *more: subprocess.run([*command, *more], capture_output=True, text=True)
    out = json.loads(run("--json").stdout)
    assert len(out["ids"]) == len(out["logps"]) == 5 and out["prompt_ids"] and isinstance(out["text"], str)
    assert run().stdout.startswith("red lamp")
    shutil.copytree(checkpoint, tmp_path / "again")
    (tmp_path / "again/generation_config.json").write_text(json.dumps({"eos_token_id": [out["ids"][1]]}))
    command[2] = tmp_path / "again"
    assert json.loads(run("--json").stdout)["ids"] == out["ids"][:out["ids"].index(out["ids"][1]) + 1]  # ends there
    assert "--max-new-tokens -9" in run("--max-new-tokens", "-9").stderr and "--temperature -1" in run("--temperature", "-1").stderr
    bad = subprocess.run([sys.executable, ROOT / "model.py", "/nowhere", "x"], capture_output=True, text=True)
    assert bad.returncode != 0 and "/nowhere" in bad.stderr and "Traceback" not in bad.stderr
