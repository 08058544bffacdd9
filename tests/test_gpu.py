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

from model import GraphedStep, KVCache, token_logprobs
from rollout import Engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = "cuda"


def big_head_model(**changes):
    """Heads of 64 numbers, as real models have: the kernels for bfloat16 take them."""
    return tiny_model(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, **changes)


@torch.no_grad()
def test_float32_logits_equal_those_of_the_cpu():
    tokens = torch.randint(0, 400, (3, 40), generator=torch.Generator().manual_seed(2))
    expected = tiny_model()(tokens)
    torch.testing.assert_close(tiny_model().to(GPU)(tokens.to(GPU)).cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_a_packed_row_equals_separate_rows(dtype, tolerance):
    """Log-probs and gradient, against each row on its own on the CPU."""
    generator = torch.Generator().manual_seed(6)
    leaves = [(5, 12, 3), (17, 2, 1), (30, 9, 4)]
    tokens, positions, action, segments, rows = trunk_and_leaves(generator, 30, leaves)
    weight = torch.randn(sum(action), generator=generator)

    def gradient(model, logp):
        (logp * weight.to(logp)).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).float().cpu()

    reference = big_head_model()
    alone = []
    for ids, n in rows:
        marked = torch.arange(len(ids))[None] >= len(ids) - n
        alone.append(token_logprobs(reference, torch.tensor([ids]), marked)[0])
    alone = torch.cat(alone)
    expected = gradient(reference, alone)

    model = big_head_model().to(GPU, dtype)
    logp = token_logprobs(model, torch.tensor([tokens], device=GPU), torch.tensor([action], device=GPU),
                          positions_BT=torch.tensor([positions], device=GPU), segments=segments)[0]
    torch.testing.assert_close(logp.detach().cpu(), alone.detach(), atol=tolerance, rtol=tolerance)
    error = (gradient(model, logp) - expected).norm() / expected.norm()
    assert error < tolerance


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_graph_computes_what_single_kernels_compute(dtype, monkeypatch):
    monkeypatch.setattr(GraphedStep, "STRIDE", 16)
    model = big_head_model().to(GPU, dtype)
    tokens = torch.randint(0, 400, (4, 41), generator=torch.Generator().manual_seed(2)).to(GPU)
    lengths = torch.tensor([[0], [9], [14], [21]], device=GPU)
    begin = torch.arange(21, device=GPU).expand(4, 21)
    recorded, direct = (KVCache(model.config, 4, 41, dtype, GPU) for _ in range(2))
    for cache in (recorded, direct):
        model(tokens[:, :21], begin, cache)
    step = GraphedStep(model, recorded)
    for added in range(20):
        at = lengths + added
        token, last = tokens.gather(1, at), int(at.max())
        end = min((last // 16 + 1) * 16, 41)
        expected = model(token, at, direct, head=model.last_logits, end=end)
        assert torch.equal(step(token, at, last), expected), added
    assert list(step.graphs) == [32, 41]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("cuda_graph", [True, False])
def test_training_scores_what_the_engine_sampled(dtype, tolerance, cuda_graph):
    model = big_head_model().to(GPU, dtype)
    contexts = [[3 + slot] * (20 + slot) for slot in range(3)]

    async def respond():
        engine = Engine(model, 1, slots=3, length=64, max_new_tokens=12, cuda_graph=cuda_graph)
        server = asyncio.ensure_future(engine.serve())
        asked = (engine.respond(ids, slot, random.Random(slot)) for slot, ids in enumerate(contexts))
        answers = await asyncio.gather(*asked)
        server.cancel()
        return answers

    for ids, (response, logps, _) in zip(contexts, asyncio.run(respond()), strict=True):
        row = torch.tensor([ids + response], device=GPU)
        marked = torch.arange(row.shape[1], device=GPU)[None] >= len(ids)
        scored = token_logprobs(model, row, marked)[0].detach().cpu()
        assert (scored - torch.tensor(logps)).abs().mean() < tolerance


def test_three_updates_of_mgrpo_are_those_of_the_cpu(checkpoint, tmp_path):
    """Ragged groups, through FSDP2: on the GPU with bfloat16 products, on the CPU in float32."""
    metrics = {}
    for name, cards in (("cpu", ""), ("gpu", "0")):
        out = tmp_path / f"{name}.pt"
        done = script("tests/two_ranks.py", checkpoint, out, env=ENV | {"CUDA_VISIBLE_DEVICES": cards})
        assert done.returncode == 0, done.stderr
        metrics[name] = torch.load(out, weights_only=True)["metrics"]
    for cpu, gpu in zip(metrics["cpu"], metrics["gpu"], strict=True):
        assert gpu["logp_gap"] == pytest.approx(cpu["logp_gap"], abs=0.05)
        assert gpu["loss"] == pytest.approx(cpu["loss"], abs=0.05)
        assert gpu["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=0.1)
        assert gpu["entropy"] == pytest.approx(cpu["entropy"], rel=0.02)
