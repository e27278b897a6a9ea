from headrace.envs.number_guess import NumberGuessEnv

NumberGuessEnv.cli()
