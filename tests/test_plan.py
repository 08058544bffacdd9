"""tests/tools/plan.py: a step on fake tensors takes the memory that it takes on real ones."""
import argparse
import gc
import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT
from torch.profiler import ProfilerActivity, profile

from model import (KVCache, ModelConfig, Transformer, adapt, as_reference, clip_gradients, sample,
                   token_logprobs, unsharded)
from plan import CARDS, REST, SHAPES, peak, plan, print_plan, shape_config, shard_as_on_gpus

CONTEXT = 1024
EPISODES = 3


@pytest.fixture(scope="module")
def config():
    raw = {
        "model_type": "qwen2",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    return ModelConfig.from_dict(raw)


def start_of(event):
    return event.start_ns()


def allocated(work, before):
    """(the most bytes that the CPU allocator had given out during work(), those it still has)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()

    changes = []
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append(event)
    now = before
    most = before
    for change in sorted(changes, key=start_of):
        now += change.nbytes()
        most = max(most, now)
    return most, now


def no_logits(x_BTD):
    """A `head` that keeps no position."""
    return x_BTD[:, :0]


def measured_on_real_tensors(config, gpus, recompute, lora):
    """{phase: bytes} of the steps that `plan` describes. Only the other ranks are fake."""
    models = []

    def create():
        count = 2
        if lora:  # the policy is its own reference
            count = 1
        for _ in range(count):
            empty = shard_as_on_gpus(config, lora)
            models.append(empty.to_empty(device="cpu"))
        for model in models:
            for parameter in model.parameters():
                weight = parameter.data
                if hasattr(weight, "to_local"):
                    weight = weight.to_local()
                weight.normal_(std=0.02)

    def train():
        # 1) A long segment, then seven that share its beginning.
        turn = CONTEXT // 16
        starts = [0, *range(CONTEXT - 7 * turn, CONTEXT, turn)]
        stops = [*starts[1:], CONTEXT]
        segments = []
        for i, (start, stop) in enumerate(zip(starts, stops)):
            segments.append((start, stop, 0, i * turn))
        tokens = torch.zeros(1, CONTEXT, dtype=torch.long)
        action = torch.arange(CONTEXT)[None] % 2 == 1  # half of the positions; all starts are even

        # 2) Their passes. [0] frees the rest at once; a name would keep it in memory.
        logp = token_logprobs(policy, tokens, action, segments=segments)[0]
        with torch.no_grad(), as_reference(policy):
            logp_ref = token_logprobs(reference, tokens, action, segments=segments)[0]
        loss = (logp - logp_ref).exp().sum()
        loss.backward()

    def update():
        clip_gradients(policy, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def roll_out():
        with unsharded(policy) as model:
            # 1) Prefill.
            cache = KVCache(config, EPISODES, CONTEXT + 1, torch.bfloat16)
            row = torch.arange(CONTEXT)[None]
            model(row, row, cache, slice(0, 1), head=no_logits)

            # 2) Decode one token of every episode.
            tokens = torch.zeros(EPISODES, 1, dtype=torch.long)
            positions = torch.full_like(tokens, CONTEXT - 1)
            logits = model(tokens, positions, cache, end=CONTEXT)[:, -1]
            uniform = torch.rand(EPISODES, dtype=torch.float64)
            sample(logits, uniform)

    gc.collect()  # what an earlier test left must not be freed, and counted, during this one
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=gpus)
    try:
        _, held = allocated(create, 0)
        policy = models[0]
        reference = models[-1]
        policy.recompute = recompute
        if not lora:
            reference.requires_grad_(False)
        optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, foreach=True)
        works = [
            ("first", train),
            ("first", update),
            ("training", train),
            ("training", train),
            ("update", update),
            ("rollout", roll_out),
        ]
        most = {}
        for phase, work in works:
            peak, held = allocated(work, held)
            most[phase] = max(most.get(phase, 0), peak)
    finally:
        dist.destroy_process_group()
    return most


@pytest.mark.parametrize("gpus, recompute, lora", [(1, True, 0), (8, False, 0), (1, True, 8), (8, False, 8)])
def test_the_plan_equals_what_real_tensors_take(config, gpus, recompute, lora, monkeypatch):
    def layer_norm(x, shape, weight, eps):
        """CPUs have no fused RMSNorm; theirs would add float32 copies."""
        return F.layer_norm(x, shape, weight)

    planned = plan(config, gpus, CONTEXT, EPISODES, recompute, lora=lora)
    monkeypatch.setattr(F, "rms_norm", layer_norm)
    real = measured_on_real_tensors(config, gpus, recompute, lora)

    for phase, kinds in planned.items():
        total = sum(kinds.values())
        known = total - kinds[REST]
        assert kinds[REST] == pytest.approx(real[phase] - known, rel=0.1, abs=1e5), phase
        assert total == pytest.approx(real[phase], rel=0.05), phase


def size_of(config):
    """How many numbers a model's weights are."""
    return sum(p.numel() for p in Transformer(config).parameters())


def test_kinds_are_counted_to_the_byte_and_more_gpus_split_float32(config):
    weights = 4 * size_of(config)
    plans = {gpus: plan(config, gpus, 256, EPISODES) for gpus in (1, 4, 8)}
    cached = 2 * 3 * EPISODES * 2 * 257 * 32  # 2 L S K C E

    for gpus, phases in plans.items():
        part = weights / gpus
        for kinds in phases.values():
            assert kinds["policy, float32"] == part
            assert kinds["reference, float32"] == part
            assert kinds["Adam's moments, float32"] == 2 * part
        assert phases["training"]["gradients, float32"] == part
        assert phases["update"]["AdamW's copy, float32"] == pytest.approx(part, rel=0.01)
        assert phases["rollout"]["KV cache, bfloat16"] == 2 * cached

    # What print_plan says of other numbers of GPUs, it takes from one measurement.
    one = plans[1]
    eight = plans[8]
    assert peak(one, 8) == pytest.approx(peak(eight), rel=0.03)
    assert peak(eight, 1 / 8) == pytest.approx(peak(one), rel=0.03)


def test_lora_freezes_a_bfloat16_policy_and_needs_no_second_one(config):
    """One GPU computes with the weights that it holds. Several hold parts and gather them."""
    numbers = size_of(config)
    width = 256
    kv = 64
    wide = 768
    # in + out of q, of k and v, of o, then of gate, up and down
    per_layer = 2 * width + 2 * (width + kv) + 2 * width + 3 * (width + wide)
    adapters = 3 * 8 * per_layer  # 3 layers, rank 8
    plans = {gpus: plan(config, gpus, 256, EPISODES, lora=8) for gpus in (1, 8)}

    for gpus, phases in plans.items():
        for kinds in phases.values():
            assert kinds["frozen policy, bfloat16"] == pytest.approx(2 * numbers / gpus)
            assert kinds["adapters, float32"] == pytest.approx(4 * adapters / gpus)
            assert kinds["Adam's moments, float32"] == 2 * kinds["adapters, float32"]
            for kind in kinds:
                assert "reference" not in kind

    one = plans[1]
    eight = plans[8]
    assert "gathered weights, bfloat16" not in one["rollout"]
    assert eight["rollout"]["gathered weights, bfloat16"] > 2 * numbers


@pytest.mark.parametrize("name, policy", [  # GiB: 4 bytes a number, over 8 GPUs
    ("DIR", "0.1"),
    pytest.param("Qwen2.5-0.5B", "0.2", marks=pytest.mark.slow),
])
def test_the_command_line_needs_neither_weights_nor_gpu(config, name, policy, tmp_path):
    larger = config.raw | {"vocab_size": 600_000, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(larger))
    model = name
    if name == "DIR":
        model = tmp_path

    script = [sys.executable, ROOT / "tests/tools/plan.py", model]
    flags = ["--gpus", "8", "--context", "1024", "--episodes", "2"]
    out = subprocess.run([*script, *flags], capture_output=True, text=True, check=True).stdout

    lines = {}
    for line in out.splitlines():
        kind = line[:34].strip()
        lines[kind] = line[34:].split()
    assert lines["GiB per GPU"] == ["rollout", "training", "update"]
    assert lines["policy, float32"] == [policy] * 3
    for card in (24, 48, 80, 141):
        assert f"{card} GB cards" in out
    assert "fits" in out
    assert "would do: 1" in out


@pytest.mark.slow
@pytest.mark.parametrize("name, card", [("Qwen2.5-3B", 24), ("Llama-3.1-8B", 48)])
def test_lora_trains_on_one_card(name, card):
    phases = plan(shape_config(name), 1, 16384, 8, lora=16)
    assert peak(phases) < CARDS[card]


def test_unknown_models_and_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="Llama-9: .*Qwen3-8B"):
        shape_config("Llama-9")

    args = argparse.Namespace(
        model="Qwen2.5-0.5B",
        gpus=0,
        context=1024,
        episodes=2,
    )
    with pytest.raises(ValueError, match="--gpus and --episodes at least 1"):
        print_plan(args)


PUBLISHED = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
}


def test_the_models_of_the_plan_have_their_published_sizes():
    assert SHAPES.keys() == PUBLISHED.keys()
    for name, size in PUBLISHED.items():
        with torch.device("meta"):
            assert size_of(shape_config(name)) == size, name


@pytest.mark.parametrize("lora", [0, 4])
def test_later_steps_need_no_more_memory_than_the_second(config, lora):
    """The first step makes Adam's moments."""
    policy = adapt(Transformer(config), lora)
    for weight in policy.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    optimizer = torch.optim.AdamW(policy.parameters())
    action = torch.arange(128)[None] >= 100

    def step():
        tokens = torch.randint(0, 4096, (1, 128))
        with torch.no_grad(), as_reference(policy):
            logp_ref = token_logprobs(policy, tokens, action)[0]
        logp = token_logprobs(policy, tokens, action)[0]
        loss = (logp - logp_ref).exp().sum()
        loss.backward()
        clip_gradients(policy, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    held = 0
    peaks = []
    for _ in range(5):
        most, held = allocated(step, held)
        peaks.append(most)
    assert peaks[2:] == [peaks[1]] * 3
