# `make` alone explains the targets. Each makes or refreshes .venv first, when it has to.
.DEFAULT_GOAL := help

VENV := .venv
INSTALLED := $(VENV)/installed
EVERYTHING := -e '.[dev,postgresql]'
INSTALLED_TESTS := $(VENV)/installed-tests
FOR_TESTS := -e '.[test,postgresql]'
TESTS := $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(INSTALLED_TESTS))
# README.md needs a fifth of the packages; matplotlib draws the demo's picture. Python compiles a
# module at its first import, which saves the time to compile all of torch.
INSTALLED_DEMO := $(VENV)/installed-demo
FOR_DEMO := --no-compile -e '.[page]' matplotlib
DEMO := $(firstword $(wildcard $(INSTALLED) $(INSTALLED_TESTS)) $(INSTALLED_DEMO))
BUF_VERSION := 1.75.0
BUF := build/buf-$(BUF_VERSION)/node_modules/.bin/buf
STUBS := common/potluck/rpc
NOTEBOOKS := $(wildcard examples/notebooks/*.ipynb)

# To be given on the command line.
PYTHON ?=
PIP_FLAGS ?=
ARGS ?=

# Test files run side by side, each from its first test to its last, and what takes longest first
# (tests/support/side_by_side.py). Real processes also wait, so one worker more than processors.
PROCESSORS := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
WORKERS ?= $(shell echo $$(($(PROCESSORS) + 1)))
SIDE_BY_SIDE := --dist loadfile --numprocesses

# pytest rewrites the assertions of each file; later suites reuse what the first has stored.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:
	@echo "Potluck: federated learning that decides well who trains."
	@echo
	@echo "  make demo        start a coordinator and client processes here and watch them train;"
	@echo "                   installs only what that needs, in a minute beside the download of torch"
	@echo "                   options: make demo ARGS='--rounds 5 --seed 7'; all: make demo ARGS=--help"
	@echo "  make test        run the tests of code and files, in 3 minutes; some: make test ARGS='-k wheel'"
	@echo "  make test-federation"
	@echo "                   run those with real processes, gRPC and faults, in a quarter of an hour"
	@echo "  make test-gpu    run what needs a GPU; skipped where there is none"
	@echo "  make test-slow   run those with containers, databases, Slurm, matrices and many kills"
	@echo "  make bench-smoke run the smoke tier of the benchmark of selection, in 8 minutes on two cores"
	@echo "  make check       what a commit must pass: style, types, schema, generated stubs"
	@echo "  make protos      regenerate the stubs in $(STUBS) after editing protos/"
	@echo "  make pages       rewrite docs, dashboards and pictures that are made from the code"
	@echo "  make docs        build the documentation as a site in build/site; nothing is fetched"
	@echo "  make venv        only make $(VENV), with the versions in constraints.txt; on Linux"
	@echo "                   pip's torch brings CUDA along, several GB; without a GPU it takes 3.2 GB:"
	@echo "                   make venv PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'"
	@echo "                   another interpreter (3.11 or newer): make venv PYTHON=/path/to/python3"
	@echo "  make clean       remove caches and build products; $(VENV) stays (rm -r $(VENV))"
	@echo
	@echo "Begin with 'make demo'. README.md goes on from there, CONTRIBUTING.md is for changing things."

.PHONY: venv
venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(call install,$(EVERYTHING))
	$(compile_after_demo)

$(INSTALLED_TESTS): pyproject.toml constraints.txt
	$(call install,$(FOR_TESTS))
	$(compile_after_demo)

# Compiling warns about some libraries, and in tests a warning is an error.
define compile_after_demo
	@if [ -e $(INSTALLED_DEMO) ]; then $(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true; fi
endef

$(INSTALLED_DEMO): pyproject.toml constraints.txt
	$(call install,$(FOR_DEMO))

# $(call install,WHAT): into $(VENV), which is made first where there is none that suits.
define install
	@candidates="$(if $(PYTHON),$(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python)"; \
	suits='import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'; \
	if $(VENV)/bin/python -c "$$suits" 2>/dev/null; then exit 0; fi; \
	for candidate in $$candidates; do \
		if "$$candidate" -c "$$suits" 2>/dev/null; then \
			echo "Making $(VENV) with $$("$$candidate" --version) ($$candidate)"; \
			exec "$$candidate" -m venv --clear $(VENV); \
		fi; \
	done; \
	echo "No Python 3.11 or newer with the modules venv and ensurepip among: $$candidates." >&2; \
	echo "Install one (Debian: apt-get install python3 python3-venv) or name it: make venv PYTHON=/path/to/python3.11" >&2; \
	exit 1
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt $(1)
	@touch $@
endef

.PHONY: demo
demo: $(DEMO)
	$(VENV)/bin/potluck demo $(ARGS)

# Workers already keep all processors busy. With more threads each, torch's threads wait for each
# other's processor: beside other work, the tests of training took ten times as long.
test test-federation test-slow: export OMP_NUM_THREADS ?= 1

.PHONY: test
test: $(TESTS)
	$(VENV)/bin/pytest tests/unit -m "not slow" $(SIDE_BY_SIDE) $(PROCESSORS) $(ARGS)

.PHONY: test-federation
test-federation: $(TESTS)
	$(VENV)/bin/pytest tests/integration tests/e2e tests/adversary tests/gpu -m "not slow" $(SIDE_BY_SIDE) $(WORKERS) $(ARGS)

# Their bodies run on a processor too, in test-federation.
.PHONY: test-gpu
test-gpu: $(TESTS)
	$(VENV)/bin/pytest tests -m gpu $(ARGS)

# pytest exits with 5 where it finds nothing to run.
.PHONY: test-slow
test-slow: $(TESTS)
	$(VENV)/bin/pytest -m slow $(SIDE_BY_SIDE) $(WORKERS) $(ARGS) || { \
		status=$$?; \
		if [ $$status -ne 5 ]; then exit $$status; fi; \
		echo "No slow tests to run."; \
	}

.PHONY: bench-smoke
bench-smoke: $(TESTS)
	$(VENV)/bin/potluck bench --tier smoke $(ARGS)

# Separate targets, so that `make -k check` shows everything that is wrong at once.
.PHONY: check check-style check-types check-schema check-stubs
check: check-style check-types check-schema check-stubs

check-style: $(INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

check-types: $(INSTALLED)
	$(VENV)/bin/mypy
	$(VENV)/bin/python tools/notebook_files.py --code build/notebooks $(NOTEBOOKS)
	$(VENV)/bin/pyright

check-schema: $(BUF)
	$(BUF) lint
	$(BUF) format --diff --exit-code

check-stubs: $(INSTALLED)
	@rm -rf build/stubs && mkdir -p build/stubs
	$(call generate,build/stubs)
	@diff -r -u --exclude=__pycache__ --exclude=py.typed $(STUBS) build/stubs/potluck/rpc || { \
		echo "$(STUBS) does not match protos/: run 'make protos' and commit the result" >&2; exit 1; }

.PHONY: protos
protos: $(INSTALLED)
	rm -f $(STUBS)/v1/*_pb2*.py $(STUBS)/v1/*_pb2*.pyi
	$(call generate,common)

# What tests compare with the code. A page or a picture is replaced only when it is whole.
.PHONY: pages
pages: $(INSTALLED)
	@mkdir -p build
	$(VENV)/bin/python tools/metrics_page.py > build/metrics.md && mv build/metrics.md docs/reference
	$(VENV)/bin/python tools/rooms_picture.py > build/rooms.svg && mv build/rooms.svg docs/images
	$(VENV)/bin/python tools/package_tables.py
	$(VENV)/bin/python tools/house_figures.py --page
	$(VENV)/bin/python tools/system_picture.py > build/system.svg && mv build/system.svg docs/images
	$(VENV)/bin/python tools/round_picture.py > build/round.svg && mv build/round.svg docs/images
	$(VENV)/bin/python tools/secagg_picture.py > build/secure-sum.svg && mv build/secure-sum.svg docs/images
	$(VENV)/bin/python tools/compatibility_table.py docs/reference/strategies/compatibility.md
	PYTHONPATH=tools $(VENV)/bin/python tools/reference_pages.py
	PYTHONPATH=tools $(VENV)/bin/python tools/leaderboard_page.py
	PYTHONPATH=tools $(VENV)/bin/python -m dashboards deploy/assets/grafana/dashboards
	$(VENV)/bin/python tools/kubernetes_rules.py > build/rules.yaml && mv build/rules.yaml deploy/assets/kubernetes/base
	$(VENV)/bin/python tools/notebook_files.py $(NOTEBOOKS)

.PHONY: docs
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=tools $(VENV)/bin/python -m mkdocs build --strict

# $(call generate,FOLDER): the proto package equals the Python package, so no import is rewritten.
define generate
$(VENV)/bin/python -m grpc_tools.protoc -I protos \
	--plugin=protoc-gen-mypy=$(VENV)/bin/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=$(VENV)/bin/protoc-gen-mypy_grpc \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=$(1) --mypy_grpc_out=$(1) \
	protos/potluck/rpc/v1/*.proto
endef

# buf's npm package is a launcher and one binary; its install script is not needed.
$(BUF):
	@command -v npm >/dev/null || { \
		echo "npm is missing, and buf comes from it: install Node.js (Debian: apt-get install npm)" >&2; exit 1; }
	npm install --prefix build/buf-$(BUF_VERSION) --no-save --no-package-lock --ignore-scripts \
		--no-audit --no-fund @bufbuild/buf@$(BUF_VERSION)

.PHONY: clean
clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage potluck-demo
	find $(wildcard api client common deploy experiments integrations page privacy relay secagg server verifiable tests tools benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +
