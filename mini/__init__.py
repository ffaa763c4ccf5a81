"""GRPO with nothing hidden: a GPT-2 and its reinforcement learning in plain PyTorch, taught on chess.

    python -m mini chess        builds data, warm-starts a small model, trains it with GRPO, compares before and after
    python -m mini text         the same small GPT learns a text: supervised, by GRPO, by PPO, by denoising
    python -m mini data         writes chess data: A lines by self-play, P lines with stockfish where it is installed
    python -m mini eval         a model on the held-out prompts
    python -m mini sample       completions of one prompt
    python -m mini COMMAND --help

Read in this order, an evening in all: config, model, generate, tokens, weights, rl, train (the machine), then
chess_data, chess_reward, chess_task (one subject), and text_data, text_rl, denoise, text_task (the other).  README.md
has the maths, each formula with its lines.
"""
