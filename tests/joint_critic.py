"""A fork whose critic trains jointly with the policy: its gradient runs through the policy's own layers.

test_mgrpo.py checks its gradient; test_scripts.py runs `train_critic` on one rank and on two.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
from conftest import tiny_model
from torch import nn

from mgrpo import MGRPO, Config, per_token, update
from model import full_state, load_tokenizer, shard
from run import init_dist, rank, world_size


class Critic(MGRPO):
    """M-GRPO plus (V - r)^2, averaged over action tokens. V is a head on the state that predicts the token."""

    def __init__(self, cfg, chat, model, reference, optimizer, device):
        super().__init__(cfg, chat, model, reference, optimizer, device)
        head = nn.Linear(model.config.hidden_size, 1, bias=False)
        nn.init.constant_(head.weight, 0.1)
        model.heads["critic"] = head.to(device)
        optimizer.add_param_group({"params": head.parameters()})
        self.earned = {}

    def learn_from(self, episodes, step):
        rows, metrics = super().learn_from(episodes, step)
        rewards = {id(turn.logps): tau.reward for tau in episodes for turn in tau.turns}
        self.earned = {id(row): rewards[id(row.logps)] for row in rows}  # a row holds its turn's own list
        return rows, metrics

    def loss(self, batch, logp_N, logp_ref_N, hidden_ND):
        loss, metrics = super().loss(batch, logp_N, logp_ref_N, hidden_ND)
        V_N = self.model.heads["critic"](hidden_ND.float())[:, 0]
        r_N = per_token([self.earned.get(id(row), 0.0) for row in batch], batch, logp_N.device)
        weight_N = per_token([row.weight for row in batch], batch, logp_N.device)  # 0 in a row that only pads
        return loss + (weight_N * (V_N - r_N) ** 2).sum(), metrics


def train_critic(checkpoint, out):
    """Two steps of two updates on ragged groups of unequal number; a rank may get none."""
    from compress import Chat
    from two_ranks import groups
    device = init_dist()
    chat = Chat(load_tokenizer(checkpoint), "You browse the web.")
    model = shard(tiny_model(vocab_size=chat.tokenizer.get_vocab_size()))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    cfg = Config(G=3, max_tokens=300, clip=1e9)
    method = Critic(cfg, chat, model, None, optimizer, device)
    lines = []
    for step in range(2):
        episodes = [tau for group in groups(chat, step)[:3][rank()::world_size()] for tau in group]
        rows, _ = method.learn_from(episodes, step)
        lines += [update(method, rows) for _ in range(2)]
    state = full_state(model)
    if rank() == 0:
        head = model.heads["critic"].weight.detach().clone()
        torch.save({"state": state, "head": head, "metrics": lines}, out)
