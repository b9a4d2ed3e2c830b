# Two commands for a stranger: `make train` and `make test`. Each does all of its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install train test lint docs clean peers-env

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV), with torch: one to four minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

train: install
	$(BIN)/armillary train language_model --workers 2

# Bytecode is kept, whatever the environment says: tests start hundreds of processes.
test: install
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --ignore tests/benchmarks $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages of docs/ as a site in build/site. A dead link, an unknown name in the API or any other warning is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

# The frameworks of benchmarks/peers, beside this package, in an environment of their own. Minutes: Horovod is compiled.
PEERS := .venv-peers
PEERS_PIP := $(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt

peers-env: $(PEERS)/.installed

$(PEERS)/.installed: pyproject.toml constraints.txt $(wildcard benchmarks/peers/*.txt) benchmarks/peers/build_horovod.py
	$(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) -e ".[cli,plot]" -r benchmarks/peers/requirements.txt
	$(PEERS_PIP) --no-deps -r benchmarks/peers/torchrec.txt
	DS_BUILD_OPS=0 $(PEERS_PIP) --no-build-isolation -r benchmarks/peers/deepspeed.txt
	$(PEERS)/bin/python benchmarks/peers/build_horovod.py .cache/peers
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) runs .mypy_cache .ruff_cache .pytest_cache
