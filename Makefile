# make book   builds the course: every lab runs here, the pages show what was measured
# make test   checks everything
# make lab    opens the labs in JupyterLab
# make bench  the figures of speed that the course promises, as a table
# make clean  throws the built book and its measurements away; make distclean also the environment

PYTHON ?= python3
VENV   := .venv
BIN    := $(CURDIR)/$(VENV)/bin
PAGE   := _build/html/index.html

export PATH := $(BIN):$(PATH)
export DS_BUILD_OPS := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1
export PYDEVD_DISABLE_FILE_VALIDATION := 1

.PHONY: book test lint unit site lab bench setup clean distclean
.DELETE_ON_ERROR:

book: $(VENV)/.setup
	jupyter-book build . -W -n --keep-going --all
	@echo; echo "The book: file://$(CURDIR)/$(PAGE)"

# The environment follows requirements.txt: changed pins make a new one.
$(VENV)/.pins: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with PYTHON=...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install -r requirements.txt
	@touch $@

$(VENV)/.zerolab: $(VENV)/.pins pyproject.toml
	$(BIN)/pip install --quiet --no-deps -e .
	@touch $@

# Looks at the machine and compiles DeepSpeed's extension: once for an environment, or whenever `make setup` asks.
$(VENV)/.setup: $(VENV)/.zerolab
	python -m zerolab setup
	@touch $@

setup: $(VENV)/.zerolab
	python -m zerolab setup
	@touch $(VENV)/.setup

# Cheap checks first. The book is then built from nothing, and what it shows is compared with a second run of each lab.
# Results go into _build: your own in labs/results/local stay.
test: lint unit
	rm -rf _build
	ZEROLAB_RESULTS=$(CURDIR)/_build/results $(MAKE) book
	ZEROLAB_RESULTS=$(CURDIR)/_build/results $(MAKE) site

lint: $(VENV)/.zerolab
	ruff check .

unit: $(VENV)/.setup
	pytest tests -m "not site"

site: $(VENV)/.zerolab
	pytest tests/test_site.py tests/test_planner.py _build/jupyter_execute/labs \
	  --nbval --nbval-current-env --nbval-cell-timeout 900 --nbval-sanitize-with tests/nbval_sanitize.cfg --timeout 1000

# Settings of its own, so that nobody's own JupyterLab changes: a double click opens a lab as a notebook.
lab: export JUPYTER_CONFIG_DIR := $(CURDIR)/$(VENV)/etc/course
lab: $(VENV)/.setup
	@jupytext-config set-default-viewer python markdown
	@jupyter labextension disable --level=sys_prefix "@jupyterlab/apputils-extension:announcements"  # no news from elsewhere
	jupyter lab --LabApp.default_url=/lab/tree/labs $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_OPTIONS)

bench: $(VENV)/.setup
	python -m zerolab bench

clean:
	rm -rf _build labs/results/local .pytest_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf $(VENV) labs/*.egg-info
