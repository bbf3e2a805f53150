"""The command line: one file a verb, found by main.py; no logic beyond arguments and printing."""
