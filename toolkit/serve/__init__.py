"""What leaves a run: exports, their verification, asking a served model."""
