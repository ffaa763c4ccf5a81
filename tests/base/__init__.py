"""Tests of toolkit/base."""
