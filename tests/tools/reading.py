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
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
import run  # noqa: F401  first: it sets up OpenMP before torch loads

import torch

from compress import Chat, Row, micro_batches, open_chat, pack, replay, trajectory_rows
from model import Transformer, load
from rollout import actions_help
from worlds.sandbox import exercises, websites
from worlds.sandbox.vocabulary import MANNERS


class Verdict(NamedTuple):
    """Whether a response is right."""
    whole: bool
    action: bool


def likeliest(model: Transformer, inputs: dict):
    """At each position of a response, the likeliest token given the right ones before it: (N,)"""
    predicting_BT = inputs["action_BT"].roll(-1, dims=1)  # the hidden state at t - 1 predicts token t

    def head(x_BTD):
        return model.logits(x_BTD[predicting_BT])

    logits_NV = model(inputs["tokens_BT"], inputs["positions_BT"], head=head, segments=inputs["segments"])
    return logits_NV.argmax(-1)


def judge_batch(model: Transformer, chat: Chat, batch: list[Row]) -> list[Verdict]:
    """A verdict on the response of every row."""
    inputs = pack(batch)
    ids_N = inputs["tokens_BT"][inputs["action_BT"]]
    right_N = likeliest(model, inputs) == ids_N
    answer_tag = chat.tokenizer.token_to_id("<answer>")

    verdicts = []
    counts = [row.n_action for row in batch]
    for ids, right in zip(ids_N.split(counts), right_N.split(counts)):
        start = 0  # of the action, in a response without thoughts
        if answer_tag in ids:
            start = ids.tolist().index(answer_tag)
        whole = bool(right.all())
        action = bool(right[start:].all())
        verdicts.append(Verdict(whole, action))
    return verdicts


@torch.no_grad()
def judge(model: Transformer, chat: Chat, record: dict) -> list[Verdict]:
    """Verdicts on the responses of an exercise that are learned."""
    tau = replay(chat, record)
    learned = trajectory_rows(chat.for_task(tau.task), tau)

    verdicts = []
    for batch in micro_batches(learned, max_tokens=10**9):
        verdicts += judge_batch(model, chat, batch)
    return verdicts


def draw(args):
    """Yields (name, exercises): args.n of each kind about one page, then half as many visits with each kind of goal,
    then args.n mixed visits."""
    rng = Random(f"reading {args.seed}")
    how = {"manner": args.manner, "compress": not args.whole}

    # 1) About one page.
    kinds = exercises.FULL
    if args.words == 1:
        kinds = exercises.FIRST
    for kind in kinds:
        records = []
        for _ in range(args.n):
            records.append(exercises.exercise(rng, args.size, kind, words=args.words, **how))
        yield kind, records
    if args.words == 1:
        return

    # 2) Visits with one kind of goal.
    for goal in websites.GOALS:
        visits = [websites.visit(rng, goal) for _ in range(args.n // 2)]
        records = []
        for visit in visits:
            records.append(exercises.record(rng, "visit", visit.task, visit.moments, **how))
        yield f"visit: {goal}", records

    # 3) Visits as training draws them.
    records = []
    for _ in range(args.n):
        records.append(exercises.exercise(rng, kind="visit", **how))
    yield "all visits", records


def share(hits: list[bool]) -> str:
    rate = sum(hits) / len(hits)
    return f"{rate:7.1%}"


def line(name: str, judged: list[list[Verdict]]) -> str:
    """judged: a list for each exercise."""
    whole = []
    action = []
    all_actions = []  # of an exercise
    for verdicts in judged:
        actions = [verdict.action for verdict in verdicts]
        whole += [verdict.whole for verdict in verdicts]
        action += actions
        all_actions.append(all(actions))
    return f"{name:20}{share(whole)}{share(action)}{share(all_actions)}{len(action):7}"


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("model")
    parser.add_argument("--n", type=int, default=100, help="exercises of each kind")
    parser.add_argument("--seed", default="0", help="of the exercises; training draws from others")
    parser.add_argument("--manner", default="short", choices=MANNERS, help="of the responses")
    parser.add_argument("--whole", action="store_true", help="pages stay in the history")
    parser.add_argument("--size", type=int, default=18, help="elements of the largest single pages")
    parser.add_argument("--words", type=int, default=2,
                        help="1: names of one word and nothing else, as training begins")
    args = parser.parse_args()
    if args.n < 2:
        raise ValueError(f"--n {args.n}: give at least 2; there are half as many visits with each kind of goal.")

    torch.set_num_threads(1)
    chat = open_chat(args.model, actions_help())
    model = load(args.model)
    print(f"{'':20}  whole action   all of its actions, responses")
    for name, records in draw(args):
        judged = [judge(model, chat, record) for record in records]
        print(line(name, judged), flush=True)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"reading.py: {error}")
