from headrace.envs.jsonl_qa import JsonlQaEnv

JsonlQaEnv.cli()
