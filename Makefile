# make demo: train a robot policy while its frozen encoder runs as INT8 outside of torch
# make test: lint, type-check and test
PYTHON ?= python3
VENV ?= .venv
# TORCH_INDEX=https://download.pytorch.org/whl/cpu takes torch without CUDA: 0.2 GB instead of 3 GB
TORCH_INDEX ?=
DEMO_ARGS ?=

# a driver binding that shares its name with the one that is installed: tests of the older form read it from here
MBLTML_OLD = mbltml==0.0.0
PEERS := zeus==0.16.0 codecarbon==3.3.2 mblt-tracker==1.0.1
ENERGY_ARGS ?=

PY := $(VENV)/bin/python
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CONSTRAINTS := $(wildcard constraints/py$(VERSION).txt)
PIP_ARGS := $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test test-all test-lightning test-mobilint verify-mobilint lint format bench bench-energy clean setup

demo: setup
	$(PY) examples/robot_policy/check_rendering.py
	$(PY) examples/robot_policy/demo.py $(DEMO_ARGS)

test: setup lint
	$(PY) -m pytest -m "not slow"

test-all: setup lint
	$(PY) -m pytest

# the oldest Lightning that is supported, and one between it and the newest (which `make test` uses)
LIGHTNING_TESTS := $(foreach name,prefetch lightning balance failover energy_meter energy_ddp metering metrics wandb \
	bridge forward_gradient_lightning,tests/test_$(name).py)

test-lightning: $(foreach version,2.4.0 2.5.6,.venv-lightning-$(version)/.tested)

.venv-lightning-%/.tested: setup $(shell find lightning_npu tests -name '*.py')
	test -x .venv-lightning-$*/bin/python || $(PYTHON) -m venv .venv-lightning-$*
	grep -E '^(torch|numpy|onnx|onnx-ir|onnxruntime|onnxscript|pytest|hypothesis)==' $(CONSTRAINTS) > .venv-lightning-$*/constraints.txt
	.venv-lightning-$*/bin/python -m pip install --disable-pip-version-check -q -c .venv-lightning-$*/constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[dev]' lightning==$*
	.venv-lightning-$*/bin/python -m pytest -m "not slow" $(LIGHTNING_TESTS)
	@touch $@

# the versions of the vendor's runtime whose forms differ, each in a folder of its own; 1.1 and 1.2 end with Python 3.12
QB_TESTS := $(foreach name,vendor runtime faults placement doctor verify,tests/test_mobilint_$(name).py)

test-mobilint: $(foreach version,1.1.0 1.2.0 1.3.2 1.4.0 1.5.0,$(VENV)/qbruntime-$(version)/.tested)

$(VENV)/qbruntime-%/.tested: setup $(shell find lightning_npu/runtimes lightning_npu/verify_mobilint tests -name '*.py')
	test -d $(@D)/qbruntime || $(PY) -m pip install --disable-pip-version-check -q --no-deps --target $(@D) mobilint-qb-runtime==$*
	PYTHONPATH=$(@D) $(PY) -c 'import qbruntime, sys; found = qbruntime.__version__; sys.exit(found != "v$*" and found)'
	PYTHONPATH=$(@D) $(PY) -m pytest $(QB_TESTS)
	@touch $@

# VERIFY_ARGS="encoder.npu --device 0": checks a real board, and prints a report to paste into an issue
verify-mobilint: setup
	$(PY) -m lightning_npu.verify_mobilint $(VERIFY_ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup
	$(PY) benchmarks/encoder_speed.py
	$(PY) benchmarks/encoder_fidelity.py
	$(PY) benchmarks/forward_overhead.py
	$(PY) benchmarks/bookkeeping.py
	$(PY) benchmarks/overlap.py
	$(PY) benchmarks/overlap.py --python
	$(PY) benchmarks/balance.py
	$(PY) benchmarks/mobilint_attention.py --weights trained

# beside zeus, codecarbon and mblt-tracker, whose dependencies exclude each other's and ours: an environment of its own
bench-energy: .venv-peers/.installed
	.venv-peers/bin/python benchmarks/energy_accuracy.py $(ENERGY_ARGS)

.venv-peers/.installed: pyproject.toml
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers || $(PYTHON) -m virtualenv .venv-peers
	.venv-peers/bin/python -m pip install --disable-pip-version-check -q $(PEERS) nvidia-ml-py==13.615.71 psutil
	.venv-peers/bin/python -m pip install --disable-pip-version-check -q --no-deps -e .
	@touch $@

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is needed; found $(VERSION). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv $(VENV) || \
		{ echo "No virtual environment can be made; type: apt-get install python3-venv"; exit 1; }
	$(PY) -m pip install --disable-pip-version-check -q $(PIP_ARGS) -e '.[dev,robot]'
	@test -d $(VENV)/mbltml-0.0.0 || \
		$(PY) -m pip install --disable-pip-version-check -q --no-deps --target $(VENV)/mbltml-0.0.0 $(MBLTML_OLD) || \
		echo "No $(MBLTML_OLD) for this machine: tests of that form are skipped"
	@touch $@

clean:
	rm -rf $(VENV) .venv-lightning-* .venv-peers outputs .pytest_cache .mypy_cache .ruff_cache
