"""For torchrun: three optimizer steps on several ranks, results to a file. One rank runs the same code.

    two_ranks.py CHECKPOINT OUT            mgrpo.py's update on ragged groups of unequal number
    two_ranks.py model CHECKPOINT OUT      model.py: a model loaded in parts, trained, saved half-way
    two_ranks.py resume CHECKPOINT OUT     ... and its last step, on another number of ranks
    two_ranks.py bfloat16 CHECKPOINT OUT   a GPU's precision on CPUs: log-probs of rollout and training
"""
import asyncio
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.distributed as dist
from conftest import tiny_model

from model import (as_reference, config_json, full_state, load, load_tokenizer, save, shard, token_logprobs,
                   unsharded)
from run import all_sum, init_dist, load_training, rank, save_training, world_size


def groups(chat, step):
    """Five groups of unequal length; the first rank gets three of them, one without variance."""
    from test_mgrpo import trajectory
    return [[trajectory(chat, float((i + k) % 2 and k != 2), [2 + (i * k + step) % 7] * (1 + i + k),
                        seed=100 * step + 10 * k + i) for i in range(3)] for k in range(5)]


def run_forwards(model):
    """As in a rollout, each rank runs a different number of forward passes."""
    with unsharded(model) as whole, torch.no_grad():
        for _ in range(1 + 2 * rank()):
            device = whole.model.embed_tokens.weight.device
            whole(torch.zeros(1, 5, dtype=torch.long, device=device))


def train_policy(checkpoint, out):
    from compress import Chat
    from mgrpo import MGRPO, Config, update
    device = init_dist()
    chat = Chat(load_tokenizer(checkpoint), "You browse the web.")
    model = shard(tiny_model(vocab_size=chat.tokenizer.get_vocab_size()))
    reference = shard(tiny_model(seed=1, vocab_size=chat.tokenizer.get_vocab_size())).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    lines = []
    for step in range(3):
        run_forwards(model)
        episodes = [tau for group in groups(chat, step)[rank()::world_size()] for tau in group]
        cfg = Config(G=3, beta=0.1, max_tokens=300, loss_norm=("paper", "token", "constant")[step])
        method = MGRPO(cfg, chat, model, reference, optimizer, device)
        rows, _ = method.learn_from(episodes, step)
        lines.append(update(method, rows))
    state = full_state(model)
    if rank() == 0:
        torch.save({"state": state, "metrics": lines}, out)


VARIANTS = (0, 4)  # the rank of LoRA


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)


def train_step(model, optimizer, step, world=1, member=0):
    """One step on the member's share of eight rows; returns the loss of this share and the gradients.

    With LoRA there is a distance to the reference, which is the same model without its adapters.
    """
    rows = torch.randint(0, 400, (8, 24), generator=torch.Generator().manual_seed(step))[member::world]
    row = rows, torch.arange(24).expand_as(rows) >= 15
    logp_N, _, _ = token_logprobs(model, *row)
    loss = -logp_N.sum() / 72
    if model.lora:
        with torch.no_grad(), as_reference(model):
            logp_ref_N, _, _ = token_logprobs(model, *row)
        loss = loss + ((logp_ref_N - logp_N) ** 2).sum() / 72
    (loss * world).backward()  # FSDP averages over ranks
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), gradients


def train_model(checkpoint, out):
    """All weights, and with LoRA."""
    device, groups = init_dist(), dist.distributed_c10d._world.pg_map
    for lora in VARIANTS:
        torch.manual_seed(0)
        path = Path(out) / f"lora-{lora}"
        model = load(checkpoint, sharded=True, lora=lora)
        model.recompute = True
        total = sum(p.numel() for p in model.parameters())
        held = sum(p.to_local().numel() for p in model.parameters())
        share = total / world_size()
        assert held <= share * 1.05, f"this rank holds {held} of {total} numbers"
        optimizer, losses, gradients = optimizer_of(model), [], []
        for step in range(3):
            run_forwards(model)
            loss, gradient = train_step(model, optimizer, step, world_size(), rank())
            losses.append(float(all_sum([loss])))
            gradients.append({name: g.full_tensor() for name, g in gradient.items()})
            if step == 1:
                save_training(path / "training", model, optimizer, {"step": 2})
        save(model, path / "saved")
        before = len(groups)
        load(checkpoint, sharded=True, lora=lora)  # as the reference policy is
        # Opened again, it goes on from where it was, which is then its reference, on every rank.
        again = load(path / "saved", sharded=True, lora=lora)
        row = torch.arange(24)[None] * 7 % 400, torch.arange(24)[None] >= 15
        with torch.no_grad():
            trained = token_logprobs(model, *row)[0]
            with as_reference(again):
                reference = token_logprobs(again, *row)[0]
            assert torch.equal(token_logprobs(again, *row)[0], trained) and torch.equal(reference, trained)
        timeouts = [group._get_backend(device).options._timeout.total_seconds() for group in groups]
        if rank() == 0:
            torch.save({"losses": losses, "gradients": gradients, "timeouts": timeouts,
                        "new_groups": len(groups) - before}, path / "results.pt")


def resume_model(checkpoint, out):
    """The third step of all that `train_model` has saved."""
    init_dist()
    for lora in VARIANTS:
        path = Path(out) / f"lora-{lora}"
        model = load(checkpoint, sharded=True, lora=lora)
        assert load_training(path / "training", model, optimizer := optimizer_of(model)) == {"step": 2}
        loss, gradient = train_step(model, optimizer, 2, world_size(), rank())
        results = {"loss": float(all_sum([loss])), "gradients": {n: g.full_tensor() for n, g in gradient.items()}}
        if rank() == 0:
            torch.save(results, path / "resumed.pt")


def sample_in_bfloat16(checkpoint, out):
    """The engine's responses, scored as in training and as evaluate.py opens a checkpoint on a GPU."""
    from compress import Chat
    from rollout import Engine
    init_dist()
    model = load(checkpoint, sharded=True, precision="bfloat16")
    end_id = Chat(load_tokenizer(checkpoint), "You browse the web.").end_id
    contexts = [[3 + slot + 4 * rank()] * (20 + slot) for slot in range(3)]

    async def respond(whole):
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in whole.modules())
        engine = Engine(whole, end_id, slots=3, length=64, max_new_tokens=12)
        server = asyncio.ensure_future(engine.serve())
        answers = await asyncio.gather(*(engine.respond(ids, slot, random.Random(slot)) for slot, ids in enumerate(contexts)))
        server.cancel()
        return engine.cache.k.dtype, answers

    with unsharded(model) as whole:
        dtype, answers = asyncio.run(respond(whole))
    gaps = {"sampling": [], "evaluation": []}  # of both to training
    for ids, (response, logps, _) in zip(contexts, answers):
        row = torch.tensor([ids + response])
        marked = torch.arange(row.shape[1])[None] >= len(ids)
        trained, opened = (token_logprobs(m, row, marked)[0].detach() for m in (model, load(checkpoint, torch.bfloat16)))
        gaps["sampling"].append((trained - torch.tensor(logps)).abs().mean().item())
        gaps["evaluation"].append((trained - opened).abs().max().item())
    state = full_state(model)
    if rank() == 0:
        torch.save({"cache": dtype, "master": state["model.norm.weight"].dtype, "config": config_json(model)} | gaps, out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    task = {"model": train_model, "resume": resume_model, "bfloat16": sample_in_bfloat16}.get(sys.argv[1])
    task(*sys.argv[2:]) if task else train_policy(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # as run.command_line does: tearing down the group now and then aborts a rank whose work is done
