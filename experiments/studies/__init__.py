"""Studies that a suite can compute. Each study is one file, next to the TOML file of its suite.

`find.KINDS` lists the studies. The kinds `stability` and `training` are suites of runs. The other
studies compute numbers (see `study`).
"""
