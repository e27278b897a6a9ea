from headrace.envs.judge import JudgeEnv

JudgeEnv.cli()
