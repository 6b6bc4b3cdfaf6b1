"""Reinforcement learning conditioned on reasoning effort (``task=rl``)."""
