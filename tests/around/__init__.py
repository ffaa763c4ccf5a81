"""Tests of what stands around the program: command line, set-up, container, notebook, other trainers, benchmarks."""
