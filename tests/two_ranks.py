"""Run by torchrun on two ranks: three optimizer steps on ragged groups, then the weights to a file. On one rank the same."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
from conftest import tiny_model
from test_mgrpo import trajectory

from compress import Chat
from mgrpo import Config, group_advantages, update
from model import full_state, init_dist, load_tokenizer, rank, shard, unsharded, world_size


def groups(chat, step):
    """Five groups of unequal length; the first rank gets three of them, one without variance."""
    return [[trajectory(chat, float((i + k) % 2 and k != 2), [2 + (i * k + step) % 7] * (1 + i + k), seed=100 * step + 10 * k + i)
             for i in range(3)] for k in range(5)]


def main(checkpoint, out):
    torch.set_num_threads(1)
    device = init_dist()
    chat = Chat(load_tokenizer(checkpoint), "You browse the web.")
    model = shard(tiny_model(vocab_size=chat.tokenizer.get_vocab_size()))
    reference = shard(tiny_model(seed=1, vocab_size=chat.tokenizer.get_vocab_size())).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    lines = []
    for step in range(3):
        with unsharded(model), torch.no_grad():  # as in a rollout: each rank runs as many forwards as it likes
            for _ in range(1 + 2 * rank()):
                model(torch.zeros(1, 5, dtype=torch.long))
        kept = [g for g in map(group_advantages, groups(chat, step)[rank()::world_size()]) if g]
        lines.append(update(model, reference, optimizer, kept, chat, Config(beta=0.1, max_tokens=300), device))
    state = full_state(model)
    if rank() == 0:
        torch.save({"state": state, "metrics": lines}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
