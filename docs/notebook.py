# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A language model learns to write programs that play 2048
#
# This notebook shows `gpt_2048_rl.py` at work: the game, the jail for strategies, their rewards, and a training run.
# Without a GPU it trains an embedded model with 1 M parameters, in some minutes on two CPU cores. With a GPU it trains
# `unsloth/gpt-oss-20b` in MXFP4. All numbers and programs below come from running it from top to bottom.
#
# In Colab, clone the repository or upload its files first. Then run `!./setup.sh --here` once and restart the runtime.

# %%
import os
import warnings

import matplotlib.pyplot as plt
from IPython.display import Markdown, display
from rich.console import Console

import gpt_2048_rl as program
from toolkit.run.reading import read_run
from toolkit.run.watch import board_picture

warnings.filterwarnings("ignore", "IProgress")  # without widgets, progress bars are text

# %% [markdown]
# ## The game
# A 6x6 board. A move slides all tiles, equal tiles merge, and then a 2 appears (or, one time in ten, a 4).

# %%
game = program.GameBoard(6, seed=3)
for turn in range(200):
    game.move(turn % 4)
board_picture([tile for row in game.board() for tile in row], cell=48)

# %% [markdown]
# ## Strategies and their rewards
# A strategy is a function of the board that returns one key. It runs in its own process, which can neither open a file
# nor reach the network, and the board is kept in another process. So endless loops, cheats and crashes end only their
# own game.

# %%
STRATEGIES = {
    "random keys": 'import random\ndef strategy(board):\n    return random.choice("éuai")\n',
    "always left": 'def strategy(board):\n    return "a"\n',
    "never ends": "def strategy(board):\n    while True:\n        pass\n",
    "writes 2048 into the board": 'def strategy(board):\n    board[0][0] = 2048\n    return "a"\n',
    "reads a file": 'def strategy(board):\n    return open("/etc/passwd").read()\n',
}
rows = ["| strategy | how its game ended | largest tile | reward |", "|---|---|---|---|"]
for name, source in STRATEGIES.items():
    ((result,),) = program.execute_strategies([source], (1,), timeout=1.0)
    reward = sum(part([source], seeds=[(1,)], timeout=[1.0])[0] for part in program.REWARDS)
    rows.append(f"| {name} | {result.outcome} | {result.max_tile} | {reward:.2f} |")
display(Markdown("\n".join(rows)))

# %% [markdown]
# Random keys nearly always reach 2048 on a 6x6 board. So reaching 2048 says little: results need a comparison with
# random play, and training has to go on to harder games.
#
# ## The prompt

# %%
print(program.build_prompt(6, 2048))

# %% [markdown]
# ## Training
# Each step samples a group of programs for the same boards. Programs better than the group's mean become more likely.
# Every step prints a line that shows whether there is anything to learn from. If you stop the cell, run it again: it
# continues from the last checkpoint. A finished run is not repeated unless you remove its folder.

# %%
config = program.parse_arguments(["--run-name", "notebook", *os.environ.get("NOTEBOOK_FLAGS", "").split()])
folder = config.output_dir / "notebook"
if not (folder / "result.json").exists():
    program.train(config, Console(force_jupyter=False, force_terminal=False, width=140))

# %% [markdown]
# ## Results
# The first picture is what the optimizer sees. The other two are what we want: programs that work and tiles that grow.

# %%
run = read_run(folder)
pictures = {
    "mean reward": ["games/reward"],
    "share of programs that load, and of games won": ["games/works", "games/won"],
    "target, and median largest tile": ["games/target", "games/largest_tile"],
}
figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
for axis, (title, names) in zip(axes, pictures.items(), strict=True):
    for name in names:
        axis.plot(run.curves[name].keys(), run.curves[name].values(), label=name.removeprefix("games/"))
    axis.set(title=title, xlabel="step")
    if "tile" in title:
        axis.set_yscale("log", base=2)
    axis.legend()

# %%
for stage, played in run.held_out.items():
    rows = [f"| {stage}, held out | made {played.target} | median largest tile |", "|---|---|---|"]
    rows += [f"| {name} | {score.won:.0%} ({score.won_low:.0%} to {score.won_high:.0%}) "
             f"| {score.largest_tile_median:.0f} |" for name, score in played.scores.items()]  # fmt: skip
    display(Markdown("\n".join(rows)))

# %% [markdown]
# ## How the programs changed
# The program with the median reward of the first step and of the last.

# %%
for number in (min(run.steps), max(run.steps)):
    ranked = sorted(run.steps[number].attempts, key=lambda attempt: attempt.reward)
    middle = ranked[len(ranked) // 2]
    display(Markdown(f"**Step {number}**: {middle}\n```python\n{middle.source}\n```"))

# %% [markdown]
# ## The best program, and the end of its best game

# %%
display(Markdown(f"```python\n{run.best}\n```"))
board_picture(run.game["end"], cell=48)

# %% [markdown]
# `report.html` in the run's folder has more, and a board that replays this game move by move.

# %%
print(folder / "report.html")
