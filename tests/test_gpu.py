"""What only a GPU can show: its kernels, bfloat16 and CUDA graphs compute what the CPU computes.

Skipped by `make test`, which computes on the CPU; run `make test-gpu`. The models are tiny; the figures of real ones
are in assets/bench/.
"""
import asyncio
import random

import pytest
import torch
from conftest import tiny_model
from test_model import trunk_and_leaves
from test_scripts import ENV, script
from torch.testing import assert_close

from model import GraphedStep, KVCache, token_logprobs
from rollout import Engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = "cuda"


def big_head_model(**changes):
    """Heads of 64 numbers, as real models have: the kernels for bfloat16 take them."""
    return tiny_model(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        **changes,
    )


@torch.no_grad()
def test_float32_logits_equal_those_of_the_cpu():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 400, (3, 40), generator=generator)
    on_cpu = tiny_model()
    on_gpu = tiny_model().to(GPU)

    expected = on_cpu(tokens)
    got = on_gpu(tokens.to(GPU))

    assert_close(got.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_a_packed_row_equals_separate_rows(dtype, tolerance):
    """Log-probs and gradient, against each row on its own on the CPU."""
    generator = torch.Generator().manual_seed(6)
    leaves = [(5, 12, 3), (17, 2, 1), (30, 9, 4)]
    tokens, positions, action, segments, rows = trunk_and_leaves(generator, 30, leaves)
    weight = torch.randn(sum(action), generator=generator)

    def gradient(model, logp):
        (logp * weight.to(logp)).sum().backward()
        gradients = [p.grad.flatten() for p in model.parameters()]
        return torch.cat(gradients).float().cpu()

    # 1) Each row on its own, on the CPU.
    reference = big_head_model()
    logps = []
    for ids, n_action in rows:
        start = len(ids) - n_action
        marked = torch.arange(len(ids))[None] >= start
        logp, _, _ = token_logprobs(reference, torch.tensor([ids]), marked)
        logps.append(logp)
    alone = torch.cat(logps)
    expected = gradient(reference, alone)

    # 2) All in one row, on the GPU.
    model = big_head_model().to(GPU, dtype)
    inputs = {
        "tokens_BT": torch.tensor([tokens], device=GPU),
        "action_BT": torch.tensor([action], device=GPU),
        "positions_BT": torch.tensor([positions], device=GPU),
        "segments": segments,
    }
    logp, _, _ = token_logprobs(model, **inputs)
    together = logp.detach().cpu()
    assert_close(together, alone.detach(), atol=tolerance, rtol=tolerance)
    error = gradient(model, logp) - expected
    relative = error.norm() / expected.norm()
    assert relative < tolerance


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_graph_computes_what_single_kernels_compute(dtype, monkeypatch):
    monkeypatch.setattr(GraphedStep, "STRIDE", 16)
    model = big_head_model().to(GPU, dtype)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 400, (4, 41), generator=generator).to(GPU)
    lengths = torch.tensor([[0], [9], [14], [21]], device=GPU)
    begin = torch.arange(21, device=GPU).expand(4, 21)
    recorded = KVCache(model.config, 4, 41, dtype, GPU)
    direct = KVCache(model.config, 4, 41, dtype, GPU)
    for cache in (recorded, direct):
        model(tokens[:, :21], begin, cache)

    step = GraphedStep(model, recorded)
    for added in range(20):
        at = lengths + added
        last = int(at.max())
        token = tokens.gather(1, at)
        strides = last // 16 + 1
        end = min(strides * 16, 41)
        expected = model(token, at, direct, head=model.last_logits, end=end)
        assert torch.equal(step(token, at, last), expected), added
    assert list(step.graphs) == [32, 41]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("cuda_graph", [True, False])
def test_training_scores_what_the_engine_sampled(dtype, tolerance, cuda_graph):
    model = big_head_model().to(GPU, dtype)
    contexts = [[3 + slot] * (20 + slot) for slot in range(3)]

    async def respond():
        engine = Engine(
            model,
            1,
            n_slots=3,
            length=64,
            max_new_tokens=12,
            cuda_graph=cuda_graph,
        )
        server = asyncio.ensure_future(engine.serve())
        asked = []
        for slot, ids in enumerate(contexts):
            rng = random.Random(slot)
            asked.append(engine.respond(ids, slot, rng))
        answers = await asyncio.gather(*asked)
        server.cancel()
        return answers

    answers = asyncio.run(respond())
    for ids, answer in zip(contexts, answers, strict=True):
        response, logps, _ = answer
        row = torch.tensor([ids + response], device=GPU)
        positions = torch.arange(row.shape[1], device=GPU)
        marked = positions[None] >= len(ids)
        logp_N, _, _ = token_logprobs(model, row, marked)
        scored = logp_N.detach().cpu()
        gap = (scored - torch.tensor(logps)).abs()
        assert gap.mean() < tolerance


def test_three_updates_of_mgrpo_are_those_of_the_cpu(checkpoint, tmp_path):
    """Ragged groups, through FSDP2: on the GPU with bfloat16 products, on the CPU in float32."""
    metrics = {}
    visible_cards = {"cpu": "", "gpu": "0"}
    for name, cards in visible_cards.items():
        out = tmp_path / f"{name}.pt"
        env = ENV | {"CUDA_VISIBLE_DEVICES": cards}
        done = script("tests/two_ranks.py", checkpoint, out, env=env)
        assert done.returncode == 0, done.stderr
        results = torch.load(out, weights_only=True)
        metrics[name] = results["metrics"]

    for cpu, gpu in zip(metrics["cpu"], metrics["gpu"], strict=True):
        assert gpu["logp_gap"] == pytest.approx(cpu["logp_gap"], abs=0.05)
        assert gpu["loss"] == pytest.approx(cpu["loss"], abs=0.05)
        assert gpu["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=0.1)
        assert gpu["entropy"] == pytest.approx(cpu["entropy"], rel=0.02)
