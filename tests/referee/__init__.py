"""Tests of toolkit/referee/: the program in an answer, the jail."""
