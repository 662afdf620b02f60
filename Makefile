# Every target makes what it needs in .venv the first time and is quick afterwards.
#   PYTHON=python3.12   another interpreter than the first of 3.11 to 3.13 that is found
#   TORCH_INDEX=URL     an index for torch alone, such as https://download.pytorch.org/whl/cpu
#   ARGS=...            more arguments for pytest or for fastdraft

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
PIP := .venv/bin/python -m pip
INSTALL := $(PIP) install -qq --disable-pip-version-check --constraint constraints.txt
TORCH_INDEX ?=
# One process a core and one thread a process: tiny models gain nothing from threads.
PYTEST := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false RAYON_NUM_THREADS=1 OMP_NUM_THREADS=1 \
	.venv/bin/python -m pytest -n auto --dist loadfile

.PHONY: help demo test check slow bench peers docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' Makefile

demo: .venv/.installed ## generate with and without speculation, side by side
	.venv/bin/fastdraft demo $(ARGS)

test: .venv/.installed ## run the tests
	$(PYTEST) $(ARGS)

slow: .venv/.installed ## run the tests that take minutes or gigabytes
	$(PYTEST) -m "slow and not gpu" $(ARGS)

check: .venv/.dev ## formatting, lint, types, import layers
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy
	.venv/bin/python -m pytest --quiet --noconftest tests/test_layers.py

soak: .venv/.installed ## 20,000 calls, with faults (minutes)
	SOAK=20000 $(PYTEST) tests/test_soak.py $(ARGS)

bench: .venv/.bench ## measure: one script a question, pages in docs/benchmarks (two hours; fetches the Qwen pair, 1.6 GB)
	for question in sampling peers rounds quality hostile gamma json load; do \
		.venv/bin/python -m tests.benchmarks.$$question || exit 1; done

peers: .venv/.bench ## make what the benchmarks compare with: llama.cpp and OpenVINO, in environments of their own
	.venv/bin/python -m tests.benchmarks.peer_files

docs: .venv/.docs ## build the documentation into site/
	.venv/bin/mkdocs build --strict

clean: ## remove .venv and everything built
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find fastdraft integrations tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and by itself: see constraints.txt. Dependency groups need pip 25.1.
.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "fastdraft needs Python 3.11 to 3.13; name one: make PYTHON=..." >&2; exit 1; }
	@echo "making .venv with $(PYTHON), a few minutes the first time"
	$(PYTHON) -m venv .venv
	$(PIP) install -qq --disable-pip-version-check --upgrade 'pip>=25.1'
	$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(INSTALL) --group test --editable '.[cli,gguf]'
	@touch $@

.venv/.dev .venv/.docs .venv/.bench: .venv/.%: .venv/.installed
	$(INSTALL) --group $*
	@touch $@
