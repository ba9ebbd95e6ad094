"""What a suite can compute: one file per study, with the published suite as TOML beside it.

`find.KINDS` lists the studies. `stability` and `training` are suites of runs; the others are
numerical studies (see `study`).
"""
