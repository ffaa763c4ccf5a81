"""GRPO with nothing hidden: a GPT-2 and its reinforcement learning in plain PyTorch, for chess and for texts.

    python -m mini chess        builds data, warm-starts a small model, trains it with GRPO, evaluates before and after
    python -m mini text         the same small GPT learns a text: supervised, with GRPO, with PPO, by denoising
    python -m mini data         writes chess data: A lines from self-play, P lines from stockfish if it is installed
    python -m mini eval         evaluates a model on the held-out prompts
    python -m mini sample       prints completions of one prompt
    python -m mini COMMAND --help

Read in this order, an evening in all: config, model, generate, tokens, weights, rl and train, then chess_data,
chess_reward and chess_task, then text_data, text_rl, denoise and text_task.  README.md has the maths; each formula
links to its line.
"""
