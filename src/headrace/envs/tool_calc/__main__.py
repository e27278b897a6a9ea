from headrace.envs.tool_calc import ToolCalcEnv

ToolCalcEnv.cli()
