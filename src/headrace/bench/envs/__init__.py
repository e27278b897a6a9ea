"""`headrace bench envs`: what an environment's machinery costs on top of the rollouts themselves."""
