"""How well the small base reads: exercises that it was not trained on, by kind.

    python tests/tools/reading.py worlds/base --n 100 [--manner none] [--whole] [--words 1 --size 4]

A response counts if every token is the likeliest one after those before it, which is what greedy decoding would write.
`whole` judges thought and action; `action` judges the action behind the right thought, since a visit can be thought
about in more than one way.
"""
import argparse
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))
import run  # noqa: F401  first: it sets up OpenMP before torch loads

import torch

from compress import PLACEHOLDER, micro_batches, open_chat, pack, replay, trajectory_rows
from model import load
from rollout import actions_help
from worlds.sandbox import exercises, websites
from worlds.sandbox.vocabulary import MANNERS


@torch.no_grad()
def judge(model, chat, record: dict) -> list[tuple[bool, bool]]:
    """(whole response right, action right) for every response of an exercise that is learned."""
    tau = replay(chat, record)
    rows = trajectory_rows(chat.of_record(tau.task), tau)
    learned = [row for row, turn in zip(rows, tau.turns) if turn.observation != PLACEHOLDER]
    answer, out = chat.tokenizer.token_to_id("<answer>"), []
    for batch in micro_batches(learned, 10**9):
        inputs = pack(batch, "cpu")
        predicts = inputs["action_BT"].roll(-1, 1)  # the positions before those of responses
        logits_ND = model(inputs["tokens_BT"], inputs["positions_BT"], segments=inputs["segments"],
                          head=lambda x_BTD: model.logits(x_BTD[predicts]))
        ids = inputs["tokens_BT"][inputs["action_BT"]]
        for right, token in zip((logits_ND.argmax(-1) == ids).split([row.n_action for row in batch]),
                                ids.split([row.n_action for row in batch])):
            start = token.tolist().index(answer) if answer in token else 0  # 0: a response without thoughts
            out.append((bool(right.all()), bool(right[start:].all())))
    return out


def table(model, chat, n: int, seed: str, manner: str = "short", compress: bool = True, size: int = 18,
          words: int = 2):
    """Prints a line for each kind of exercise: n of each kind about one page, n // 2 visits with each kind of goal."""
    rng = Random(f"reading {seed}")
    how = dict(manner=manner, compress=compress)

    def line(name: str, records: list[dict]):
        judged = [judge(model, chat, record) for record in records]
        turns = sum(judged, [])
        share = lambda hits: f"{sum(hits) / len(hits):7.1%}"
        print(f"{name:20}{share([w for w, _ in turns])}{share([a for _, a in turns])}"
              f"{share([all(a for _, a in one) for one in judged])}{len(turns):7}", flush=True)

    print(f"{'':20}  whole action   all of its actions, responses")
    for kind in exercises.FIRST if words == 1 else exercises.FULL:
        line(kind, [exercises.exercise(rng, size, kind, words=words, **how) for _ in range(n)])
    if words == 1:
        return
    for goal in websites.GOALS:
        visits = [websites.visit(rng, goal) for _ in range(n // 2)]
        line(f"visit: {goal}", [exercises.record(rng, "visit", visit.task, visit.moments, **how) for visit in visits])
    line("all visits", [exercises.exercise(rng, kind="visit", **how) for _ in range(n)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--n", type=int, default=100, help="exercises of each kind")
    parser.add_argument("--seed", default="0", help="of the exercises; training draws from others")
    parser.add_argument("--manner", default="short", choices=MANNERS, help="of the responses")
    parser.add_argument("--whole", action="store_true", help="pages stay in the history")
    parser.add_argument("--size", type=int, default=18, help="elements of the largest single pages")
    parser.add_argument("--words", type=int, default=2, help="1: names of one word and nothing else, as training begins")
    args = parser.parse_args()
    if args.n < 2:
        raise ValueError(f"--n {args.n}: give at least 2; there are half as many visits with each kind of goal.")
    torch.set_num_threads(1)
    chat = open_chat(args.model, actions_help())
    model = load(args.model, torch.float32, torch.device("cpu"))
    table(model, chat, args.n, args.seed, args.manner, not args.whole, args.size, args.words)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"reading.py: {error}")
