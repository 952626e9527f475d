"""Commands and what they print: the CLI, data set generation, doctor, report and bench."""
