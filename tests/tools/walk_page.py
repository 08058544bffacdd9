"""Writes assets/walk.html from what walk.compute measured: walk_page.html with the data put into it.

The page gets the episode of the walk in full (histories token by token, attention, pictures) and of the whole
group what advantages and the loss need: rewards, pages by number, and each token's log-prob when it was
sampled, before every update and after the last. Its script computes the rest; tests/test_walk.py compares it
with mgrpo.py.
"""
import base64
import json
from pathlib import Path

import torch

from walk_text import parts_of, token_text

from compress import Chat, Trajectory, context

TEMPLATE = Path(__file__).with_name("walk_page.html")
GAMMA = 0.95  # forks/gigpo.py's discount a turn
SETTINGS = ("eps", "beta", "G", "loss_norm", "max_turns", "max_new_tokens", "temperature")


def texts(chat: Chat, ids: list[int]) -> list[str]:
    return [token_text(chat, token) for token in ids]


def history(chat: Chat, tau: Trajectory, t: int) -> list[dict]:
    """h_j in parts: {"name", "tokens"}."""
    parts = []
    for name, ids in parts_of(chat, tau, t):
        parts.append({"name": name, "tokens": texts(chat, ids)})
    return parts


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def packed(weights_NT: torch.Tensor) -> str:
    """Attention as base64, a byte a weight: 255 sqrt(weight), so that small ones are not all 0."""
    scaled_NT = 255 * weights_NT.sqrt()
    bytes_NT = scaled_NT.round().byte()
    return in_base64(bytes_NT.numpy().tobytes())


def copying_layer(walk) -> int:
    """The layer that looks most at earlier places of the very token that it is about to write."""
    tau = walk.parting.right
    t = walk.parting.turn
    response_ids = tau.turns[t].response_ids
    ids_T = torch.tensor(context(walk.chat, tau, t) + response_ids)
    ids_N1 = torch.tensor(response_ids)[:, None]
    same_NT = ids_N1 == ids_T
    on_the_same_LNT = walk.attention[t] * same_NT
    total_L = on_the_same_LNT.sum((1, 2))
    return int(total_L.argmax())


def walked_turns(walk, pictures: Path) -> list[dict]:
    """The turns of the walk's episode, in full."""
    chat = walk.chat
    tau = walk.parting.right
    turns = []
    for t in range(len(tau.turns)):
        likeliest = []  # for each token: [[text, probability], ...]
        for candidates in walk.likeliest[t]:
            shown = []
            for token, p in candidates:
                shown.append([token_text(chat, token), round(p, 6)])
            likeliest.append(shown)
        picture = ""
        file = pictures / f"turn-{t + 1}.jpg"
        if file.exists():
            picture = in_base64(file.read_bytes())
        turns.append({
            "history": history(chat, tau, t),
            "likeliest": likeliest,
            "picture": picture,
            "attention": [packed(weights_NT) for weights_NT in walk.attention[t]],
        })
    return turns


def episodes(walk) -> list[dict]:
    """What the loss needs of every episode of the group."""
    pages = {}  # {text: number}
    rows = {}   # {id of a turn: the index of its row}
    for i, row in enumerate(walk.rows):
        rows[id(row.turn)] = i

    out = []
    for tau in walk.group:
        turns = []
        for turn in tau.turns:
            page = pages.setdefault(turn.observation, len(pages))
            said = {
                "page": page,
                "url": turn.url,
                "action": turn.action,
                "error": turn.error,
                "tokens": texts(walk.chat, turn.response_ids),
                "old": turn.logps,
            }
            if id(turn) in rows:
                i = rows[id(turn)]
                said["passes"] = [logps[i] for logps in walk.logps]
            turns.append(said)
        out.append({
            "member": tau.member,
            "reward": tau.reward,
            "ok": tau.status == "ok",
            "turns": turns,
        })
    return out


def data(walk, pictures: Path) -> dict:
    parting = walk.parting
    return {
        "intent": parting.right.task["intent"],
        "model": walk.record["model"],
        "task": walk.record["number"],
        "settings": {name: getattr(walk.cfg, name) for name in SETTINGS},
        "gamma": GAMMA,
        "walked": walk.group.index(parting.right),
        "other": walk.group.index(parting.wrong),
        "turn": parting.turn,
        "token": parting.token,
        "updates": len(walk.passes),
        "layer": copying_layer(walk),
        "layers": len(walk.attention[0]),
        "turns": walked_turns(walk, pictures),
        "episodes": episodes(walk),
    }


def html(walk, pictures: Path) -> str:
    text = json.dumps(data(walk, pictures), separators=(",", ":"))
    # Page text is hostile: without a "<" it cannot close the script element that holds the data.
    text = text.replace("<", "\\u003c")
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace("/*DATA*/", text)
