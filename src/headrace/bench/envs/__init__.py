"""`headrace bench envs`: what an environment's machinery costs beside the rollouts themselves."""
