"""Training over a Core: fit, evaluation, schedules, checkpoints that survive."""
