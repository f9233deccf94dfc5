"""Measure a preset for the device at hand: `qfuse tune`.

`plan` says what is tried, `trial` is one run in a process of its own, `runs` starts those and
remembers them, `sweep` puts them in order, `choice` judges, and `table` shows.
"""
