"""Tests of gpt_2048_rl.py: game, jail, rewards, training."""
