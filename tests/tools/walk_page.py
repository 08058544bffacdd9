"""Writes assets/walk.html from what walk.compute measured: walk_page.html with the data put into it.

The page gets the episode of the walk in full (histories token by token, attention, pictures) and of the whole
group what advantages and the loss need: rewards, pages by number, and each token's log-prob when it was
sampled and before every update. Its script computes the rest; tests/test_walk.py compares it with mgrpo.py.
"""
import base64
import json
from pathlib import Path

import torch

from walk_text import parts_of

from compress import Chat, Trajectory, context

TEMPLATE = Path(__file__).with_name("walk_page.html")
GAMMA = 0.95  # forks/gigpo.py's discount a turn


def texts(chat: Chat, ids: list[int]) -> list[str]:
    return [chat.tokenizer.decode([i], skip_special_tokens=False) for i in ids]


def history(chat: Chat, tau: Trajectory, t: int) -> list[dict]:
    """h_t in parts: {"name", "tokens"}."""
    return [{"name": name, "tokens": texts(chat, ids)} for name, ids in parts_of(chat, tau, t)]


def packed(weights_NT: torch.Tensor) -> str:
    """Attention as base64, a byte a weight: 255 sqrt(weight), so that small ones are not all 0."""
    return base64.b64encode((255 * weights_NT.sqrt()).round().byte().numpy().tobytes()).decode()


def copying_layer(walk) -> int:
    """The layer that looks most at earlier places of the very token that it is about to write."""
    chat, tau, t = walk.chat, walk.parting.right, walk.parting.turn
    ids_T = torch.tensor(context(chat, tau, t) + tau.turns[t].action_ids)
    weights_LNT = walk.attention[t]
    same_NT = ids_T == torch.tensor(tau.turns[t].action_ids)[:, None]
    return int((weights_LNT * same_NT).sum((1, 2)).argmax())


def walked_turns(walk, pictures: Path) -> list[dict]:
    chat, tau = walk.chat, walk.parting.right
    out = []
    for t in range(len(tau.turns)):
        likeliest = []
        for candidates in walk.likeliest[t]:
            likeliest.append([[texts(chat, [i])[0], round(p, 6)] for i, p in candidates])
        picture = pictures / f"turn-{t + 1}.jpg"
        jpeg = base64.b64encode(picture.read_bytes()).decode() if picture.exists() else ""
        out.append({"history": history(chat, tau, t), "likeliest": likeliest, "picture": jpeg,
                    "attention": [packed(weights_NT) for weights_NT in walk.attention[t]]})
    return out


def episodes(walk) -> list[dict]:
    chat = walk.chat
    pages = {}
    rows = {id(row.turn): i for i, row in enumerate(walk.rows)}
    out = []
    for tau in walk.group:
        turns = []
        for turn in tau.turns:
            said = {"page": pages.setdefault(turn.observation, len(pages)), "url": turn.url, "action": turn.action,
                    "error": turn.error, "tokens": texts(chat, turn.action_ids), "old": turn.logps}
            if id(turn) in rows:
                said["passes"] = [logps[rows[id(turn)]] for logps in walk.logps]
            turns.append(said)
        out.append({"member": tau.member, "reward": tau.reward, "ok": tau.status == "ok", "turns": turns})
    return out


def data(walk, pictures: Path) -> dict:
    cfg, parting = walk.cfg, walk.parting
    names = ("eps", "beta", "G", "loss_norm", "max_turns", "max_new_tokens", "temperature")
    return {
        "intent": parting.right.task["intent"], "model": walk.record["model"], "task": walk.record["number"],
        "settings": {name: getattr(cfg, name) for name in names}, "gamma": GAMMA,
        "walked": walk.group.index(parting.right), "other": walk.group.index(parting.wrong),
        "turn": parting.turn, "token": parting.token, "updates": len(walk.passes), "layer": copying_layer(walk),
        "layers": len(walk.attention[0]), "turns": walked_turns(walk, pictures), "episodes": episodes(walk),
    }


def html(walk, pictures: Path) -> str:
    # Page text is hostile: without a "<" it cannot close the script element that holds the data.
    text = json.dumps(data(walk, pictures), separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/", text)
