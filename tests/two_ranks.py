"""For torchrun: three optimizer steps on several ranks, results to a file. One rank runs the same code.

    two_ranks.py CHECKPOINT OUT            mgrpo.py's update on ragged groups of unequal number
    two_ranks.py model CHECKPOINT OUT      model.py: a model loaded in parts, trained, saved half-way
    two_ranks.py resume CHECKPOINT OUT     ... and its last step, on another number of ranks
    two_ranks.py bfloat16 CHECKPOINT OUT   a GPU's precision on CPUs: log-probs of rollout and training
    two_ranks.py head OUT                  a fork's heads, one of which only the first rank has rows for
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
    found = []
    for k in range(5):
        group = []
        for i in range(3):
            success = (i + k) % 2 == 1 and k != 2
            turns = 1 + i + k
            tokens = 2 + (i * k + step) % 7
            seed = 100 * step + 10 * k + i
            group.append(trajectory(chat, float(success), [tokens] * turns, seed=seed))
        found.append(group)
    return found


def run_forwards(model):
    """As in a rollout, each rank runs a different number of forward passes."""
    with unsharded(model) as whole, torch.no_grad():
        device = whole.model.embed_tokens.weight.device
        tokens_BT = torch.zeros(1, 5, dtype=torch.long, device=device)
        for _ in range(1 + 2 * rank()):
            whole(tokens_BT)


def train_policy(checkpoint, out):
    from compress import Chat
    from mgrpo import MGRPO, Config
    device = init_dist()
    chat = Chat(load_tokenizer(checkpoint), "You browse the web.")
    vocab_size = chat.tokenizer.get_vocab_size()
    model = shard(tiny_model(vocab_size=vocab_size))
    reference = shard(tiny_model(seed=1, vocab_size=vocab_size))
    reference.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)

    lines = []
    for step, loss_norm in enumerate(("paper", "token", "constant")):
        run_forwards(model)
        episodes = []
        for group in groups(chat, step)[rank()::world_size()]:
            episodes += group
        cfg = Config(G=3, beta=0.1, max_tokens=300, loss_norm=loss_norm)
        method = MGRPO(cfg, chat, model, reference, optimizer, device)
        rows, _ = method.training_rows(episodes, step)
        lines.append(method.update(rows))

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
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, 400, (8, 24), generator=generator)
    tokens_BT = rows[member::world]
    action_BT = torch.arange(24).expand_as(tokens_BT) >= 15

    logp_N, _, _ = token_logprobs(model, tokens_BT, action_BT)
    loss = -logp_N.sum() / 72  # action tokens of all eight rows
    if model.lora:
        with torch.no_grad(), as_reference(model):
            logp_ref_N, _, _ = token_logprobs(model, tokens_BT, action_BT)
        distance_N = (logp_ref_N - logp_N) ** 2
        loss = loss + distance_N.sum() / 72
    (loss * world).backward()  # FSDP averages over ranks

    gradients = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradients[name] = p.grad.clone()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), gradients


def whole_gradients(gradients):
    """The gradients by name, gathered from the parts that the ranks hold."""
    return {name: part.full_tensor() for name, part in gradients.items()}


def train_model(checkpoint, out):
    """All weights, and with LoRA."""
    device = init_dist()
    process_groups = dist.distributed_c10d._world.pg_map
    for lora in VARIANTS:
        # 1) Open it: every rank holds its share.
        torch.manual_seed(0)
        path = Path(out) / f"lora-{lora}"
        model = load(checkpoint, sharded=True, lora=lora)
        model.recompute = True
        total = sum(p.numel() for p in model.parameters())
        held = sum(p.to_local().numel() for p in model.parameters())
        share = total / world_size()
        assert held <= share * 1.05, f"this rank holds {held} of {total} numbers"

        # 2) Train it, and save its state half-way.
        optimizer = optimizer_of(model)
        positions_BT = torch.arange(24)[None]
        tokens_BT = positions_BT * 7 % 400
        action_BT = positions_BT >= 15
        losses = []
        gradients = []
        for step in range(3):
            run_forwards(model)
            loss, gradient = train_step(model, optimizer, step, world_size(), rank())
            losses += all_sum([loss])
            gradients.append(whole_gradients(gradient))
            if step == 1:
                with torch.no_grad():  # a fork may measure something; FSDP2 then leaves weights gathered
                    token_logprobs(model, tokens_BT, action_BT)
                save_training(path / "training", model, optimizer, {"step": 2})
        save(model, path / "saved")

        # 3) Open it again: it goes on from where it was, which is then its reference, on every rank.
        before = len(process_groups)
        load(checkpoint, sharded=True, lora=lora)  # as the reference policy is
        again = load(path / "saved", sharded=True, lora=lora)
        with torch.no_grad():
            trained, _, _ = token_logprobs(model, tokens_BT, action_BT)
            with as_reference(again):
                reference, _, _ = token_logprobs(again, tokens_BT, action_BT)
            reopened, _, _ = token_logprobs(again, tokens_BT, action_BT)
        assert torch.equal(reopened, trained)
        assert torch.equal(reference, trained)

        # 4) Results.
        timeouts = []
        for process_group in process_groups:
            options = process_group._get_backend(device).options
            timeouts.append(options._timeout.total_seconds())
        results = {
            "losses": losses,
            "gradients": gradients,
            "timeouts": timeouts,
            "new_groups": len(process_groups) - before,
        }
        if rank() == 0:
            torch.save(results, path / "results.pt")


def resume_model(checkpoint, out):
    """The third step of all that `train_model` has saved."""
    init_dist()
    for lora in VARIANTS:
        path = Path(out) / f"lora-{lora}"
        model = load(checkpoint, sharded=True, lora=lora)
        optimizer = optimizer_of(model)
        progress = load_training(path / "training", model, optimizer)
        assert progress == {"step": 2}
        loss, gradient = train_step(model, optimizer, 2, world_size(), rank())
        results = {
            "loss": all_sum([loss])[0],
            "gradients": whole_gradients(gradient),
        }
        if rank() == 0:
            torch.save(results, path / "resumed.pt")


def sample_in_bfloat16(checkpoint, out):
    """The engine's responses, scored as in training and as evaluate.py opens a checkpoint on a GPU."""
    from compress import Chat
    from rollout import Engine
    init_dist()
    model = load(checkpoint, sharded=True, precision="bfloat16")
    end_id = Chat(load_tokenizer(checkpoint), "You browse the web.").end_id
    contexts = []
    for slot in range(3):
        token = 3 + slot + 4 * rank()
        contexts.append([token] * (20 + slot))

    async def respond(whole):
        for module in whole.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        engine = Engine(whole, end_id, n_slots=3, length=64, max_new_tokens=12)
        server = asyncio.ensure_future(engine.serve())
        asked = []
        for slot, ids in enumerate(contexts):
            asked.append(engine.respond(ids, slot, random.Random(slot)))
        answers = await asyncio.gather(*asked)
        server.cancel()
        return engine.cache.k.dtype, answers

    with unsharded(model) as whole:
        dtype, answers = asyncio.run(respond(whole))

    # How far sampling and evaluation are from training.
    for_evaluation = load(checkpoint, torch.bfloat16)
    sampling = []
    evaluation = []
    for ids, (response, logps, _) in zip(contexts, answers):
        tokens_BT = torch.tensor([ids + response])
        action_BT = torch.arange(tokens_BT.shape[1])[None] >= len(ids)
        sampled_N = torch.tensor(logps)
        trained_N, _, _ = token_logprobs(model, tokens_BT, action_BT)
        evaluated_N, _, _ = token_logprobs(for_evaluation, tokens_BT, action_BT)
        sampling_gap_N = (trained_N.detach() - sampled_N).abs()
        evaluation_gap_N = (trained_N.detach() - evaluated_N.detach()).abs()
        sampling.append(sampling_gap_N.mean().item())
        evaluation.append(evaluation_gap_N.max().item())

    state = full_state(model)
    if rank() == 0:
        results = {
            "cache": dtype,
            "master": state["model.norm.weight"].dtype,
            "config": config_json(model),
            "sampling": sampling,
            "evaluation": evaluation,
        }
        torch.save(results, out)


def train_heads(out):
    import bc
    init_dist()
    torch.manual_seed(0)
    model = tiny_model()
    for name in ("all", "first", "none"):
        model.fork_heads[name] = torch.nn.Linear(2, 1)
    x = torch.tensor([1.0, 2.0])
    loss = model.fork_heads["all"](x).sum()
    if rank() == 0:
        loss = loss + model.fork_heads["first"](x).sum()
    loss.backward()

    bc.average_head_gradients(model)

    if rank() == 0:
        torch.save({name: head.weight.grad for name, head in model.fork_heads.items()}, out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tasks = {
        "model": train_model,
        "resume": resume_model,
        "bfloat16": sample_in_bfloat16,
        "head": train_heads,
    }
    task = tasks.get(sys.argv[1])
    if task is None:
        train_policy(*sys.argv[1:])
    else:
        task(*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # as run.command_line does: tearing down the group now and then aborts a rank whose work is done
