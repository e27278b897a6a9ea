from headrace.envs.reasoning_gym import ReasoningGymEnv

ReasoningGymEnv.cli()
