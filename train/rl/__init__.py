"""Reinforcement learning conditioned on reasoning effort, and on-policy distillation.

Imports ``train.run`` and what is below it. Read train/tasks/rl.py first, which puts everything together, then
collect.py, batch.py, policy_gradient.py and distill.py. Each file imports only those before it:

    effort             the length term of the reward; group-relative advantages
    rewards            reward functions in processes of their own
    prompts            an endless order over the records of the tasks
    rollout            who generates: this process, or servers
    collect            which prompt starts when; graded groups of responses
    batch              groups to packed rows
    loss               the clipped objective of a batch
    reference          a second policy beside the trained one, and what it says about a batch
    policy_gradient    task=rl: what is trained on, by which losses
    distill            task=distill: the same
    report             what a run prints and draws
    demo               makes what ``make rl-demo`` begins with
"""
