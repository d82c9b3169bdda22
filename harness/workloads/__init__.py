"""What is trained on: tasks with prompts, held-out problems, rewards and checkers."""
