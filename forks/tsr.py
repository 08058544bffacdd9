"""TSR, trajectory-search rollouts (arXiv 2602.11767, 2026): search while collecting, then M-GRPO.

At each turn the policy samples N responses under the same h_j. The one that a cheap score s rates
best is executed, and only this one trains, with the advantages and the loss of mgrpo.py:

    a_j = argmax s(h_j, a) over a^1, ..., a^N ~ pi_old(. | h_j);   L as in mgrpo.py

Of equally rated responses the first drawn is taken. So a_j is a sample not of pi_old but of

    q(a | h) = pi_old(a | h) w(s(a)),   w(k) = (P(s <= k)^N - P(s < k)^N) / P(s = k)

where k is a rating and P(s = k) the chance that a response drawn from pi_old(. | h) has it. If 80% of the
responses have the best rating and 20% the next, w is 1.25 and 0.00001 (N = 8). Among responses of equal
score, q keeps the policy's proportions. The log-probs are pi_old's own, so rho starts at 1 as in mgrpo.py,
and nothing corrects for w, as in the paper. So the gradient is a biased estimate: rare good ratings weigh
up to N times, others nearly nothing. A rejected response is never seen to fail; it becomes rarer only as
others become likelier. The baseline is the reward of searched episodes. Sampled success is that of policy
and search; evaluation plays the policy alone.

    python forks/tsr.py --model runs/bc --out runs/tsr

Differs from the paper: no beams over whole trajectories and no lookahead. Its code tries a candidate
in a new environment of the same seed, after replaying the actions so far, and compares rewards;
with a browser, each candidate would cost an episode. Ours looks at page and response and knows no
task, so it can only avoid responses that look unusable (14 to 27% of the turns drew again, seeds 31 and 32).
Most responses have the highest rating, so we stop drawing at the first of these: q is the same. The paper's
code trains on the quarter of groups whose rewards vary most; we train, as mgrpo.py does, on all whose rewards
vary.

Differs from mgrpo.py: `collect` passes `best_of` to the rollout. By default it also samples at temperature
1, not 0.7, so assets/results.md compares search and temperature together with M-GRPO.

Metrics: draws_per_turn, and turns_searched, the share of turns that drew more than one response.
"""
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import mgrpo
from compress import Chat, Trajectory
from forks.shared import without_messages
from rollout import ActionError, parse, to_addresses

BEST = 3  # the highest rating: what `rating` has points for


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/tsr"        # the run's directory; at the end it is also the checkpoint
    # TSR
    temperature: float = 1.0     # of sampling and training's log-probs; search forgives bad draws
    candidates: int = 8          # N, responses that a turn may draw; 1: no search


def shows(page: str, response: str, element: str | None) -> bool:
    """Whether the page has the element, by name if the response names it: "# Element: red lamp <5>"."""
    if element is None:
        return True
    label = f"<{element}>"
    named = re.search(r"# Element: (.*\S)", response)
    if named and named[1].endswith(label):
        label = named[1]
    return re.search(rf"[ >]{re.escape(label)}", page) is not None


def rating(response: str, trajectory: Trajectory) -> int:
    """s: how usable a response to the current page looks before it is executed, from 0 to BEST.

    One point if an action can be read, one more if the page shows its element, and one more if it
    was not tried on this page.
    """
    *earlier, now = trajectory.turns
    page = without_messages(now.observation)
    try:
        call = parse(response)
    except ActionError:
        return 0
    action = to_addresses(str(call), trajectory.task)  # as rollout.take_turns does before it acts
    is_shown = shows(page, response, call.element)
    tried_here = [turn.action for turn in earlier if without_messages(turn.observation) == page]
    is_new = action not in tried_here
    return 1 + int(is_shown) + int(is_new)


async def best_of(chat: Chat, cfg: Config, draws_per_turn: list[int], trajectory: Trajectory, draw):
    """Draws responses, one after the other, and returns the best: (ids, log-probs, ended).

    The trajectory's last turn has a page and no action yet. Each await of draw() is another response to
    it; the cache keeps the page in between, so it costs its own tokens only. How many were drawn is
    appended to draws_per_turn.
    """
    best = None
    highest = -1  # below every rating
    for n in range(1, cfg.candidates + 1):
        response = await draw()
        ids, _, _ = response
        rated = rating(chat.decode(ids), trajectory)
        if rated > highest:  # of equally rated responses the first one stays
            best = response
            highest = rated
        if rated == BEST:
            break
    draws_per_turn.append(n)
    return best


class TSR(mgrpo.MGRPO):
    @staticmethod
    def check(cfg):
        if cfg.candidates < 1:
            raise ValueError(f"--candidates {cfg.candidates}: a turn needs at least one response.")

    def collect(self, tasks, env, step, tick=run.ignore):
        """mgrpo.py's, but with search at every turn."""
        self.draws_per_turn = []
        choose = partial(best_of, self.chat, self.cfg, self.draws_per_turn)
        return super().collect(tasks, env, step, tick, choose=choose)

    def training_rows(self, episodes, step):
        """mgrpo.py's, and how much was searched."""
        rows, metrics = super().training_rows(episodes, step)
        draws = self.draws_per_turn
        searched = sum(n > 1 for n in draws)
        responses, turns, searched = run.all_sum([sum(draws), len(draws), searched])
        metrics["draws_per_turn"] = responses / max(turns, 1)
        metrics["turns_searched"] = searched / max(turns, 1)
        return rows, metrics


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=TSR)
    run.command_line(main, Config, __doc__, {"paper": mgrpo.PAPER}, start="runs/bc")
