"""browsergym-core's environment steps a second, for bench.py, which runs this in an environment that has it (and the
Chromium of its Playwright, for the chat window that it opens beside):

    python tests/browsergym_steps.py URL STEPS
"""
import random
import sys
import time

from browsergym.core.action.highlevel import HighLevelActionSet
from browsergym.core.env import BrowserEnv
from browsergym.core.task import OpenEndedTask


def links(snapshot: dict) -> list[str]:
    """The ids of the links in an observation's DOM snapshot, whose names and values are numbers of strings."""
    strings, found = snapshot["strings"], []
    for document in snapshot["documents"]:
        for name, numbers in zip(document["nodes"]["nodeName"], document["nodes"]["attributes"]):
            attributes = {strings[key]: strings[value] for key, value in zip(numbers[::2], numbers[1::2])}
            if strings[name] == "A" and {"bid", "href"} <= set(attributes):
                found.append(attributes["bid"])
    return found


url, steps = sys.argv[1], int(sys.argv[2])
env = BrowserEnv(OpenEndedTask, task_kwargs={"start_url": url}, headless=True,
                 action_mapping=HighLevelActionSet(["bid"]).to_python_code)
observation, _ = env.reset()
rng, began = random.Random(0), time.perf_counter()
for _ in range(steps):
    observation, *_ = env.step(f"click('{rng.choice(links(observation['dom_object']))}')")
    assert not observation["last_action_error"], observation["last_action_error"]
print(steps / (time.perf_counter() - began))
env.close()
