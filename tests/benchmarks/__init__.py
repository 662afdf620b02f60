"""One script a question; run as ``python -m tests.benchmarks.<name>``. Never collected as tests."""
